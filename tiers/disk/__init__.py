"""The disk tier; `tier.py` is the place to start reading.

Who calls `read` or `write` blocks on the disk; `workers.py` has the threads that share the work.
"""

from sglang_ext.tiers.disk.config import DiskConfig
from sglang_ext.tiers.disk.counters import DiskStats
from sglang_ext.tiers.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskStats", "DiskTier"]
