"""Ranks: which rank of a server a process is, and what the ranks of a group agree on in each step.

Scheduler's thread only. What blocks it are collectives: that of a step, and the exchanges outside
of it (docs/parallel.md lists them).

The seam, `identity` and `assembly` import it.
"""
