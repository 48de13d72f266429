"""Arithmetic coding of many independent streams under 16-bit tables; see README.md.

Kept for the CacheGen baselines: our own codec uses rANS.
"""

from __future__ import annotations

from .api import ACError, Coded, cdfs_of, check_tables, decode, encode

__all__ = ["ACError", "Coded", "cdfs_of", "check_tables", "decode", "encode"]
