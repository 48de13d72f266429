"""The scheduler's waiting queue as the store sees it: what is needed, and what to fetch first.

AttentionStore (Gao et al., USENIX ATC 2024), 3.3: the queue names the pages that will be needed,
in order. The decisions are the policy's (`tiers/policy`); this class finds the pages' rows for it
and holds the lock around every call. Nothing here blocks on I/O; the cost is that of a request's
own pages, or of what changed in the queue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PlacementPolicy
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.types import (
    ON_DISK,
    READY,
    WRITE_DROPPED,
    Hashes,
    KeySpace,
    Rows,
    TierCounts,
)

Key = tuple[int, bytes]  # number of the key space, hash of the page

# Parts of hybrids that are looked up under one hold of the lock, when some may leave.
_MOST_PARTS = 1024
# From one look for times that are over to the next, of which each ends a bounded number. A step of
# the scheduler may ask for requests many times.
_EXPIRE_EVERY_S = 0.01
_MIX, _U64 = 0x9E3779B97F4A7C15, (1 << 64) - 1


class _Wishes:
    """Waiting requests by a page that each looks out for. The table's lock guards it."""

    def __init__(self) -> None:
        self._requests: dict[Key, dict[Hashable, None]] = {}
        self._pages: dict[Hashable, Key] = {}  # by request

    def __bool__(self) -> bool:
        return bool(self._pages)

    def set(self, request: Hashable, space: KeySpace, hashes: Hashes) -> None:
        """A request looks out for the first of some pages, or for none, and no more for another."""
        self.drop(request)
        if len(hashes):
            key = self._pages[request] = space.number, hashes[0].tobytes()
            self._requests.setdefault(key, {})[request] = None

    def drop(self, request: Hashable) -> None:
        """A request looks out for nothing more; unknown ones are ignored."""
        key = self._pages.pop(request, None)
        if key is None:
            return
        requests = self._requests[key]
        del requests[request]
        if not requests:
            del self._requests[key]

    def of(self, number: int, hashes: Hashes) -> dict[Hashable, None]:
        """Who looks out for any of these pages of a key space, in order."""
        found: dict[Hashable, None] = {}
        for row in hashes:
            found.update(self._requests.get((number, row.tobytes()), {}))
        return found

    def on_path(self, number: int, path: Rows, index: PageIndex) -> dict[Hashable, None]:
        """Who looks out for any of a path's pages, first come first.

        A path may be long, and is saved piece by piece: only the pages that somebody looks out for
        are gone through in Python.

        Args:
            number: of the path's key space.
            path: rows, -1 for unknown pages.
            index: whose rows these are.
        """
        keys = [key for key in self._requests if key[0] == number]
        if not keys:
            return {}
        hashes = np.frombuffer(b"".join(page for _, page in keys), np.uint8).reshape(-1, 32)
        rows = index.lookup(hashes, number)
        found: dict[Hashable, None] = {}
        for place in np.flatnonzero((rows >= 0) & np.isin(rows, path)).tolist():
            found.update(self._requests[keys[place]])
        return found


class LookAhead:
    """Tells a policy what waits, and asks it for the prefetch window. Thread-safe.

    Attributes:
        num_waiting: requests that wait, as of the last look at the window.
        num_in_window: those of them that were in it.
        on_over: told of pages that nobody is to want again (`TierLists.are_over`): hashes u8
            `[N, 32]`, and numbers of their key spaces, u32 `[N]`. Called under the table's lock, so
            it must return at once. None: nobody is.

    It has many methods because each thing that is known ahead of a page, by a request that waits, a
    client or an operator, is told by one.
    """

    def __init__(self, books: Books, policy: PlacementPolicy) -> None:
        self._table, self._lookups = books.table, books.lookups
        self._spills, self._pins = books.spills, books.pins
        self._policy = policy  # guarded by the table's lock
        self.num_waiting = 0  # requests; of the last call of `window`
        self.num_in_window = 0
        # What requests wait for by the first page that they miss, and hybrids by the first one
        # that they could not reuse, stored or not. In _changed are, in order, requests to be looked
        # up again. All guarded by the table's lock.
        self._missing, self._behind = _Wishes(), _Wishes()
        self._changed: dict[Hashable, None] = {}
        self._next_expiry_s = float("-inf")
        self.on_over: Callable[[Hashes, npt.NDArray[np.uint32]], None] | None = None
        books.saves.on_published = self._published

    def expect(
        self,
        request: Hashable,
        space: KeySpace,
        hashes: Hashes,
        num_above: int,
        max_quality: int = ANY,
        *,
        next_page: Hashes | None = None,
    ) -> TierCounts:
        """A request waits, or what it waits for has become known better.

        Args:
            request: a name for it.
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.
            num_above: leading pages that lie on the device.
            max_quality: the worst that it may be given.
            next_page: u8 `[n, 32]`, n <= 1: whenever something is saved on a path through this page
                of its prompt, the request should be looked for again. A window or a state that is
                saved may let a hybrid go on there.

        Returns:
            Where those of its other pages lie that are stored.
        """
        table = self._table
        with table.lock:
            above, below = self._lookups.path(space, hashes, num_above, max_quality)
            path = np.concatenate([above, below])
            table.assign(path, space.tenant_number)
            table.touch(path)
            # With nothing stored behind the device prefix, copies of the prefix are not needed.
            self._policy.enqueue(request, path if len(below) else below, table.now_s())
            self._spills.wanted(space, below)
            self._missing.set(request, space, hashes[num_above + len(below) :])
            self._behind.set(request, space, hashes[:0] if next_page is None else next_page)
            return self._lookups.count_tiers(below)

    def take_changed(self, most: int) -> list[Hashable]:
        """Waiting requests that should be looked for again: `expect` them.

        The first page that they miss was stored, or they lost some that they had. Without this a
        prefix that one of them computes would not be kept for those that wait far behind it.

        Args:
            most: how many to return; the others come with the next call.
        """
        queue = self._policy.queue
        # Read without the lock; what is missed here is seen at the next step.
        now_s = self._table.now_s()
        if now_s >= self._next_expiry_s and self._policy.has_due(now_s):
            self._next_expiry_s = now_s + _EXPIRE_EVERY_S
            self._expire()
        if not (self._changed or queue.has_lost_pages):
            return []
        with self._table.lock:
            self._changed.update(dict.fromkeys(queue.take_lost_pages()))
            taken = list(itertools.islice(self._changed, most))
            for request in taken:
                del self._changed[request]
        return taken

    def leave_behind(self, space: KeySpace, hashes: Hashes, first: int, end: int) -> None:
        """A conversation was cut to fit its context, and goes on without pages [first, end).

        They lead to nothing any more, and leave first. Shared ones stay as they are.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on as they were before the cut.
            first: the first page that it goes on without.
            end: end of these pages.
        """
        table = self._table
        with table.lock:
            rows = table.index.lookup(hashes, space.number)
            left = self._policy.leave_behind(rows[first:end], table.now_s())
            if not len(left):
                return
            table.parents.depart(rows[:first], rows[end:])
            table.counters.add("left_behind_pages", len(left))
            if table.order.left_never_return:
                self._are_over(left)

    def leave(self, request: Hashable) -> None:
        """A request does not wait any more; unknown ones are ignored."""
        with self._table.lock:
            self._policy.leave(request)
            self._missing.drop(request)
            self._behind.drop(request)
            self._changed.pop(request, None)

    def rested(self, space: KeySpace, hashes: Hashes) -> None:
        """What somebody waited for is not going to be used; see `PlacementPolicy.rested`."""
        with self._table.lock:
            self._policy.rested(self._table.index.prefix_rows(hashes, space.number))

    def used(self, space: KeySpace, hashes: Hashes, arrived_s: float | None) -> None:
        """A request has ended: it computed or reused these pages.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.
            arrived_s: when it entered the queue, monotonic; None when it did not.
        """
        table = self._table
        with table.lock:
            rows = table.index.prefix_rows(hashes, space.number)
            # Any 64 bits of a page's key: one page in two key spaces is two.
            names = np.ascontiguousarray(hashes[: len(rows)]).view(np.uint64)[:, 0]
            names = names ^ np.uint64(space.number * _MIX & _U64)
            self._policy.used(rows, table.now_s(), names=names, arrived_s=arrived_s)

    def hint(
        self, space: KeySpace, hashes: Hashes, *, owner: int, returns_in_s: float | None
    ) -> None:
        """Somebody says when a conversation comes back, behind `used`; see `PlacementPolicy.hint`.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.
            owner: who says it, below `NUM_OWNERS`.
            returns_in_s: seconds from now, above 0; None: the conversation is over.
        """
        table, ends = self._table, returns_in_s is None
        with table.lock:
            rows = table.index.prefix_rows(hashes, space.number)
            moved = self._policy.hint(rows, table.now_s(), owner=owner, returns_in_s=returns_in_s)
            if ends and len(moved):
                self._are_over(moved)
            elif len(moved):
                self._spills.worth_more(rows)
        table.counters.add("hinted_ends_pages" if ends else "hinted_return_pages", len(moved))
        table.counters.add("hints_not_followed", int(len(moved) == 0))

    def limit_life(self, space: KeySpace, hashes: Hashes, *, owner: int, ttl_s: float) -> None:
        """Somebody says how long a conversation's pages may live, behind `used`.

        See `PlacementPolicy.limit_life`.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.
            owner: who says it, below `NUM_OWNERS`.
            ttl_s: seconds from now, above 0.
        """
        table = self._table
        with table.lock:
            rows = table.index.prefix_rows(hashes, space.number)
            num = self._policy.limit_life(rows, table.now_s(), owner=owner, ttl_s=ttl_s)
        table.counters.add("ttl_pages", num)
        table.counters.add("hints_not_followed", int(num == 0))

    def pin(
        self, space: KeySpace, hashes: Hashes, *, owner: int, seconds: float,
        gives_way: bool = False,
    ) -> None:  # fmt: skip
        """Somebody wants a conversation to stay for a time; see `PlacementPolicy.pin`.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.
            owner: who has it pinned, below `NUM_OWNERS`.
            seconds: from now, above 0.
            gives_way: a request says so; later ones of the owner may take its room.
        """
        table = self._table
        with table.lock:
            rows = table.index.prefix_rows(hashes, space.number)
            num, refused = self._policy.pin(
                rows, table.now_s(), owner=owner, seconds=seconds, gives_way=gives_way
            )
            if num:
                self._spills.worth_more(rows)
        table.counters.add("pinned_pages", num)
        table.counters.add("pins_refused_pages", refused)

    def unpin(self, space: KeySpace, hashes: Hashes) -> int:
        """Takes the pins of a prompt's pages away; returns how many had one."""
        table = self._table
        with table.lock:
            num = self._policy.unpin(table.index.prefix_rows(hashes, space.number))
        table.counters.add("unpinned_pages", num)
        return num

    def demote(self, space: KeySpace, hashes: Hashes) -> int:
        """A prompt's pages may leave DRAM for the disk now: they are the first that leave it.

        What the disk does not have yet is written next, also what it did not take before. Without a
        disk nothing is demoted. Pages that other paths share, that are pinned or that somebody
        waits for stay where they are.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`, its pages from the root on.

        Returns:
            Pages that are first to leave since this call.
        """
        table, num = self._table, 0
        with table.lock:
            rows = table.index.prefix_rows(hashes, space.number)
            rows = rows[(table.index.flags[rows] & READY) != 0]
            if table.disk_order is not None:
                rows = table.order.demotable(rows)
                num = table.order.demote(rows)
                flags = table.index.flags[rows]
                dropped = (flags & (ON_DISK | WRITE_DROPPED)) == WRITE_DROPPED
                self._spills.offer(rows[dropped])
                self._spills.queue_leaving(rows[(flags & ON_DISK) == 0][::-1])
        table.counters.add("demoted_pages", num)
        return num

    def let_leave(self, space: KeySpace, beside: Hashes, parts: Hashes) -> None:
        """Parts of hybrids that later ones made hardly worth their bytes leave both tiers first.

        Until they are used; where the disk is full, what DRAM alone has is not written for leaving
        it. Those of pages that other paths share stay as they are. A long path is gone through in
        pieces, so that nobody waits long for the lock.

        Args:
            space: namespace and adapter.
            beside: u8 `[N, 32]`, the full layers' page that each belongs to.
            parts: u8 `[N, 32]`, in the order of their path.
        """
        num = 0
        for end in range(len(parts), 0, -_MOST_PARTS):  # the deepest leave first
            piece = slice(max(0, end - _MOST_PARTS), end)
            num += self._let_some_leave(space, beside[piece], parts[piece])
        self._table.counters.add("superseded_pages", num)

    def _let_some_leave(self, space: KeySpace, beside: Hashes, parts: Hashes) -> int:
        table, num = self._table, 0
        with table.lock:
            shared = self._policy.are_shared(table.index.lookup(beside, space.number))
            rows = table.index.lookup(parts[~shared], space.number)
            rows = table.order.demotable(rows[rows >= 0])
            for order in (table.order, table.disk_order):
                if order is not None:
                    num += order.demote(rows)
            self._spills.spare(rows)
        return num

    def went_on(self, space: KeySpace, parts: Hashes) -> None:
        """A prompt went on behind parts of hybrids: they are not the first to leave any more.

        Args:
            space: namespace and adapter.
            parts: u8 `[N, 32]`, in the order of their path.
        """
        table = self._table
        with table.lock:
            rows = table.index.lookup(parts, space.number)
            rows = rows[rows >= 0]
            table.touch(rows)
            self._spills.used(space, rows[(table.index.flags[rows] & READY) != 0])

    @property
    def num_pinned(self) -> int:
        """Pages that are pinned now."""
        return len(self._policy.pins)

    def pages_by_tenant(self) -> dict[str, int]:
        """Pages of each tenant with a share, in DRAM and on disk, by name; empty without shares."""
        with self._table.lock:
            pages = {}
            for where, order in (("host", self._table.order), ("disk", self._table.disk_order)):
                for number, num in enumerate(order.num_by_tenant if order is not None else ()):
                    name = f"tenant_{number}" if number else "others"
                    pages[f"quota_{name}_{where}_pages"] = num
            return pages

    def set_order(self, requests: Sequence[Hashable]) -> None:
        """The order in which the scheduler will take the waiting requests."""
        with self._table.lock:
            self._policy.set_order(requests)

    def window(self) -> list[Hashable]:
        """The leading requests whose pages plans may pin together; at least the first."""
        with self._table.lock:
            window = list(self._policy.window(self._pins.max_planned_pages))
            self.num_waiting = len(self._policy.queue)
            self.num_in_window = len(window) if self.num_waiting else 0
            return window

    def _expire(self) -> None:
        """What was said of pages until now holds no longer."""
        table = self._table
        with table.lock:
            ended = self._policy.expire(table.now_s())
            if len(ended):
                self._are_over(ended)
        table.counters.add("ttl_ended_pages", len(ended))

    # ---- private; the caller holds the lock ----

    def _are_over(self, rows: Rows) -> None:
        """Pages are the first to leave from now on, deepest first."""
        self._table.index.lru_sink(rows[::-1])
        if self.on_over is not None:
            self.on_over(*self._table.index.keys(rows))

    def _published(self, number: int, hashes: Hashes, path: Rows) -> None:
        """Pages of a key space became known, or known better."""
        if self._missing:
            self._changed.update(self._missing.of(number, hashes))
        if self._behind:
            self._changed.update(self._behind.on_path(number, path, self._table.index))
