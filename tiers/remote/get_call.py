"""One `get`: values are fetched in order, put together from their parts, and verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.checksums import is_plain
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, VerifyResult
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.remote.base import Deadline, Fetch, Outcome, RemoteEngine
from sglang_ext.tiers.remote.items import GetRequest, GetResult, OnResult
from sglang_ext.tiers.remote.record_values import (
    MAX_PART_BYTES,
    HeaderFacts,
    checked_facts,
    has_too_many_parts,
    part_names,
)

# As much is asked for at once as keeps a link busy; more would only lie in the store's buffers.
_GROUP_BYTES = 32 << 20
_OTHERS = frozenset(
    kind.value
    for kind in (VerifyResult.UNPROTECTED, VerifyResult.PROTECTED, VerifyResult.UNKNOWN_KEY)
)


class GetState:
    """The state of one call. One thread.

    The first values of a group of requests are fetched together with the parts that the group
    before lacks, so a stream of long records waits for a round trip a group and no more.

    Attributes:
        results: one a request; of what is not done yet, the outcome is UNAVAILABLE.
        num_bytes: read so far, of every kind.
        rejected: `VerifyResult` values, and `incomplete`, of what was no hit though there.
        bad: names of those, to be stored anew.
        used: names of values that were hits, their parts too.
    """

    def __init__(
        self,
        names: Sequence[str],
        requests: Sequence[GetRequest],
        on_result: OnResult | None,
        part_bytes: int,
        seals: RecordSeals,
    ) -> None:
        self._names = names
        self._requests = requests
        self._on_result = on_result
        self._part_bytes = part_bytes
        self._seals = seals
        self._is_done = [False] * len(requests)
        self.results: list[GetResult] = [GetResult(Outcome.UNAVAILABLE)] * len(requests)
        self.num_bytes = 0
        self.rejected: list[str] = []
        self.bad: list[str] = []
        self.used: list[str] = []
        for index, (name, request) in enumerate(zip(names, requests, strict=True)):
            if not name or not is_room(request.out):
                self._finish(index, Outcome.MALFORMED)

    def run(self, engine: RemoteEngine, deadline: Deadline) -> None:
        """Reads everything.

        Raises:
            RemoteError: as the engine's `fetch`; what was finished before is in `results`.
        """
        parts: list[_Parts] = []
        for group in [*self._groups(), []]:
            fetches: list[Fetch] = []
            handlers: list[Callable[[int], None]] = []
            for item in parts:
                for number, fetch in enumerate(item.fetches):
                    fetches.append(fetch)
                    handlers.append(self._part_handler(item, number))
            parts = []
            for index in group:
                out = self._requests[index].out
                fetches.append(Fetch(self._names[index], out[: min(out.size, MAX_PART_BYTES)]))
                handlers.append(self._first_handler(index, parts))
            if fetches:
                engine.fetch(fetches, lambda at, num: handlers[at](num), deadline)  # noqa: B023

    def fill_up(self, outcome: Outcome) -> None:
        """Gives what is not finished its outcome."""
        for index, is_done in enumerate(self._is_done):
            if not is_done:
                self._finish(index, outcome)

    def is_all_garbage(self) -> bool:
        """Whether there were values and none was what it should be.

        What others stored, with another key or with none, does not speak against the store.
        """
        return any(kind not in _OTHERS for kind in self.rejected) and not self.used

    def _groups(self) -> list[list[int]]:
        """Positions to begin together. One that may have parts is alone, for they come next."""
        groups: list[list[int]] = []
        room = 0
        for index, request in enumerate(self._requests):
            if self._is_done[index]:
                continue
            room -= request.out.size
            if room < 0 or request.out.size > self._part_bytes:
                groups.append([])
                room = _GROUP_BYTES - request.out.size
            groups[-1].append(index)
            if request.out.size > self._part_bytes:
                room = 0
        return groups

    def _first_handler(self, index: int, parts: list[_Parts]) -> Callable[[int], None]:
        def on_first(num_bytes: int) -> None:
            self.num_bytes += num_bytes
            if num_bytes == 0:
                self._finish(index, Outcome.MISSING)
                return
            name, request = self._names[index], self._requests[index]
            facts = checked_facts(
                request.out[:num_bytes], request.key, request.out.size, self._seals
            )
            if isinstance(facts, VerifyResult):
                self._reject(index, facts.value)
            elif facts.total_bytes <= num_bytes:
                self._verify(index, facts, [name])
            elif has_too_many_parts(facts, num_bytes):
                self._reject(index, VerifyResult.BAD_HEADER.value)
            else:
                parts.append(_Parts(index, name, facts, request.out, num_bytes))

        return on_first

    def _part_handler(self, item: _Parts, number: int) -> Callable[[int], None]:
        def on_part(num_bytes: int) -> None:
            self.num_bytes += num_bytes
            if self._is_done[item.index]:
                return
            item.num_missing -= 1
            if num_bytes != item.fetches[number].out.size:
                self._reject(item.index, "incomplete")
            elif not item.num_missing:  # not by its number: one whose place moved comes late
                names = [self._names[item.index], *(fetch.name for fetch in item.fetches)]
                self._verify(item.index, item.facts, names)

        return on_part

    def _verify(self, index: int, facts: HeaderFacts, names: list[str]) -> None:
        key, out = self._requests[index].key, self._requests[index].out
        wanted = RecordKey(key.page_hash, key.namespace, key.lora)
        (found,) = self._seals.open([out[: facts.total_bytes]], [wanted])
        if found is not VerifyResult.OK:
            self._reject(index, found.value)
            return
        self.used += names
        self._finish(index, Outcome.OK, facts.total_bytes)

    def _reject(self, index: int, kind: str) -> None:
        self.rejected.append(kind)
        self.bad.append(self._names[index])
        self._finish(index, Outcome.REJECTED)

    def _finish(self, index: int, outcome: Outcome, num_bytes: int = 0) -> None:
        self._is_done[index] = True
        self.results[index] = GetResult(outcome, num_bytes)
        if self._on_result is not None:
            self._on_result(index, self.results[index])


class _Parts:
    """A long record whose first value is there."""

    def __init__(
        self, index: int, name: str, facts: HeaderFacts, out: ByteArray, head_bytes: int
    ) -> None:
        self.index = index
        self.facts = facts
        self.fetches: list[Fetch] = []
        for number, part_name in enumerate(part_names(name, facts, head_bytes), start=1):
            start = number * head_bytes
            end = min(start + head_bytes, facts.total_bytes)
            self.fetches.append(Fetch(part_name, out[start:end]))
        self.num_missing = len(self.fetches)


def is_room(out: object) -> bool:
    """Says whether a record can be read into `out`."""
    return is_plain(out) and out.size > HEADER_BYTES and bool(out.flags.writeable)
