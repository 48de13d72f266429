"""A remote store that swaps the parts of pages, forges their headers, and is gone now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sglang_ext.device.states.snapshots import part_hashes
from sglang_ext.device.windows.window_layers import group_hashes
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import HEADER_BYTES, parse_header, write_meta
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteUnavailableError,
    Value,
)
from tests.faults.hostile_targets import DictEngine
from tests.faults.record_mutations import seal


class HostileEngine(DictEngine):
    """Holds what it was given; what it gives may be another page, or another part of the page.

    Args:
        rng: decides.
        lies: share of the names of which it gives something else.
        forges: whether that has the header that was asked for, and the right checksum.
        coarse: whether that is the page itself, with a header that says that it is not exact.
        rots: whether that is the page itself, with its header and other bytes at its end.
        dies: share of the calls in which it is not there.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        lies: float = 0.0,
        forges: bool = False,
        coarse: bool = False,
        rots: bool = False,
        dies: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_lies = 0
        self.dies = dies
        self._rng = rng
        self._lies = lies
        self._forges = forges
        self._coarse = coarse
        self._rots = rots
        self._told: dict[str, bytes] = {}  # a lie is told again, or a checksum would find it

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""
        self._live()
        for at, fetch in enumerate(fetches):
            part = self._said(fetch.name)[fetch.offset :][: fetch.out.size]
            fetch.out[: len(part)] = np.frombuffer(part, np.uint8)
            on_fetched(at, len(part))

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`."""
        self._live()
        super().put(values, on_stored, deadline)

    def _live(self) -> None:
        if self._rng.random() < self.dies:
            raise RemoteUnavailableError("injected")

    def _said(self, name: str) -> bytes:
        value = self.values.get(name, b"")
        if not value:
            return value
        if name not in self._told:
            self._told[name] = value
            if self._rng.random() < self._lies:
                self._told[name] = self._lie(name)
                self.num_lies += self._told[name] != value
        return self._told[name]

    def _lie(self, name: str) -> bytes:
        """The value of another name: mostly of another part of the same page."""
        if self._coarse:
            slot = np.frombuffer(self.values[name], np.uint8).copy()
            meta, payload_bytes = parse_header(slot)
            write_meta(slot, replace(meta, quality=int(Quality.LOSSY)), payload_bytes)
            return seal(bytearray(slot.tobytes()))
        if self._rots:
            value = self.values[name]
            return value[:-64] + bytes(byte ^ 0xFF for byte in value[-64:])
        parts = name.split(":")
        mine = bytes.fromhex(parts[3])
        page = np.frombuffer(mine, np.uint8)[None]
        keys = [group_hashes(page, group) for group in range(3)]
        # Of a state, from a page to a part of it, from a part to its page, and to another part.
        keys += [part_hashes(page, part) for part in range(3)]
        keys += [part_hashes(part_hashes(page, one), part) for one in range(3) for part in range(3)]
        others = [":".join((*parts[:3], key[0].tobytes().hex(), *parts[4:])) for key in keys]
        others = [other for other in others if other != name]
        known = [other for other in others if other in self.values]
        other = self._rng.choice(known if known and self._rng.random() < 0.7 else [*self.values])
        value = self.values[other]
        if not self._forges:
            return value
        theirs = bytes.fromhex(other.split(":")[3])
        header = value[:HEADER_BYTES].replace(theirs, mine)
        return seal(bytearray(header + value[HEADER_BYTES:]))
