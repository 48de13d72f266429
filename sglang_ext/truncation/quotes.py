"""Which stored conversation a prompt quotes: `rolling`, with the pages' hashes beside their text.

Records do not hold tokens, so the tokens of a bounded number of stored pages are kept in memory;
the oldest are dropped first. Text is found here even if its page has left the store; the look-up in
the store is a miss then.

Pure: numpy and numba only. Thread-safe: everything runs under one lock.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.anonymous_memory import lazy_zeros
from sglang_ext.truncation.rolling import NO_ROW, MatchIndex

Hashes = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]

_DROPPED_SHARE = 16  # of the capacity, when it is full


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A stretch of a prompt that is stored.

    Attributes:
        start: first token in the prompt.
        length: tokens.
        position: of the first token in the stored chain.
        hashes: u8 `[n, 32]`, the pages it lies in, from the one that holds its first token on.
        head_hashes: u8 `[m, 32]`, the first pages of the chain, which hold its head.
    """

    start: int
    length: int
    position: int
    hashes: Hashes
    head_hashes: Hashes


class StoredText:
    """Text of stored conversations, found by content.

    Args:
        page_size: tokens of a page.
        max_pages: most pages; the oldest are forgotten first.
    """

    def __init__(self, page_size: int, max_pages: int) -> None:
        self._index = MatchIndex(page_size, max_pages)
        self._page_size = page_size
        self._lock = threading.Lock()
        # _lock guards all that follows. By row of the index:
        self._hashes = lazy_zeros((max_pages, 32), np.uint8)
        self._places = lazy_zeros((max_pages,), np.int32)
        self._heads: dict[int, tuple[Hashes, Hashes]] = {}
        # All but the last page of heads, once each, by the last of these: it is chained.
        self._shared: WeakValueDictionary[bytes, Hashes] = WeakValueDictionary()
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._rows: dict[tuple[int, bytes], int] = {}
        self._ages: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, group: int, tokens: I32, hashes: Hashes, num_head_pages: int) -> None:
        """Notes a conversation's pages, from its beginning.

        Args:
            group: see `rolling.group_id`.
            tokens: int32 `[N * P]`.
            hashes: u8 `[N, 32]`, chained.
            num_head_pages: pages that hold its head.
        """
        with self._lock:
            size, parent, first = self._page_size, NO_ROW, 0
            for page in range(len(hashes) - 1, -1, -1):
                row = self._rows.get((group, hashes[page].tobytes()))
                if row is not None:
                    parent, first = row, page + 1
                    break
            head = self._head_of(hashes[:num_head_pages])
            while first < len(hashes):
                rows = self._index.insert_chain(group, tokens[first * size :], parent)
                for row in rows.tolist():
                    self._note(row, group, first, hashes[first].tobytes(), head)
                    parent, first = row, first + 1
                if first < len(hashes) and not self._make_room(parent):
                    return

    def find(self, group: int, prompt: I32, head: int, min_run: int) -> StoredRun | None:
        """The longest stretch of a prompt, right behind its head, that is stored elsewhere.

        Args:
            group: see `rolling.group_id`.
            prompt: int32 `[n]`.
            head: tokens at its beginning, which the group stands for.
            min_run: fewer tokens are none.
        """
        with self._lock:
            run = self._index.find(prompt, group, start=head, min_run=min_run)
            if run is None or run.start != head:
                return None
            skipped, row = divmod(run.offset, self._page_size)
            rows = run.rows[skipped:]
            position = int(self._places[rows[0]]) * self._page_size + row
            if position == run.start:
                return None  # that is where it would be found anyway
            head_hashes = np.concatenate(self._heads[int(rows[0])])
            return StoredRun(run.start, run.length, position, self._hashes[rows], head_hashes)

    def _head_of(self, pages: Hashes) -> tuple[Hashes, Hashes]:
        """A head's pages, in two parts: those that other conversations have, too, and the last.

        A system prompt may have thousands of pages, and each turn of each conversation brings it.
        Its last page may hold text behind it, so that one is a conversation's own.
        """
        most, last = pages[:-1], pages[-1:].copy()
        name = most[-1:].tobytes()
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = most.copy()
        return shared, last

    def _note(
        self, row: int, group: int, place: int, digest: bytes, head: tuple[Hashes, Hashes]
    ) -> None:
        self._hashes[row] = np.frombuffer(digest, np.uint8)
        self._places[row] = place
        self._heads[row] = head
        self._keys[row] = (group, digest)
        self._rows[group, digest] = row
        self._ages.append(row)

    def _make_room(self, keep: int) -> bool:
        """Forgets the oldest pages but `keep`; False when there are none."""
        wanted = max(1, self._index.max_pages // _DROPPED_SHARE)
        removed = 0
        for _ in range(min(wanted + 1, len(self._ages))):
            row = self._ages.popleft()
            if row == keep:
                self._ages.append(row)
                continue
            self._index.remove(row)
            del self._rows[self._keys.pop(row)], self._heads[row]
            removed += 1
        return removed > 0
