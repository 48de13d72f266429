"""Segment files: their bytes, and how records are appended, read, sealed and found again."""
