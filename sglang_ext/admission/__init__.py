"""Admission: requests in the waiting queue, and whether each loads its pages or computes them.

The seam, `ranks`, `truncation` and `assembly` import it.
"""
