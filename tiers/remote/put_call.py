"""One `put`: what the store has as good stays; the rest is split and stored, parts first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordError, VerifyResult
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.remote.base import Deadline, Fetch, Outcome, RemoteEngine, Value
from sglang_ext.tiers.remote.items import PutItem
from sglang_ext.tiers.remote.record_values import (
    HeaderFacts,
    NamedPieces,
    checked_facts,
    has_too_many_parts,
    part_names,
    split,
)
from sglang_ext.tiers.remote.shares.allowance import UploadAllowance

_BATCH_BYTES = 32 << 20


class Writing:
    """The state of one call. One thread.

    Attributes:
        num_bytes: of all records that are to be stored.
        stored: names of the keys whose records were stored.
        stored_bytes: their bytes.
        kept: names of values, with their parts, that the store had as good.
    """

    def __init__(
        self,
        names: Sequence[str],
        items: Sequence[PutItem],
        part_bytes: int,
        bad: set[str],
        seals: RecordSeals,
        allowance: UploadAllowance | None = None,
    ) -> None:
        self._names = names
        self._allowance = allowance
        self._items = items
        self._bad = bad
        self._seals = seals
        self._part_bytes = part_bytes
        self._values: list[list[NamedPieces] | None] = []
        self._quality: list[int] = []
        self._outcomes: list[Outcome | None] = [None] * len(items)
        self.num_bytes = self.stored_bytes = 0
        self.stored: list[str] = []
        self.kept: list[str] = []
        for index, (name, item) in enumerate(zip(names, items, strict=True)):
            self._add(index, name, item, part_bytes)

    def run(self, engine: RemoteEngine, deadline: Deadline) -> None:
        """Asks what is there, then stores the rest.

        Raises:
            RemoteError: as the engine's; what was done before is in `outcomes`.
        """
        replaces = self._look(engine, deadline)
        if self._allowance is not None:
            self._allowance.look(engine, deadline)
        allowed: list[int] = []
        try:
            self._put_allowed(engine, replaces, deadline, allowed)
        finally:
            self._give_back([index for index in allowed if self._outcomes[index] is None])

    def outcomes(self, unfinished: Outcome) -> list[Outcome]:
        """One outcome an item; `unfinished` for those that were not reached."""
        return [outcome or unfinished for outcome in self._outcomes]

    def _add(self, index: int, name: str, item: PutItem, part_bytes: int) -> None:
        values: list[NamedPieces] | None = None
        quality = 0
        try:
            if name and is_record_array(item.record):
                facts = checked_facts(item.record[:HEADER_BYTES], item.key, item.record.size)
                if not isinstance(facts, VerifyResult):
                    values = split(name, item.record, part_bytes, self._seals)
                    quality = facts.meta.quality
        except RecordError:
            values = None
        self._values.append(values)
        self._quality.append(quality)
        if values is None:
            self._outcomes[index] = Outcome.MALFORMED
        else:
            self.num_bytes += self._bytes_of(index)

    def _put_allowed(
        self, engine: RemoteEngine, replaces: list[bool], deadline: Deadline, allowed: list[int]
    ) -> None:
        """Stores what is not there and within its tenant's share; adds it to `allowed` before.

        A record with parts ends its batch, and its first value is sent with the next one, when the
        store has said that it has the parts. Within a call no order holds: the slot of one value
        may have moved, a client may sort them, and one may be refused while the next is taken.
        """
        batch: list[int] = []
        whole: list[int] = []  # their parts are stored, the first value is not
        num_bytes = 0
        for index, outcome in enumerate(self._outcomes):
            if outcome is not None:
                continue
            if not self._is_allowed(index):
                self._outcomes[index] = Outcome.OVER_SHARE
                continue
            allowed.append(index)
            batch.append(index)
            num_bytes += self._bytes_of(index)
            if num_bytes >= _BATCH_BYTES or self._num_parts(index):
                whole = self._put(engine, whole, batch, replaces, deadline)
                batch, num_bytes = [], 0
        if batch or whole:
            self._put(engine, whole, batch, replaces, deadline)

    def _give_back(self, unfinished: list[int]) -> None:
        if self._allowance is None:
            return
        for index in unfinished:
            self._allowance.give_back(self._items[index].tenant, self._bytes_of(index))

    def _is_allowed(self, index: int) -> bool:
        return self._allowance is None or self._allowance.admits(
            self._items[index].tenant, self._bytes_of(index)
        )

    def _bytes_of(self, index: int) -> int:
        values = self._values[index] or []
        return sum(piece.size for value in values for piece in value.pieces)

    def _look(self, engine: RemoteEngine, deadline: Deadline) -> list[bool]:
        """Decides by the stored headers what is kept, and what is overwritten."""
        wanted = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        outs = np.zeros((len(wanted), HEADER_BYTES), np.uint8)
        replaces = [False] * len(self._items)

        def on_fetched(at: int, num_bytes: int) -> None:
            index = wanted[at]
            if num_bytes == 0:
                return
            key = self._items[index].key
            facts = checked_facts(outs[at, :num_bytes], key, seals=self._seals)
            if isinstance(facts, VerifyResult) or self._names[index] in self._bad:
                replaces[index] = True
            elif facts.meta.quality > self._quality[index]:
                # Who is not exact leaves it to the store to say whether the place is still free.
                replaces[index] = self._quality[index] == Quality.EXACT
            else:
                self._outcomes[index] = Outcome.KEPT
                self.kept += self._names_of(self._names[index], facts)

        if wanted:
            fetches = [Fetch(self._names[i], out) for i, out in zip(wanted, outs, strict=True)]
            engine.fetch(fetches, on_fetched, deadline)
        return replaces

    def _names_of(self, name: str, facts: HeaderFacts) -> list[str]:
        """The values of a record that is stored: another writer's parts have other names."""
        if has_too_many_parts(facts, self._part_bytes):
            return [name]
        return [name, *part_names(name, facts, self._part_bytes)]

    def _put(
        self,
        engine: RemoteEngine,
        whole: list[int],
        batch: list[int],
        replaces: list[bool],
        deadline: Deadline,
    ) -> list[int]:
        """Stores values of one call; returns which records have all their parts in the store now.

        Args:
            engine: speaks to the store.
            whole: records whose first value is stored.
            batch: records that are stored; of those with parts, the parts.
            replaces: by record, whether its first value overwrites what is there.
            deadline: the call's.
        """
        values: list[Value] = []
        handlers: list[Callable[[bool], None]] = []
        missing = {index: num for index in batch if (num := self._num_parts(index))}
        for index in [*whole, *(index for index in batch if index not in missing)]:
            head = (self._values[index] or [])[0]
            tenant = self._items[index].tenant
            values.append(Value(head.name, head.pieces, replaces[index], tenant))
            handlers.append(self._head_handler(index))
        for index in missing:
            for part in (self._values[index] or [])[1:]:
                # Named after its content's checksum, so a part that is overwritten is the same.
                tenant = self._items[index].tenant
                values.append(Value(part.name, part.pieces, replaces=True, tenant=tenant))
                handlers.append(_part_handler(missing, index))
        engine.put(values, lambda at, written: handlers[at](written), deadline)
        return [index for index, num in missing.items() if not num]

    def _num_parts(self, index: int) -> int:
        return len(self._values[index] or ()) - 1

    def _head_handler(self, index: int) -> Callable[[bool], None]:
        def on_stored(written: bool) -> None:
            names = [value.name for value in self._values[index] or ()]
            if written:
                self._outcomes[index] = Outcome.OK
                self.stored.append(self._names[index])
                self.stored_bytes += self._bytes_of(index)
            else:
                self._outcomes[index] = Outcome.KEPT
                self.kept += names

        return on_stored


def _part_handler(missing: dict[int, int], index: int) -> Callable[[bool], None]:
    def on_stored(_: bool) -> None:
        missing[index] -= 1

    return on_stored


def is_record_array(record: object) -> bool:
    """Says whether `record` is an array that can hold a record."""
    return (
        isinstance(record, np.ndarray)
        and record.dtype == np.uint8
        and record.ndim == 1
        and record.size >= HEADER_BYTES
        and bool(record.flags.c_contiguous)
    )
