"""The case `stream`: coded KV over links in virtual time and over real sockets."""
