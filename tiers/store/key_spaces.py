"""Numbers for key spaces, by which the index knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.types import Epoch, KeySpace

KEPT_NAMESPACES = 8
"""The last that were opened are kept, whether anything is stored of them or not."""

KEPT_SPACES = 4096
"""So many key spaces are kept, those of adapters among them, whether anything is stored or not."""


class KeySpaces:
    """The key spaces of one store, and the namespaces that were opened. Thread-safe.

    Each change of weights brings a namespace, and each adapter a key space, so those of which
    nothing is stored any more are retired. A number is never given out twice: where somebody still
    has one, nothing is found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All guarded by _lock.
        self._next_number = 0
        self._by_number: dict[int, KeySpace] = {}  # ascending
        self._by_name: dict[tuple[bytes, bytes], KeySpace] = {}
        self._opened: dict[bytes, None] = {}  # the last asked for comes last
        self._unopened: set[bytes] = set()  # asked for, and forgotten before the disk opened them

    def get(self, digest: bytes, lora: bytes, gate: Gate, epoch: Epoch | None = None) -> KeySpace:
        """The key space of a namespace and an adapter, in an epoch: by default a gate's of now."""
        with self._lock:
            epoch = gate.epoch if epoch is None else epoch
            space = self._by_name.get((digest, lora))
            if space is None:
                space = self._add(digest, lora, epoch)
            elif not gate.is_open(space):
                space = space._replace(epoch=epoch)
                self._by_number[space.number] = self._by_name[digest, lora] = space
            return space

    def known(self, digest: bytes, lora: bytes) -> KeySpace:
        """The same, for what was found of it on disk: a new one passes no gate before `get`."""
        with self._lock:
            space = self._by_name.get((digest, lora))
            return self._add(digest, lora, Epoch()) if space is None else space

    def number_of(self, digest: bytes, lora: bytes) -> int | None:
        """The number of a key space that was asked for before; None for others."""
        with self._lock:
            space = self._by_name.get((digest, lora))
            return None if space is None else space.number

    def __len__(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._by_number)

    def find(self, number: int) -> KeySpace | None:
        """A key space by its number; None where it was retired."""
        with self._lock:
            return self._by_number.get(number)

    def all(self) -> list[KeySpace]:
        """All of them, by number."""
        with self._lock:
            return list(self._by_number.values())

    def begin_opening(self, digest: bytes) -> bool:
        """Whether a namespace is to be opened; false from then on."""
        with self._lock:
            is_new = digest not in self._opened
            self._opened.pop(digest, None)
            self._opened[digest] = None
            self._unopened.discard(digest)
            return is_new

    def not_opened(self, digest: bytes) -> None:
        """It could not be opened."""
        with self._lock:
            self._opened.pop(digest, None)

    def may_retire(self) -> bool:
        """Whether there are more namespaces than are kept in any case."""
        with self._lock:
            return len(self._opened) > KEPT_NAMESPACES

    def retire(self, in_use: Collection[int], but: Collection[bytes]) -> list[bytes]:
        """Forgets namespaces of which nothing is stored, but for the last that were opened.

        The caller holds the lock under which rows are made.

        Args:
            in_use: numbers of the key spaces that have rows.
            but: digests of namespaces that stay.

        Returns:
            Their digests; they have to be opened again before they are used again.
        """
        with self._lock:
            used = {
                self._by_number[number].digest for number in in_use if number in self._by_number
            }
            before = list(self._opened)[:-KEPT_NAMESPACES]
            gone = [digest for digest in before if digest not in used and digest not in but]
            for digest in gone:
                del self._opened[digest]
            ended = set(gone)
            names = [name for name in self._by_name if name[0] in ended]
            for name in names:
                del self._by_number[self._by_name.pop(name).number]
            return gone

    def has_many(self) -> bool:
        """Whether there are more key spaces than are kept in any case."""
        with self._lock:
            return len(self._by_number) > KEPT_SPACES

    def retire_adapters(
        self, in_use: Collection[int], but: Collection[bytes], is_open: Callable[[KeySpace], bool]
    ) -> None:
        """Forgets key spaces of an epoch that is over of which nothing is stored.

        The caller holds the lock under which rows are made.

        Args:
            in_use: numbers of the key spaces that have rows.
            but: digests of namespaces whose key spaces stay.
            is_open: whether a key space is of the present epoch.
        """
        kept = set(in_use)
        with self._lock:
            for number, space in list(self._by_number.items()):
                if number not in kept and space.digest not in but and not is_open(space):
                    del self._by_number[number], self._by_name[space.digest, space.lora]

    def new_numbers(self, count: int) -> list[int]:
        """Numbers that no key space has, had, or will have."""
        with self._lock:
            first = self._next_number
            self._next_number += count
            return list(range(first, self._next_number))

    def note_unopened(self, digest: bytes) -> None:
        """One that was retired was never opened on disk, where a former run's pages may lie."""
        with self._lock:
            self._unopened.add(digest)

    def all_and_asked_for(self) -> tuple[list[KeySpace], set[bytes]]:
        """All of them, and the digests of the namespaces that were asked for, as of one moment.

        Without those of which nothing is left anywhere.
        """
        with self._lock:
            return list(self._by_number.values()), self._unopened.union(self._opened)

    def _add(self, digest: bytes, lora: bytes, epoch: Epoch) -> KeySpace:
        space = KeySpace(self._next_number, digest, lora, epoch)
        self._next_number += 1
        self._by_number[space.number] = self._by_name[digest, lora] = space
        return space
