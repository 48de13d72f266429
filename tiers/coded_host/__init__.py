"""Coded records in DRAM: instead of a disk, or in front of one."""

from sglang_ext.tiers.coded_host.cached import CachedDiskTier
from sglang_ext.tiers.coded_host.memory_tier import MemoryTier
from sglang_ext.tiers.disk import DiskTier

RecordTier = DiskTier | CachedDiskTier | MemoryTier
"""What keeps pages as records below the slots, with statistics."""

__all__ = ["CachedDiskTier", "MemoryTier", "RecordTier"]
