"""Names of values in a store that do not say of what they are.

A page's hash is a hash of its tokens: who guesses a prompt can look whether it was there. Where
records are encrypted, values are named after keyed hashes instead.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.tiers.protection.aead import Protection
from sglang_ext.tiers.remote.base import RemoteKey


def hidden_key(protection: Protection) -> Callable[[RemoteKey], RemoteKey]:
    """What gives a key other digests. The level stays, and whether there is an adapter does not."""

    def hide(key: RemoteKey) -> RemoteKey:
        page = b"%s%s%s" % (key.namespace, key.page_hash, key.lora)
        return RemoteKey(
            namespace=protection.name(b"namespace", key.namespace),
            page_hash=protection.name(b"page", page),
            level=key.level,
        )

    return hide
