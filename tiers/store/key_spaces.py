"""Numbers for key spaces, by which the index knows them."""

from __future__ import annotations

import threading

from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.types import KeySpace


class KeySpaces:
    """The key spaces of one store, and the namespaces that were opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All guarded by _lock.
        self._by_number: list[KeySpace] = []
        self._by_name: dict[tuple[bytes, bytes], KeySpace] = {}
        self._opened: set[bytes] = set()

    def get(self, digest: bytes, lora: bytes, gate: Gate) -> KeySpace:
        """The key space of a namespace and an adapter, in a gate's epoch of now."""
        with self._lock:
            space = self._by_name.get((digest, lora))
            if space is None:
                space = KeySpace(len(self._by_number), digest, lora, gate.epoch)
                self._by_number.append(space)
                self._by_name[digest, lora] = space
            elif not gate.is_open(space):
                space = space._replace(epoch=gate.epoch)
                self._by_number[space.number] = self._by_name[digest, lora] = space
            return space

    def number_of(self, digest: bytes, lora: bytes) -> int | None:
        """The number of a key space that was asked for before; None for others."""
        with self._lock:
            space = self._by_name.get((digest, lora))
            return None if space is None else space.number

    def __len__(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._by_number)

    def of(self, number: int) -> KeySpace:
        """A key space by its number."""
        with self._lock:
            return self._by_number[number]

    def all(self) -> list[KeySpace]:
        """All of them, by number."""
        with self._lock:
            return list(self._by_number)

    def begin_opening(self, digest: bytes) -> bool:
        """Whether a namespace is to be opened; false from then on."""
        with self._lock:
            is_new = digest not in self._opened
            self._opened.add(digest)
            return is_new

    def not_opened(self, digest: bytes) -> None:
        """It could not be opened."""
        with self._lock:
            self._opened.discard(digest)

    def all_and_opened(self) -> tuple[list[KeySpace], set[bytes]]:
        """All of them, and the digests of the namespaces that were opened, as of one moment."""
        with self._lock:
            return list(self._by_number), set(self._opened)
