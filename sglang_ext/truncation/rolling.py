"""Stored text found in a prompt by its content, at any offset, as rsync finds blocks of a file.

A client that cuts its own history sends [head][end of a stored conversation][new text]. Its chained
page hashes match nothing behind the head, as each covers all that came before it. So the first
tokens of every stored page are hashed alone; over the prompt the same hash is rolled from token to
token, and every place that hits a stored page is joined with the hits one page before and after it
that are that page's neighbours in its chain. The longest run wins, after comparing its tokens one
by one and following it to its last equal token on both sides.

Only pages of one group are compared: a group stands for all that must be equal besides the text.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.anonymous_memory import lazy_zeros
from sglang_ext.truncation import rolling_kernels as kernels
from sglang_ext.truncation.keyed_names import Part, encode_parts

I32 = npt.NDArray[np.int32]

NO_ROW = -1
_MOST_LOAD = 0.6


@dataclass(frozen=True, eq=False)
class TextMatch:
    """A stretch of a prompt that is stored.

    `prompt[start + i]` equals token `offset + i` of the pages `rows`, one after another.

    Attributes:
        start: first token in the prompt.
        length: tokens.
        rows: int32, consecutive pages of one chain.
        offset: token of the first of them with which the run begins.
    """

    start: int
    length: int
    rows: I32
    offset: int


def group_id(secret: bytes, *parts: Part) -> int:
    """63 bits that stand for a group: all that must be equal besides the text.

    Keyed, so that nobody can look for parts that give the number of another's group.

    Args:
        secret: at most 64 bytes.
        parts: of the group; see `encode_parts`.
    """
    digest = hashlib.blake2b(encode_parts(*parts), digest_size=8, key=secret)
    return int.from_bytes(digest.digest(), "little") >> 1


class MatchIndex:
    """Pages by the content of their first tokens.

    Of a fixed capacity. Thread-safe: one lock guards everything, held without the GIL while a
    prompt is searched. Cost of a search: linear in the prompt, whatever is stored; of an insertion
    or a removal: constant, but for a removed page's children.

    Attributes:
        page_size: tokens of a page.
        max_pages: capacity.
        window: tokens that are hashed, from the beginning of each page.
    """

    def __init__(
        self,
        page_size: int,
        max_pages: int,
        *,
        window: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Reserves address space; memory is committed as pages come.

        Args:
            page_size: tokens of a page.
            max_pages: most pages.
            window: at most a page, which is the default. A smaller one finds no more runs (a run
                has a whole page) and hits more text that only begins alike.
            seed: of the hashes; secret and random unless given.
        """
        window = page_size if window is None else window
        if not 1 <= window <= page_size or not 1 <= max_pages < 1 << 30:
            raise ValueError(
                f"1 <= window <= page size and 1 <= pages < 2^30 are needed, got a window of "
                f"{window}, pages of {page_size} tokens and {max_pages} of them"
            )
        self.page_size, self.max_pages, self.window = page_size, max_pages, window
        random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self._bases = random.integers(1 << 20, (1 << 31) - 2, 2, np.uint64)
        self._secret = random.bytes(16)
        num_buckets = 1 << max(3, int(max_pages / _MOST_LOAD).bit_length())
        # _lock guards all that follows.
        self._lock = threading.Lock()
        self._tags = lazy_zeros((num_buckets,), np.uint8)
        self._table = lazy_zeros((num_buckets,), np.int32)
        self._keys = lazy_zeros((max_pages,), np.uint64)
        self._groups = lazy_zeros((max_pages,), np.int64)
        self._kinds = lazy_zeros((max_pages,), np.uint8)
        self._links = lazy_zeros((max_pages, kernels.NUM_LINKS), np.int32)
        self._store = lazy_zeros((max_pages, page_size), np.int32)
        self._state = np.zeros(kernels.NUM_STATE, np.int64)
        self._state[kernels.FREE_HEAD] = NO_ROW

    def __len__(self) -> int:
        return int(self._state[kernels.COUNT])

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that were ever live at once, and of the table."""
        columns = (self._keys, self._groups, self._kinds, self._links, self._store)
        row_bytes = sum(column.nbytes for column in columns) // self.max_pages
        table_bytes = self._tags.nbytes + self._table.nbytes
        return int(self._state[kernels.TOP]) * row_bytes + table_bytes

    def insert(self, group: int, tokens: npt.ArrayLike, parent: int = NO_ROW) -> int:
        """Adds a page.

        Args:
            group: see `group_id`.
            tokens: int32 [page_size].
            parent: row of the page before it in its chain, of the same group.

        Returns:
            Its row, or -1 where the index is full.
        """
        rows = self.insert_chain(group, tokens, parent)
        return int(rows[0]) if rows.size else NO_ROW

    def insert_chain(self, group: int, tokens: npt.ArrayLike, parent: int = NO_ROW) -> I32:
        """Adds consecutive pages.

        Args:
            group: see `group_id`.
            tokens: int32 [n * page_size].
            parent: row of the page before the first.

        Returns:
            Their rows, int32; fewer than n where the index is full.

        Raises:
            ValueError: not whole pages, or a parent that is not there or of another group.
        """
        flat = np.ascontiguousarray(tokens, np.int32).reshape(-1)
        if flat.size % self.page_size or not flat.size:
            raise ValueError(f"{flat.size} tokens are no whole pages of {self.page_size}")
        pages = flat.reshape(-1, self.page_size)
        rows: list[int] = []
        group_hash = self._group_hash(group)
        with self._lock:
            if parent != NO_ROW and not self._is_live(parent, group):
                raise ValueError(f"parent {parent} is no live page of group {group}")
            for page in pages:
                row = self._take_row()
                if row == NO_ROW:
                    break
                self._store[row] = page
                key = self._keys_of(page[: self.window], group_hash)[0]
                kernels.link(
                    row,
                    key,
                    group,
                    parent,
                    self._tags,
                    self._table,
                    self._keys,
                    self._groups,
                    self._kinds,
                    self._links,
                )
                rows.append(row)
                parent = row
        return np.asarray(rows, np.int32)

    def remove(self, row: int) -> None:
        """Forgets a page; the number of its row is used again.

        Raises:
            ValueError: no page is there.
        """
        with self._lock:
            if not 0 <= row < self.max_pages or self._kinds[row] == kernels.FREE:
                raise ValueError(f"row {row} holds no page")
            kernels.unlink(row, self._tags, self._table, self._keys, self._kinds, self._links)
            self._links[row, kernels.PARENT] = self._state[kernels.FREE_HEAD]
            self._state[kernels.FREE_HEAD] = row
            self._state[kernels.COUNT] -= 1

    def find(
        self, prompt: npt.ArrayLike, group: int, *, start: int = 0, min_run: int = 1
    ) -> TextMatch | None:
        """The longest stretch of `prompt[start:]` that a chain of the group holds.

        It has at least one whole page. Behind its last whole page at most 64 continuing pages are
        tried; of pages with the same first tokens at most 8 are tried.

        Args:
            prompt: int32 [n].
            group: see `group_id`.
            start: tokens at the beginning that are not looked at (the head).
            min_run: fewer tokens are no run.
        """
        tokens = np.ascontiguousarray(prompt, np.int32).reshape(-1)[start:]
        if tokens.size < self.page_size:
            return None
        wanted = self._keys_of(tokens, self._group_hash(group))
        # The last window begins where a whole page is left.
        wanted = wanted[: tokens.size - self.page_size + 1]
        first = np.empty(wanted.size + 1, np.int32)
        rows = np.empty(wanted.size * kernels.MAX_SAME, np.int32)
        result = np.zeros(kernels.NUM_RESULT, np.int64)
        with self._lock:
            found = kernels.hits(
                wanted,
                group,
                self._tags,
                self._table,
                self._keys,
                self._groups,
                self._links,
                first,
                rows,
            )
            if not found:
                return None
            kernels.longest_run(tokens, first, rows, self._store, self._links, result)
            if result[kernels.LENGTH] < max(1, min_run):
                return None
            chain = self._chain(int(result[kernels.LAST_ROW]), int(result[kernels.NUM_ROWS]))
        return TextMatch(
            start + int(result[kernels.START]),
            int(result[kernels.LENGTH]),
            chain,
            int(result[kernels.OFFSET]),
        )

    def _keys_of(self, tokens: I32, group_hash: int) -> npt.NDArray[np.uint64]:
        keys = np.empty(tokens.size - self.window + 1, np.uint64)
        kernels.window_keys(tokens, self.window, self._bases, group_hash, keys)
        return keys

    def _group_hash(self, group: int) -> int:
        data = group.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(data, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little")

    def _is_live(self, row: int, group: int) -> bool:
        in_range = 0 <= row < self.max_pages
        return bool(in_range and self._kinds[row] != kernels.FREE and self._groups[row] == group)

    def _take_row(self) -> int:
        state = self._state
        row = int(state[kernels.FREE_HEAD])
        if row != NO_ROW:
            state[kernels.FREE_HEAD] = self._links[row, kernels.PARENT]
        elif state[kernels.TOP] < self.max_pages:
            row = int(state[kernels.TOP])
            state[kernels.TOP] += 1
        else:
            return NO_ROW
        state[kernels.COUNT] += 1
        return row

    def _chain(self, last: int, num_rows: int) -> I32:
        rows = [last]
        while len(rows) < num_rows:
            rows.append(int(self._links[rows[-1], kernels.PARENT]))
        return np.asarray(rows[::-1], np.int32)
