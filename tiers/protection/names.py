"""Hides the names of values in a shared store, so that a name does not tell its page.

A page's hash is a hash of its tokens: who guesses a prompt can look whether it was there. Where
records are encrypted, values are named after keyed hashes instead.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteEngine,
    Usage,
    Value,
)
from sglang_ext.tiers.remote.shares.division import Division


class HidingEngine(RemoteEngine):
    """Gives values other names in the store behind it. Thread-safe.

    What was stored under the name of an older key is found too, one question later.

    Args:
        engine: speaks to the store; closed by `close`.
        keys: for names, of each of the deployment's keys; the first names what is stored.
    """

    def __init__(self, engine: RemoteEngine, keys: Sequence[bytes]) -> None:
        self.max_value_bytes = engine.max_value_bytes
        self.keeps_ttl = engine.keeps_ttl
        self.tells_size = engine.tells_size
        self.takes_ends = engine.takes_ends
        self._engine = engine
        self._keys = tuple(keys)

    def divide(self, division: Division) -> bool:
        """See `RemoteEngine.divide`."""
        return self._engine.divide(division)

    def used_by_tenant(self) -> list[int]:
        """See `RemoteEngine.used_by_tenant`."""
        return self._engine.used_by_tenant()

    def begin(self) -> None:
        """See `RemoteEngine.begin`."""
        self._engine.begin()

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`."""
        self._engine.ping(deadline)

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`. Values are reported in order.

        So from the first missing one on, reports wait until older names were tried.
        """
        found: dict[int, int] = {}
        missing: list[int] = []
        key, *older = self._keys

        def on_first(at: int, num_bytes: int) -> None:
            if num_bytes == 0 and older:
                missing.append(at)
            if missing:
                found[at] = num_bytes
            else:
                on_fetched(at, num_bytes)

        self._engine.fetch(_renamed(fetches, key), on_first, deadline)
        for other in older:
            asked, missing = missing, []
            if asked:
                again = _renamed([fetches[at] for at in asked], other)
                self._engine.fetch(again, _noting(asked, found, missing), deadline)
        for at, num_bytes in found.items():
            on_fetched(at, num_bytes)

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`."""
        key = self._keys[0]
        renamed = [value._replace(name=hidden_name(key, value.name)) for value in values]
        self._engine.put(renamed, on_stored, deadline)

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`."""
        self._engine.touch(self._all(names), deadline)

    def let_go(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.let_go`."""
        self._engine.let_go(self._all(names), deadline)

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`."""
        return self._engine.delete(self._all(names), deadline)

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`."""
        return self._engine.usage(deadline)

    def close(self) -> None:
        """See `RemoteEngine.close`."""
        self._engine.close()

    def _all(self, names: Sequence[str]) -> list[str]:
        """The hidden names under the first key, then those under the next."""
        return [hidden_name(key, name) for key in self._keys for name in names]


def hidden_name(key: bytes, name: str) -> str:
    """A name of the same form (`remote.base.value_name`) with other digests; the level stays."""
    prefix, namespace, page, lora, rest = name.rsplit(":", 4)
    level = rest.partition("/")[0]
    hidden = hmac.digest(key, f"page:{namespace}:{page}:{lora}:{level}".encode(), "sha256")
    space = hmac.digest(key, f"namespace:{namespace}".encode(), "sha256")
    return f"{prefix}:{space.hex()}:{hidden.hex()}:-:{rest}"


def _renamed(fetches: Sequence[Fetch], key: bytes) -> list[Fetch]:
    return [replace(fetch, name=hidden_name(key, fetch.name)) for fetch in fetches]


def _noting(
    asked: Sequence[int], found: dict[int, int], missing: list[int]
) -> Callable[[int, int], None]:
    """Notes what a second question brought, by the positions of the first."""

    def on_fetched(position: int, num_bytes: int) -> None:
        found[asked[position]] = num_bytes
        if num_bytes == 0:
            missing.append(asked[position])

    return on_fetched
