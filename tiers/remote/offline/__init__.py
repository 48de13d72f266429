"""A store's values without its servers: a list of them, whether they are sound, their removal."""
