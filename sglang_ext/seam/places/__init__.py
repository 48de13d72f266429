"""What a remote store is asked of places where prompts of hybrid models can be resumed."""
