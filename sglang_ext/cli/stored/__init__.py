"""`hier-kv inspect`, `verify`, `prune`: what is stored in a folder or a store, without a server."""
