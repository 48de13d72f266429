"""The page index: where each page of KV lies, by its full key.

One open-addressing table maps a page's key, (page hash of 32 bytes, namespace number), to a row
that stays the same for as long as the page is known. All that is known of a page is in plain numpy
columns indexed by row, so that callers read and write many pages at once:

    rows = index.lookup(hashes, namespace)      # -1 where absent
    slots = index.host_slot[rows[rows >= 0]]

The full key is stored and compared, never a fingerprint: a wrong match would be wrong KV.

Memory: 65 bytes a row in columns that are committed as rows come into use, and 4 bytes a bucket,
at most 0.7 of which are filled at capacity: 71 to 77 bytes a page when full, 82 to 98 at 35 %.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers import index_kernels as kernels
from sglang_ext.tiers.anonymous_memory import lazy_zeros
from sglang_ext.tiers.errors import TierConfigError, TierInvariantError, TierUsageError

HASH_BYTES: Final = 32
NO_ROW: Final = -1
NO_SLOT: Final = kernels.NO_SLOT
NO_SEGMENT: Final = kernels.NO_SEGMENT
MAX_CAPACITY: Final = (1 << 30) - 1  # leaves two bits of each bucket word for the tag
MAX_LOAD: Final = 0.7
_MIN_BUCKETS: Final = 8

Hashes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


class Inserted(NamedTuple):
    """What `PageIndex.insert` did.

    Attributes:
        rows: i64[N], the row of each key; -1 where the index was full.
        created: bool[N], true where the row is new.
    """

    rows: Rows
    created: npt.NDArray[np.bool_]


class PageIndex:
    """Map of a fixed capacity from (page hash, namespace number) to a stable row.

    Not locked: the owner's lock must be held around every call and every use of a column. The
    loops run without the GIL, so other threads run meanwhile.

    Batches are arrays `u8[N, 32]` of page hashes and `i64[N]` of rows. Wherever rows are taken,
    negative ones and rows that are not live are passed over, so the result of a look-up can be
    handed on as it is.

    It has many methods because rows of the map are also links of the list by age.

    The rows of a namespace have its number, until its pages are disowned: then they keep that one,
    and those that come after them get another. Whoever calls knows the namespace's only.

    Attributes:
        capacity: Most pages that it can hold.
        host_slot: i32 per row, slot in the host arena, -1 for none.
        segment: u32 per row, disk segment, 0xFFFFFFFF for none.
        block: u32 per row, offset in the segment in blocks of 4096 bytes.
        num_blocks: u16 per row, length of the record there, in blocks of 4096 bytes.
        disk_quality: u8 per row, quality of the copy on disk; 0 for exact.
        flags: u8 per row, the owner's bits.
        quality: u8 per row, 0 for exact.
        stamp: u32 per row, logical clock of the last use.
    """

    def __init__(self, capacity: int, *, seed: int | None = None) -> None:
        """Reserve address space for `capacity` pages; memory is committed as they come.

        Args:
            capacity: Pages, from 1 to 2^30 - 1.
            seed: 64 bits that place keys in buckets; secret and random unless given.

        Raises:
            TierConfigError: The capacity is out of range or the address space is refused.
        """
        if not 1 <= capacity <= MAX_CAPACITY:
            raise TierConfigError(
                f"The page index holds 1 to {MAX_CAPACITY:,} pages and {capacity:,} were asked "
                f"for; change the tiers' sizes or the page size."
            )
        self.capacity = capacity
        self.host_slot: npt.NDArray[np.int32] = lazy_zeros((capacity,), np.int32)
        self.segment: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self.block: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self.num_blocks: npt.NDArray[np.uint16] = lazy_zeros((capacity,), np.uint16)
        self.disk_quality: npt.NDArray[np.uint8] = lazy_zeros((capacity,), np.uint8)
        self.flags: npt.NDArray[np.uint8] = lazy_zeros((capacity,), np.uint8)
        self.quality: npt.NDArray[np.uint8] = lazy_zeros((capacity,), np.uint8)
        self.stamp: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self._keys: npt.NDArray[np.uint64] = lazy_zeros((capacity, 4), np.uint64)
        self._namespaces: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self._prev: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self._next: npt.NDArray[np.uint32] = lazy_zeros((capacity,), np.uint32)
        self._buckets: npt.NDArray[np.uint32] = lazy_zeros((_num_buckets(capacity),), np.uint32)
        self._state = np.zeros(kernels.NUM_STATE, np.int64)
        self._state[[kernels.FREE_HEAD, kernels.LRU_OLD, kernels.LRU_NEW]] = kernels.NIL
        row_mask = np.uint64((1 << capacity.bit_length()) - 1)
        number = np.uint64((secrets.randbits(64) if seed is None else seed) & (2**64 - 1))
        self._table = (self._keys, self._namespaces, self._buckets, row_mask, number)
        self._links = (self._state, self._prev, self._next)
        # By number of a namespace, the one that its rows have; by that, the namespace, and whether
        # it was disowned. Numbers beyond their ends are their own.
        self._number_of: Rows = np.empty(0, np.int64)
        self._named: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._is_disowned: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    # ---- keys ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Pages it knows."""
        return int(self._state[kernels.COUNT])

    def lookup(self, hashes: Hashes, namespace: int) -> Rows:
        """Row of each page, -1 where it is not known.

        Args:
            hashes: u8[N, 32], C-contiguous; may be read-only.
            namespace: Namespace number, u32.

        Returns:
            i64[N].
        """
        words = _as_words(hashes)
        rows = np.empty(len(words), np.int64)
        kernels.lookup(*self._table, words, self._own(namespace), rows)
        return rows

    def lookup_each(self, hashes: Hashes, namespaces: Rows) -> Rows:
        """As `lookup`, of pages that are each in a namespace of its own.

        Args:
            hashes: u8[N, 32], C-contiguous; may be read-only.
            namespaces: i64[N], their numbers; where one is below 0 the page is not known.

        Raises:
            TierUsageError: There are not as many namespaces as pages.
        """
        words, numbers = _as_words(hashes), _as_rows(namespaces)
        if len(words) != len(numbers):
            raise TierUsageError(f"{len(words)} pages were named in {len(numbers)} namespaces.")
        rows = np.empty(len(words), np.int64)
        kernels.lookup_each(*self._table, words, _renamed(self._number_of, numbers), rows)
        return rows

    def prefix_rows(self, hashes: Hashes, namespace: int, need_flags: int = 0) -> Rows:
        """Rows of the leading pages that are known and have every bit of `need_flags`."""
        words = _as_words(hashes)
        rows = np.empty(len(words), np.int64)
        number = self._own(namespace)
        num = kernels.prefix(*self._table, words, number, rows, self.flags, need_flags)
        return rows[:num]

    def insert(self, hashes: Hashes, namespace: int) -> Inserted:
        """Find or add each page.

        A new row has no host slot, no segment, zeros elsewhere, and is not in the LRU list; a known
        page's row is left as it is. A page that is twice in the batch is created once.
        """
        words = _as_words(hashes)
        rows = np.empty(len(words), np.int64)
        created = np.empty(len(words), np.bool_)
        kernels.insert(
            *self._table, words, self._own(namespace), rows, created, *self._links, self.host_slot,
            self.segment, self.block, self.num_blocks, self.disk_quality, self.flags, self.quality,
            self.stamp,
        )  # fmt: skip
        return Inserted(rows, created)

    def remove(self, rows: npt.ArrayLike) -> int:
        """Forget the pages of `rows`, also in the LRU list; returns how many there were."""
        return int(
            kernels.remove(*self._table, _as_rows(rows), *self._links, self.host_slot, self.segment)
        )

    def keys(self, rows: npt.ArrayLike) -> tuple[Hashes, npt.NDArray[np.uint32]]:
        """Copies of the hashes u8[N, 32] and namespace numbers u32[N] of live rows.

        Raises:
            TierUsageError: A row is not live.
        """
        wanted = _as_rows(rows)
        if not self.is_live(wanted).all():
            raise TierUsageError("A row that holds no page was asked for its key.")
        return self._keys[wanted].view(np.uint8), _renamed(self._named, self._namespaces[wanted])

    def is_live(self, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """bool[N]: true where the row holds a page."""
        wanted = _as_rows(rows)
        top = int(self._state[kernels.TOP])
        known: npt.NDArray[np.bool_] = (wanted >= 0) & (wanted < top)
        if known.all():  # as nearly always
            live: npt.NDArray[np.bool_] = self._prev[wanted] != kernels.FREE
            return live
        known[known] = self._prev[wanted[known]] != kernels.FREE
        return known

    def disown(self, namespaces: Sequence[int], fresh: Sequence[int]) -> None:
        """Has no page of some namespaces found any more, however many there are.

        Pages that are inserted from now on are. The rows of those of before stay until they are
        removed, with their keys; `are_disowned` knows them.

        Args:
            namespaces: numbers, each once, which should be small, as in `rows_of_namespaces`.
            fresh: as many numbers, which are no namespace's, nor will be.
        """
        owned = [self._own(each) for each in namespaces]
        size = max(*owned, *fresh, *namespaces, len(self._number_of) - 1) + 1
        self._number_of = _grown(self._number_of, np.arange(size, dtype=np.int64))
        self._named = _grown(self._named, np.arange(size, dtype=np.uint32))
        self._is_disowned = _grown(self._is_disowned, np.zeros(size, np.bool_))
        self._is_disowned[owned] = True
        self._number_of[list(namespaces)] = fresh
        self._named[list(fresh)] = namespaces

    def are_disowned(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows hold a page that was disowned."""
        if not len(self._is_disowned):  # as nearly always
            return np.zeros(len(rows), np.bool_)
        numbers, disowned = self._namespaces[rows], self.is_live(rows)
        disowned &= numbers < len(self._is_disowned)
        disowned[disowned] = self._is_disowned[numbers[disowned]]
        return disowned

    def _own(self, namespace: int) -> int:
        """The number that the rows of a namespace have."""
        number = _u32(namespace)
        return int(self._number_of[number]) if number < len(self._number_of) else number

    # ---- rows by what is in them -----------------------------------------------------------

    def rows(self) -> Rows:
        """Every live row, ascending (a linear scan)."""
        top = int(self._state[kernels.TOP])
        return np.flatnonzero(self._prev[:top] != kernels.FREE)

    def rows_of_namespaces(self, namespaces: Sequence[int]) -> Rows:
        """Live rows of some namespaces, ascending (one linear scan, however many these are).

        Without those that were disowned.

        Args:
            namespaces: numbers, which should be small: memory is taken for all up to the largest.
        """
        if not len(namespaces):
            return np.empty(0, np.int64)
        numbers = list(map(self._own, namespaces))
        is_one = np.zeros(max(numbers) + 1, np.bool_)
        is_one[numbers] = True
        rows = np.empty(len(self), np.int64)
        num = kernels.rows_where(rows, self._namespaces, is_one, self._state, self._prev)
        return rows[:num]

    def namespaces_in_use(self) -> list[int]:
        """Numbers of the namespaces that have live rows, ascending (one linear scan)."""
        numbers = self._namespaces[self.rows()]
        if not len(numbers):
            return []
        first = int(numbers.min())
        is_used = np.zeros(int(numbers.max()) - first + 1, np.bool_)
        is_used[numbers - np.uint32(first)] = True
        used = first + np.flatnonzero(is_used)
        return sorted(set(_renamed(self._named, used).tolist()))

    def note_use(self, rows: npt.ArrayLike, clock: int) -> None:
        """Set `stamp` to `clock` (its low 32 bits)."""
        kernels.note_use(_as_rows(rows), clock & 0xFFFFFFFF, self.stamp)

    # ---- LRU list --------------------------------------------------------------------------

    @property
    def lru_count(self) -> int:
        """Rows in the LRU list."""
        return int(self._state[kernels.LRU_COUNT])

    def lru_add(self, rows: npt.ArrayLike) -> None:
        """Make each row the most recent, in order, listing it if it is not listed yet.

        The last of the batch ends up most recent: pass children before their parents, so that
        parents outlive children.
        """
        kernels.lru_touch(_as_rows(rows), True, *self._links)

    def lru_touch(self, rows: npt.ArrayLike) -> None:
        """As `lru_add`, but rows that are not listed stay so."""
        kernels.lru_touch(_as_rows(rows), False, *self._links)

    def lru_sink(self, rows: npt.ArrayLike) -> None:
        """Make each listed row the least recent, in order: the last of the batch ends up oldest."""
        kernels.lru_sink(_as_rows(rows), *self._links)

    def lru_remove(self, rows: npt.ArrayLike) -> None:
        """Take rows out of the list; they stay known."""
        kernels.lru_remove(_as_rows(rows), *self._links)

    def lru_tail(self, count: int, skip_flags: int = 0) -> Rows:
        """Up to `count` least recent rows, oldest first, without those with a bit of `skip_flags`.

        Changes nothing. Skipped rows are walked over, so a long run of them costs time.
        """
        rows = np.empty(max(min(count, self.lru_count), 0), np.int64)
        num = kernels.lru_tail(rows, self._state, self._next, self.flags, skip_flags)
        return rows[:num]

    # ---- books -----------------------------------------------------------------------------

    def check(self) -> None:
        """Verify table, row pool and LRU list against each other (linear; for tests and idle time).

        Raises:
            TierInvariantError: They disagree; the message says where.
        """
        live = self.rows()
        top = int(self._state[kernels.TOP])
        _expect(len(live) == len(self), f"{len(live)} live rows and a count of {len(self)}")
        filled = int(np.count_nonzero(self._buckets))
        _expect(filled == len(live), f"{filled} filled buckets for {len(live)} rows")
        for namespace in np.unique(self._namespaces[live]).tolist():
            rows = live[self._namespaces[live] == namespace]
            found = np.empty(len(rows), np.int64)
            kernels.lookup(*self._table, self._keys[rows], namespace, found)
            _expect(bool((found == rows).all()), f"rows of namespace {namespace} are unreachable")
        free = _walk(int(self._state[kernels.FREE_HEAD]), self._next, top)
        _expect(len(free) + len(live) == top, f"{len(free)} free and {len(live)} of {top} rows")
        _expect(not np.isin(free, live).any(), "a live row is in the free stack")
        listed = _walk(int(self._state[kernels.LRU_OLD]), self._next, top)
        _expect(len(listed) == self.lru_count, f"{len(listed)} listed, count {self.lru_count}")
        older = np.concatenate([[kernels.NIL], listed[:-1]])[: len(listed)]
        _expect(bool((self._prev[listed] == older).all()), "LRU links differ back and forth")
        newest = int(listed[-1]) if len(listed) else kernels.NIL
        _expect(newest == self._state[kernels.LRU_NEW], "the newest row is not the list's last")
        _expect(bool(np.isin(listed, live).all()), "a free row is in the LRU list")
        linked = int(np.count_nonzero(self._prev[live] != kernels.UNLINKED))
        _expect(linked == len(listed), f"{linked} rows linked, {len(listed)} listed")


def _num_buckets(capacity: int) -> int:
    """Power of two with a load of at most `MAX_LOAD` at capacity; always one bucket is empty."""
    needed = int(capacity / MAX_LOAD) + 1
    return max(1 << (needed - 1).bit_length(), _MIN_BUCKETS)


def _as_words(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """View u8[N, 32] as u64[N, 4]; anything else would be compared wrongly, so it is refused."""
    if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != HASH_BYTES:
        raise TierUsageError(
            f"Page hashes are u8[N, {HASH_BYTES}], not {hashes.dtype}{list(hashes.shape)}."
        )
    return np.ascontiguousarray(hashes).view(np.uint64)


def _as_rows(rows: npt.ArrayLike) -> Rows:
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TierUsageError(f"Rows are integers [N], not {array.dtype}{list(array.shape)}.")
    return np.ascontiguousarray(array, dtype=np.int64)


def _renamed(names: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers as a table has them; those that it does not reach, and below 0, as they are."""
    if not len(names):
        return numbers
    renamed = numbers.copy()
    known = (numbers >= 0) & (numbers < len(names))
    renamed[known] = names[numbers[known]]
    return renamed


def _grown(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A longer array that begins as another."""
    new[: len(old)] = old
    return new


def _u32(value: int) -> int:
    if not 0 <= value <= 0xFFFFFFFF:
        raise TierUsageError(f"Namespace and segment numbers are 32 bits, {value} is not.")
    return value


def _expect(holds: bool, found: str) -> None:
    if not holds:
        raise TierInvariantError(f"Page index: {found}.")


def _walk(row: int, next_row: npt.NDArray[np.uint32], limit: int) -> Rows:
    """Rows of a linked list; one more than `limit` when it runs in a circle."""
    found: list[int] = []
    while row != kernels.NIL and len(found) <= limit:
        found.append(row)
        row = int(next_row[row])
    return np.array(found, np.int64)
