"""Serving in virtual time, over the server's own page store and waiting room."""
