"""Namespaces that the disk has still to open, and when it is tried."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_ext.tiers.store.types import Epoch

FIRST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""How long after a failure it is tried again: twice as long each time, up to a bound."""


class Opening(NamedTuple):
    """A namespace that the disk has still to open.

    Attributes:
        digest: 32 bytes.
        label: what it is, for people.
        due_s: when to try.
        epoch: in which it was asked for.
        retry_s: how long to wait behind a failure.
    """

    digest: bytes
    label: dict[str, Any]
    due_s: float
    epoch: Epoch
    retry_s: float = FIRST_RETRY_S


class Openings:
    """What waits to be opened. The caller holds the page table's lock.

    The thread that writes to the disk opens namespaces, in order with what else it writes. So
    nobody who has to go on waits for the disk. Until it was tried nothing is written; what is to be
    written while it failed is refused by the disk, and leaves DRAM when there is no room.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Opening] = {}
        self._taken: bytes | None = None
        self._latest = b""  # digest of the one that was asked for last

    def __len__(self) -> int:
        """How many wait, or are being opened."""
        return len(self._waiting) + (self._taken is not None and self._taken not in self._waiting)

    def digests(self) -> set[bytes]:
        """Those that wait, or are being opened."""
        return {*self._waiting, *(() if self._taken is None else (self._taken,))}

    def add(self, opening: Opening) -> None:
        """It is to be opened; as one that is known already, anew."""
        self._waiting[opening.digest] = opening
        self._latest = opening.digest

    def ask_again(self, digest: bytes, now_s: float, epoch: Epoch) -> None:
        """The weights of one that was asked for before are live again: it is the first to be tried.

        One that is open already, or is being opened, stays as it is.
        """
        self._latest = digest
        opening = self._waiting.get(digest)
        if opening is not None:
            self._waiting[digest] = opening._replace(due_s=now_s, epoch=epoch)

    def forget(self, digest: bytes) -> bool:
        """One that waits is not tried any more; returns whether it waited."""
        return self._waiting.pop(digest, None) is not None

    def add_failed(self, opening: Opening, now_s: float) -> None:
        """It could not be opened, and is tried again later, unless somebody asked meanwhile."""
        retry_s = min(2 * opening.retry_s, MOST_RETRY_S)
        again = opening._replace(due_s=now_s + opening.retry_s, retry_s=retry_s)
        self._waiting.setdefault(opening.digest, again)

    def is_due(self, now_s: float) -> bool:
        """Whether there is one to try now."""
        return any(each.due_s <= now_s for each in self._waiting.values())

    def wait_s(self, now_s: float) -> float | None:
        """How long until there is one to try; None where none waits."""
        if not self._waiting:
            return None
        return max(0.0, min(each.due_s for each in self._waiting.values()) - now_s)

    def take(self, now_s: float) -> Opening | None:
        """Takes one that is due; None where none is. One at a time.

        That of the live weights goes first, then the one that is due for longest.
        """
        due = [each for each in self._waiting.values() if each.due_s <= now_s]
        if not due:
            return None
        first = min(due, key=lambda each: (each.digest != self._latest, each.due_s))
        self._taken = first.digest
        return self._waiting.pop(first.digest)

    def end(self) -> None:
        """The one that was taken was tried."""
        self._taken = None
