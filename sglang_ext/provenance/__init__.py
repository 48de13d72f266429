"""Provenance: how far the KV in the device tree may differ from exact KV, and who may reuse it.

Scheduler's thread only, and nothing blocks.

The seam and `truncation` import it.
"""
