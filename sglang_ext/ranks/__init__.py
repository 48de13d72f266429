"""Ranks: which rank of a server a process is, and what the ranks of a group agree on in each step.

The seam, `identity` and `assembly` import it.
"""
