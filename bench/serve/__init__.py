"""The case `serve`: what a user of the server sees, with the plugin and without."""
