"""The window layers of hybrid models: their pages and keys, and where a prompt can be resumed."""
