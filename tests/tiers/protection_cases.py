"""Keys for the tests of protected records."""

from __future__ import annotations

from typing import Any

from sglang_ext.tiers.protection import KeyedSeals, Mode, Protection
from sglang_ext.tiers.protection.names import hidden_key

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def seals(mode: str, *keys: bytes) -> KeyedSeals:
    """Seals as another process with these keys would have them."""
    return KeyedSeals(Protection(keys or (KEY,), Mode[mode.upper()]))


def store_settings(mode: str, *keys: bytes) -> dict[str, Any]:
    """What `RemoteStore` takes; nothing for `plain`."""
    if mode == "plain":
        return {}
    protection = Protection(keys or (KEY,), Mode[mode.upper()])
    hide = hidden_key(protection) if mode == "encrypt" else None
    return {"seals": KeyedSeals(protection), "hide": hide}
