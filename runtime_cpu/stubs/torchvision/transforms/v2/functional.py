"""Imported at start-up as a module; its functions are for images and absent."""
