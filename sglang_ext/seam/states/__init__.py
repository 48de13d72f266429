"""State-space layers of hybrid models: where a prompt can be resumed, and what is saved for it."""
