"""Admission: requests in the waiting queue, and whether each loads its pages or computes them.

Runs on the scheduler's thread, which may not block here, but in the collective of a step that
several ranks decide in (`ranks/lockstep.py`).

The seam, `ranks`, `truncation`, `provenance`, `simulator` and `assembly` import it.
"""
