"""Keys for the tests of protected records."""

from __future__ import annotations

from typing import Any

from sglang_ext.tiers.protection import HidingEngine, KeyedSeals, Mode, Protection
from sglang_ext.tiers.remote.base import RemoteEngine

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def seals(mode: str, *keys: bytes) -> KeyedSeals:
    """Seals as another process with these keys would have them."""
    return KeyedSeals(Protection(keys or (KEY,), Mode[mode.upper()]))


def protected_store(engine: RemoteEngine, mode: str, *keys: bytes) -> dict[str, Any]:
    """What `RemoteStore` takes, the engine too; `plain` is without a key."""
    if mode == "plain":
        return {"engine": engine}
    protection = Protection(keys or (KEY,), Mode[mode.upper()])
    if mode == "encrypt":
        engine = HidingEngine(engine, protection.name_keys)
    return {"engine": engine, "seals": KeyedSeals(protection)}
