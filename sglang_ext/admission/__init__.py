"""Admission: requests in the waiting queue, and whether each loads its pages or computes them.

Runs on the scheduler's thread, which may not block here.

The seam, `ranks`, `truncation`, `provenance`, `simulator` and `assembly` import it.
"""
