"""Base orders: which of the pages that nobody waits for leaves first. By id, one file each."""
