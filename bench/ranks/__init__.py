"""The case `ranks`: two ranks of a server against plain SGLang."""
