"""Real stores and a bad network between, for tests and measurements of the remote tier."""
