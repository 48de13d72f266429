"""Ranks: which rank of a server a process is, and what the ranks of a group agree on in each step.

Scheduler's thread only; the collective of a step is the one thing there that blocks it.

The seam, `identity` and `assembly` import it.
"""
