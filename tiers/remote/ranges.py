"""Reading parts of values, which whoever asked for them verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import Deadline, Fetch, Outcome, RemoteEngine, RemoteKey
from sglang_ext.tiers.remote.items import GetResult, OnResult


class RangeRequest(NamedTuple):
    """A part of one value to read.

    Attributes:
        key: whose value.
        out: u8 [n], writable and contiguous; takes bytes [offset, offset + n) or up to the value's
            end.
        offset: first byte wanted.
    """

    key: RemoteKey
    out: ByteArray
    offset: int = 0


class RangeReading:
    """The state of one call. One thread.

    Attributes:
        results: one a request: OK with the number of bytes, which nobody has verified; MISSING when
            there are none.
        num_bytes: read so far.
    """

    def __init__(
        self,
        names: Sequence[str],
        requests: Sequence[RangeRequest],
        bad: set[str],
        on_result: OnResult | None,
    ) -> None:
        self._requests = requests
        self._names = names
        self._wanted = [at for at, name in enumerate(names) if name and name not in bad]
        self._on_result = on_result
        self._is_done = [False] * len(requests)
        self.results = [GetResult(Outcome.UNAVAILABLE)] * len(requests)
        self.num_bytes = 0
        for at, name in enumerate(names):
            if not name:
                self._finish(at, GetResult(Outcome.MALFORMED))
            elif name in bad:
                self._finish(at, GetResult(Outcome.MISSING))

    def run(self, engine: RemoteEngine, deadline: Deadline) -> None:
        """Reads everything.

        Raises:
            RemoteError: as the engine's `fetch`; what was read before is in `results`.
        """
        fetches = [
            Fetch(self._names[at], self._requests[at].out, self._requests[at].offset)
            for at in self._wanted
        ]
        if fetches:
            engine.fetch(fetches, self._on_fetched, deadline)

    def fill_up(self, outcome: Outcome) -> None:
        """Gives what was not read its outcome."""
        for at, is_done in enumerate(self._is_done):
            if not is_done:
                self._finish(at, GetResult(outcome))

    def _on_fetched(self, position: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        result = GetResult(Outcome.OK, num_bytes) if num_bytes else GetResult(Outcome.MISSING)
        self._finish(self._wanted[position], result)

    def _finish(self, at: int, result: GetResult) -> None:
        self._is_done[at] = True
        self.results[at] = result
        if self._on_result is not None:
            self._on_result(at, result)
