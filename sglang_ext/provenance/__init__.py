"""Provenance: how far the KV in the device tree may differ from exact KV, and who may reuse it.

The seam and `truncation` import it.
"""
