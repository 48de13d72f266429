"""How long values stay in a remote store, where that is not the store's own decision."""
