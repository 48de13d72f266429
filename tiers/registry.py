"""Tiers by id. A tier's module is imported only when the tier is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_ext.tiers.base import Tier
from sglang_ext.tiers.errors import TierConfigError

_BUILTIN: dict[str, str] = {
    "disk": "sglang_ext.tiers.disk:DiskTier",
    "coded_host": "sglang_ext.tiers.coded_host:MemoryTier",
    "coded_host_disk": "sglang_ext.tiers.coded_host:CachedDiskTier",
}
_TIERS: dict[str, str] = dict(_BUILTIN)


def register_tier(tier_id: str, target: str) -> None:
    """Registers `target` ("module:Class") as the tier called `tier_id`.

    Raises:
        ValueError: the id is taken, or `target` is not of the form "module:Class".
    """
    if tier_id in _TIERS:
        raise ValueError(f"tier {tier_id!r} is already registered as {_TIERS[tier_id]!r}")
    if target.count(":") != 1:
        raise ValueError(f"a tier is registered as 'module:Class', got {target!r}")
    _TIERS[tier_id] = target


def tier_ids() -> tuple[str, ...]:
    """Returns the registered ids, sorted."""
    return tuple(sorted(_TIERS))


def tier_class(tier_id: str) -> type[Tier]:
    """Imports and returns the class of the tier called `tier_id`.

    Raises:
        TierConfigError: no tier has this id.
    """
    if tier_id not in _TIERS:
        raise TierConfigError(f"no tier is called {tier_id!r}; known are {', '.join(tier_ids())}")
    module, name = _TIERS[tier_id].split(":")
    cls: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, Tier)):
        raise TypeError(f"{_TIERS[tier_id]} must be a subclass of Tier")
    return cls
