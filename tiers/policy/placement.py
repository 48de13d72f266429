"""The placement policy: what is known of pages and of the queue, and what to fetch ahead.

`tier_lists.py` uses this knowledge to decide which pages leave a tier. Between pages that nobody
waits for and of which it says the same, a base order decides (`order.py`). A base order is two
booleans; all other rules are code of `tier_lists.py` and `tier_kernels.py`.

Source: AttentionStore, section 3.3. Pure: clock, queue and pages are arguments. The same code
decides in the server, where a row is a row of the page index, and in `python -m bench policies`,
where it is a simulated page.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import page_kernels, return_kernels
from sglang_ext.tiers.policy.base_orders.registry import base_order
from sglang_ext.tiers.policy.config import PolicyConfig
from sglang_ext.tiers.policy.hints import hint_kernels
from sglang_ext.tiers.policy.hints.lives import Lives
from sglang_ext.tiers.policy.hints.pins import Pins
from sglang_ext.tiers.policy.return_times import Names, ReturnTimes
from sglang_ext.tiers.policy.tier_lists import PolicyState, TierLists
from sglang_ext.tiers.policy.waiting_queue import WaitingQueue

Rows = npt.NDArray[np.int64]
_MAX_TIERS = 8
_DEFAULT = PolicyConfig()


class PlacementPolicy:
    """What is known of pages and of the queue; decides which pages to fetch ahead.

    `add_tier` makes the lists of one tier (`TierLists`), which decide what leaves that tier.

    A path is the rows of a prefix, root first. A request is any hashable id. Rows that do not exist
    are passed over. Not locked: the owner's lock is held around every call. Each call costs time in
    proportion to its own arguments; nothing grows with what is stored. It has many methods because
    it is all that owners know of the policy; each hands on to the part that does the work.

    Memory: some 69 bytes a row, committed as rows come into use; 19 more for a row whose page has a
    limited life or a pin; and the paths of the requests that wait.

    Args:
        num_rows: rows are 0 to `num_rows` - 1.
        config: see `PolicyConfig`.
        _compile: internal.

    Attributes:
        config: as given.
        num_rows: as given.
        order: the base order.
        queue: what waits.
        pages: what is known of pages.
        hints: the hints that were given of pages, and how often those of each owner came true.
        pins: the pins of pages.
        tiers: what `add_tier` made.
    """

    def __init__(
        self, num_rows: int, config: PolicyConfig = _DEFAULT, *, _compile: bool = True
    ) -> None:
        if not 0 < num_rows < 1 << 31:
            raise ValueError(f"a policy is for 1 to 2^31 - 1 rows, got {num_rows:,}")
        if _compile:
            _compile_loops()
        self.config = config
        self.num_rows = num_rows
        self.order = base_order(config.order)
        self.queue = WaitingQueue(num_rows)
        self.pages = page_kernels.new_pages(num_rows)
        self.hints = hint_kernels.new_hints(num_rows)
        self._lives = Lives(num_rows)
        self.pins = Pins(num_rows)
        self.tiers: list[TierLists] = []
        self._generation = np.zeros(num_rows, np.uint32)
        self._names = np.zeros(num_rows, np.uint64)

    def add_tier(
        self, capacity_pages: int, size_pages: int | None = None, *, holds_copies: bool = False
    ) -> TierLists:
        """Eviction lists over all pages of one tier, for owners without an LRU list of their own.

        Args:
            capacity_pages: pages that may lie there; return times are learned for so many.
            size_pages: pages that are sure to find room, of which pins take a share; None: as many.
            holds_copies: whatever lies there lies in another tier, too, which counts for pins.

        Raises:
            ValueError: there are eight already.
        """
        if len(self.tiers) == _MAX_TIERS:
            raise ValueError(f"a policy keeps lists of up to {_MAX_TIERS} tiers, no more")
        shared = PolicyState(
            self.config, self.num_rows, self.order, self.queue, self.pages, self.hints
        )
        if size_pages is None:
            size_pages = capacity_pages
        tier = TierLists(
            shared, 1 << len(self.tiers), capacity_pages, size_pages, holds_copies=holds_copies
        )
        self.tiers.append(tier)
        return tier

    # ---- what waits ----

    def enqueue(self, request: Hashable, path: Rows, now_s: float) -> None:
        """A request waits, at the end of the queue, and needs these pages.

        Again with another path: replaces it, and the request keeps its place.
        """
        del now_s  # not needed: waiting is no use of a page, and only uses have times
        path = _as_rows(path)
        old_parents = np.empty(len(path), np.int32)
        if page_kernels.adopt(self.pages, path, old_parents):
            for tier in self.tiers:
                tier.adopt(path, old_parents)
        self._unneeded(self.queue.enqueue(request, path))

    def leave(self, request: Hashable) -> None:
        """A request waits no more: admitted, aborted, whatever. Unknown ones are ignored."""
        self._unneeded(self.queue.leave(request))

    def set_order(self, requests: Sequence[Hashable]) -> None:
        """The scheduler's order. Unknown requests are ignored; those not named come last."""
        self.queue.set_order(requests)

    # ---- what happened ----

    def link(self, path: Rows, now_s: float) -> None:
        """Notes that pages which are stored, or were found, follow one another on a path.

        That is no use of them. `used` notes the same; before it, only this says which page leads to
        which.

        Args:
            path: root first, or from any page on; unknown rows are passed over.
            now_s: time.
        """
        path = _as_rows(path)
        inside = (path >= 0) & (path < self.num_rows)
        path = path if inside.all() else path[inside]
        old_parents = np.empty(len(path), np.int32)
        if page_kernels.link(self.pages, path, now_s, old_parents):
            for tier in self.tiers:
                tier.adopt(path, old_parents)

    def touched(self, rows: Rows, now_s: float) -> None:
        """Somebody is about to use these pages: they leave as late as if they were used now.

        With return times the pages are of the class of pages in use, which leave as late as any
        class at their age. `used` and `rested` give them the class that their uses make.
        """
        rows = _as_rows(rows)
        page_kernels.touch(self.pages, rows, self.order.restamps_on_use, now_s)
        for tier in self.tiers:
            tier.touched(rows)

    def rested(self, rows: Rows) -> None:
        """Nobody is about to use these pages after all: gives them the classes of their last use.

        Their age counts from `touched` on. Hints that were given of them before do not hold again.
        """
        self._reclassified(page_kernels.rest(self.pages, _as_rows(rows)))

    def used(
        self,
        path: Rows,
        now_s: float,
        *,
        names: Names | None = None,
        arrived_s: float | None = None,
    ) -> None:
        """A request computed or reused these pages: the whole path, root first.

        Call it once for a request, when its pages are complete: a second call would count as
        another request that came back for them.

        Args:
            path: rows, no row twice.
            now_s: time.
            names: u64[N], any 64 bits of each page's key. With them a page that left the system is
                recognised when it comes back, so that return times beyond its stay are learned.
            arrived_s: when the request arrived, to which return times are measured; `now_s` if
                not given.
        """
        path = _as_rows(path)
        inside = (path >= 0) & (path < self.num_rows)
        if not inside.all():
            path = path[inside]
            names = None if names is None else names[inside]
        if not len(path):
            return
        old_parents = np.empty(len(path), np.int32)
        page_kernels.use(self.pages, path, self.order.restamps_on_use, now_s, old_parents)
        for tier in self.tiers:
            tier.used(path, old_parents)
        if names is None:
            high = self._generation[path].astype(np.uint64) << np.uint64(32)
            names = path.astype(np.uint64) | high
        self._names[path] = names
        self._lives.forget(path)
        if self.config.return_times:
            kinds = self.pages.kind[path]
            since_s = now_s if arrived_s is None else arrived_s
            hint_kernels.note_use(self.hints, names, since_s)
            for times in self._estimators():
                times.learn(names, kinds, now_s, since_s)

    def leave_behind(self, rows: Rows, now_s: float) -> Rows:
        """A conversation was cut to fit its context, and goes on without these pages.

        Those that nobody else used leave before all others that nobody waits for, until it is seen
        that such pages come back after all.

        Args:
            rows: root first.
            now_s: time.

        Returns:
            The pages of `rows` that are marked by this call, deepest first: not those that others
            share, nor those that were marked before.
        """
        if not self.config.lookahead or not self.config.return_times:
            return np.zeros(0, np.int64)
        left: Rows = page_kernels.leave_behind(self.pages, _as_rows(rows), now_s)
        if len(left):
            for tier in self.tiers:
                tier.left_behind(left)
            for times in self._estimators():
                times.left_behind(self._names[left], now_s)
        return left

    def are_shared(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages have paths of different requests behind them; False for rows of -1."""
        shared: npt.NDArray[np.bool_] = (
            (rows >= 0) & (self.pages.shared[rows] != 0) & (self.pages.known[rows] != 0)
        )
        return shared

    def hint(
        self, path: Rows, now_s: float, *, owner: int, returns_in_s: float | None = None
    ) -> Rows:
        """Somebody says when a conversation comes back, or that it does not.

        A hint changes the order in which pages leave that nobody waits for, while enough of the
        owner's earlier hints have come true. Pages that other paths share keep their place. A page
        that is used again loses its hint.

        Args:
            path: the conversation's pages, root first, behind `used`.
            now_s: time.
            owner: below `NUM_OWNERS`, who is judged by it.
            returns_in_s: seconds from now, above 0; None for an end.

        Returns:
            The pages whose place changed.
        """
        if not self.config.lookahead or not self.config.return_times:
            return np.zeros(0, np.int64)
        span_s = 0.0 if returns_in_s is None else float(returns_in_s)
        moved: Rows = hint_kernels.give(
            self.hints, self.pages, self._names, _as_rows(path), span_s, owner, now_s
        )
        self._reclassified(moved)
        return moved

    def assign(self, rows: Rows, tenant: int) -> None:
        """Somebody's pages are stored, or were found: they count towards the share of that tenant.

        Args:
            rows: the pages.
            tenant: see `PolicyConfig.shares`.
        """
        if self.config.shares:
            self._reclassified(page_kernels.assign(self.pages, _as_rows(rows), tenant))

    def limit_life(self, path: Rows, now_s: float, *, owner: int, ttl_s: float) -> int:
        """Somebody says for how long a conversation's pages may live from now on.

        When that is over and they were not used again, it is as if its end was said then: they
        leave first, where the owner's ends come true. Pages that others share stay as they are.

        Args:
            path: the conversation's pages, root first, behind `used`.
            now_s: time.
            owner: below `NUM_OWNERS`, who is judged by it.
            ttl_s: seconds from now, above 0, at most `timers.MAX_S`.

        Returns:
            Number of pages of which this is said now.
        """
        if not self.config.lookahead or not self.config.return_times:
            return 0
        return self._lives.limit(self.pages, _as_rows(path), ttl_s, owner, now_s)

    def pin(
        self, path: Rows, now_s: float, *, owner: int, seconds: float, gives_way: bool = False
    ) -> tuple[int, int]:
        """Somebody wants a conversation to stay for a time.

        Pinned pages leave after all others that nobody waits for. That holds in a tier while no
        more than `PolicyConfig.pin_share` of it is pinned; and no more than that share of all tiers
        together is pinned at all. Uses and hints of pinned pages are noted as of others.

        Args:
            path: the conversation's pages, root first.
            now_s: time.
            owner: below `NUM_OWNERS`, who has them pinned.
            seconds: from now, above 0, at most `timers.MAX_S`.
            gives_way: whether, of the owner's pins with this flag, those that end later take the
                room of those that end sooner; see `Pins.pin`.

        Returns:
            Pages that are pinned since this call, and pages for which there was no room.
        """
        if not self.config.lookahead:
            return 0, 0
        most = int(self.config.pin_share * sum(tier.size_pages for tier in self.tiers))
        new, lost, refused = self.pins.pin(
            self.pages, _as_rows(path), seconds, owner, most, now_s, gives_way=gives_way
        )
        self._reclassified(lost)
        self._reclassified(new)
        return len(new), refused

    def unpin(self, rows: Rows) -> int:
        """Takes the pins of pages away; returns how many had one."""
        had = self.pins.unpin(self.pages, _as_rows(rows))
        self._reclassified(had)
        return len(had)

    def has_due(self, now_s: float) -> bool:
        """Whether `expire` has anything to do. O(1)."""
        return self._lives.has_due(now_s) or self.pins.has_due(now_s)

    def expire(self, now_s: float) -> Rows:
        """Takes away pins and hints the end of conversations whose time is over, a bounded number.

        Returns:
            The pages of these conversations whose place in the order of leaving changed.
        """
        self._reclassified(self.pins.take_due(self.pages, now_s))
        moved = [self.hint(rows, now_s, owner=owner) for owner, rows in self._lives.take_due(now_s)]
        return np.concatenate(moved) if moved else np.zeros(0, np.int64)

    def forget(self, rows: Rows) -> None:
        """Pages left the system; their row numbers may be reused."""
        rows = _as_rows(rows)
        rows = rows[(rows >= 0) & (rows < self.num_rows)]
        self._lives.forget(rows)
        self.pins.unpin(self.pages, rows)
        for tier in self.tiers:
            tier.exit(rows)
        self.queue.forget(rows)
        page_kernels.forget(self.pages, rows)
        self._generation[rows] += 1

    # ---- decisions ----

    def wanted(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages some waiting request needs."""
        return self.queue.needed_at(_as_rows(rows)) >= 0

    def window(self, budget_pages: int) -> list[Hashable]:
        """The leading requests whose distinct pages fit the budget together; at least the first.

        The prefetch window, and with the room of all tiers the eviction window. AttentionStore
        divides the room by the mean size of a request; here pages are counted, shared ones once.
        """
        return self.queue.window(budget_pages)

    # ---- private ----

    def _unneeded(self, rows: Rows) -> None:
        if len(rows):
            for tier in self.tiers:
                tier.settle(rows)

    def _reclassified(self, rows: Rows) -> None:
        """Pages are of other classes now."""
        if len(rows):
            for tier in self.tiers:
                tier.reclassified(rows)

    def _estimators(self) -> list[ReturnTimes]:
        return [tier.return_times for tier in self.tiers]


def _as_rows(rows: Rows) -> Rows:
    return np.ascontiguousarray(rows, np.int64)


@functools.cache
def _compile_loops() -> None:
    """Calls every loop once, so that nothing compiles while serving."""
    policy = PlacementPolicy(64, PolicyConfig(pin_share=0.5, shares=(0.5,)), _compile=False)
    tier = policy.add_tier(8)
    tier.return_times.active = True
    for turn in range(8):
        path = np.arange(turn, turn + 16)
        policy.enqueue(turn, path, 0.0)
        policy.enqueue(turn, path[:8], 0.0)
        policy.leave_behind(path[:2], 0.0)
        policy.used(path, float(turn), names=path.astype(np.uint64) + np.uint64(turn * 100))
        tier.enter(path)
        policy.hint(path, float(turn), owner=0, returns_in_s=float(turn) or None)
        policy.limit_life(path, float(turn), owner=0, ttl_s=1.0)
        policy.pin(path, float(turn), owner=0, seconds=1.0)
        policy.expire(float(turn))
    return_kernels.rescore(tier.return_times.directory, 9.0, 1.0)
    tier.worth(np.arange(4), 9.0)
    tier.demote(np.arange(4))
    policy.assign(np.arange(4), 1)
    policy.set_order(list(range(7, -1, -1)))
    policy.link(np.arange(40, 44), 9.0)
    policy.touched(np.arange(4), 9.0)
    policy.rested(np.arange(4))
    tier.hold_where(np.arange(4), np.zeros(4, np.bool_))
    tier.spare_where(np.arange(4), np.ones(4, np.bool_))
    tier.next_to_leave(4, 9.0)
    policy.wanted(np.arange(4))
    policy.window(10)
    tier.evict(20, 9.0)
    policy.leave(0)
    policy.forget(np.arange(16))
