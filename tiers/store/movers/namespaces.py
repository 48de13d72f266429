"""Opening namespaces on the disk, and ending those of which nothing is stored any more."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import RecoveredPages, Tier
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.key_spaces import KeySpaces
from sglang_ext.tiers.store.openings import FIRST_RETRY_S, Opening
from sglang_ext.tiers.store.types import Epoch, KeySpace, Rows

logger = logging.getLogger(__name__)

NO_LORA = b""
# Adapters of a namespace whose pages are taken from the disk, those with the most pages. Each
# costs memory and time for as long as the server runs, and the disk's writers can name any number.
_MAX_ADAPTERS = 4096


class Namespaces:
    """What a store does with namespaces on its disk. The thread that writes to the disk calls it.

    Args:
        books: the store's.
        spaces: its key spaces.
        gate: what these pass.
        disk: the tier; None: there is none, and all there is to do is to forget.
        packed: whether records are of any length.
    """

    def __init__(
        self, books: Books, spaces: KeySpaces, gate: Gate, disk: Tier | None, *, packed: bool
    ) -> None:
        self._books, self._spaces, self._gate, self._disk = books, spaces, gate, disk
        self._packed = packed

    def open(self, digest: bytes, label: dict[str, Any], epoch: Epoch) -> int:
        """Makes a namespace usable, and enters the pages that a former run left on disk.

        Args:
            digest: 32 bytes.
            label: what it is, for people.
            epoch: in which it was asked for: where that is over its key spaces pass no gate.

        Returns:
            How many of these found room.

        Raises:
            TierConfigError: the disk cannot open it.
        """
        total = 0

        def enter(found: RecoveredPages) -> None:
            nonlocal total
            total = self._enter(digest, found, epoch)

        if self._disk is not None:
            self._disk.open_namespace(
                digest, self._books.table.arena.slot_bytes, label, packed=self._packed, enter=enter
            )
        return total

    def try_to_open(self, opening: Opening) -> None:
        """Opens one that waits for it; if that fails it is tried again later."""
        ok = False
        try:
            self.end_unused(opening.digest)
            found = self.open(opening.digest, opening.label, opening.epoch)
            ok = True
            name = opening.digest.hex()[:16]
            logger.info("hier-kv: namespace %s: %d pages found on disk", name, found)
        except Exception as error:
            self._books.table.counters.add("namespace_open_failures")
            if opening.retry_s == FIRST_RETRY_S:
                logger.warning(
                    "hier-kv: the disk could not open the namespace of the live weights, which is "
                    "tried again; until then it gets no pages of them: %s",
                    error,
                )
        finally:
            self._books.spills.end_opening(opening, ok=ok)

    def end_unused(self, but: bytes | None = None) -> None:
        """Ends namespaces of which nothing is stored: each change of weights brings another one.

        They are forgotten under the lock under which pages are entered. One that is asked for
        behind that is opened behind what follows here. Of one that still waits to be opened nobody
        knows what the disk has: that stays there, and it waits no longer.

        Args:
            but: digest of one that is being opened.
        """
        if not self._spaces.may_retire():
            return
        table = self._books.table
        with table.lock:
            kept = () if but is None else (but,)
            gone = self._spaces.retire(table.index.namespaces_in_use(), kept)
            openings = self._books.spills.openings
            unopened = {digest for digest in gone if openings.forget(digest)}
            for digest in unopened:
                if self._disk is not None and self._disk.may_hold(digest):
                    self._spaces.note_unopened(digest)
        if self._disk is not None:
            for digest in gone:
                if digest not in unopened:
                    self._disk.end_namespace(digest)

    def end_adapters(self) -> None:
        """Ends key spaces of adapters that are used no more, where there are very many.

        An epoch has just ended: those that were given out in it pass no gate any more. One that is
        being opened has key spaces whose pages are not entered yet.
        """
        if not self._spaces.has_many():
            return
        table = self._books.table
        with table.lock:
            in_use, opening = table.index.namespaces_in_use(), self._books.spills.openings.digests()
            self._spaces.retire_adapters(in_use, opening, self._gate.is_open)

    def _enter(self, digest: bytes, found: RecoveredPages, epoch: Epoch) -> int:
        """Enters what a former run left of a namespace; returns how many pages found room."""
        rows = rows_by_adapter(found.lora)
        most = sorted(rows, key=lambda adapter: -len(rows[adapter]))
        left = [rows.pop(adapter) for adapter in most[_MAX_ADAPTERS:]]
        if left:
            self._books.disk.leave_out(found.take(np.concatenate(left)))

        def is_void() -> bool:
            return self._books.spills.is_clearing(digest)

        def space_of(lora: bytes) -> KeySpace:
            if self._gate.lasts(epoch):  # which may end now: its pages pass no gate then
                return self._spaces.get(digest, lora, self._gate, epoch)
            return self._spaces.known(digest, lora)

        return sum(
            self._books.disk.add_recovered(space_of(lora), found.take(mine), is_void)
            for lora, mine in rows.items()
        )


def rows_by_adapter(lora: npt.NDArray[np.uint8]) -> dict[bytes, Rows]:
    """The rows of each adapter, u8 `[N, 32]`, ascending; pages without one come first."""
    words = np.ascontiguousarray(lora).view(np.uint64)
    order = np.lexsort(words.T)  # many times faster than to sort rows of bytes
    words = words[order]
    ends = np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1
    groups = np.split(order, ends) if len(order) else []
    return {lora[rows[0]].tobytes() if lora[rows[0]].any() else NO_LORA: rows for rows in groups}
