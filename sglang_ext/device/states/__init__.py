"""The states of hybrid models: snapshots in parts of a page's size, their keys and their copies."""
