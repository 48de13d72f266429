"""Eviction from one tier: which page leaves, at a cost that does not grow with what is stored.

The choice itself is made in `tier_kernels.py` (`evict_unwanted`, then `evict_wanted`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import page_kernels
from sglang_ext.tiers.policy import tier_kernels as kernels
from sglang_ext.tiers.policy.base_orders.base import BaseOrder
from sglang_ext.tiers.policy.config import PolicyConfig
from sglang_ext.tiers.policy.hints import hint_kernels
from sglang_ext.tiers.policy.return_times import ReturnTimes
from sglang_ext.tiers.policy.waiting_queue import WaitingQueue

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PolicyState:
    """What a policy and the lists of its tiers share.

    Attributes:
        config: of the policy.
        num_rows: rows are 0 to `num_rows` - 1.
        order: the base order.
        queue: what waits.
        pages: what is known of pages.
        hints: what was said of them, and what that proved to be worth.
    """

    config: PolicyConfig
    num_rows: int
    order: BaseOrder
    queue: WaitingQueue
    pages: page_kernels.Pages
    hints: hint_kernels.Hints


class Worth(NamedTuple):
    """What pages are worth, one value a page.

    Attributes:
        needed: how soon a waiting request needs it; minus infinity where none does.
        score: expected returns for a second of room, of pages that are needed at the same time.
        said: whether that is by a hint or a pin of the page, not by what was learned of its class.
        follows_scores: whether what was learned decides between pages of which nothing was said.
    """

    needed: npt.NDArray[np.float64]
    score: npt.NDArray[np.float64]
    said: npt.NDArray[np.bool_]
    follows_scores: bool


class TierLists:
    """The pages of a tier in the order in which they leave. Made by `PlacementPolicy.add_tier`.

    The owner says what enters and leaves; uses and the queue come from the policy. `evict` chooses
    over all pages of the tier. A page leaves before its parent, always; a held page never leaves.

    Not locked: the owner's lock guards it. Memory: 17 bytes a row. It has many methods because both
    the tier's owner and the policy tell it what happens.

    Attributes:
        return_times: the estimator of this tier and its guard.
    """

    def __init__(
        self, shared: PolicyState, bit: int, capacity_pages: int, size_pages: int,
        *, holds_copies: bool = False,
    ) -> None:  # fmt: skip
        self._shared = shared
        self._bit = bit
        shares = shared.config.shares
        self._lists = kernels.new_lists(shared.num_rows, 1 + len(shares))
        self._shares = np.array([max(0.0, 1.0 - sum(shares)), *shares])
        self.return_times = ReturnTimes(capacity_pages, shared.order)
        self._capacity_pages, self._size_pages = capacity_pages, size_pages
        self._holds_copies = holds_copies

    def __len__(self) -> int:
        """Pages in the tier."""
        return int(self._lists.counts[kernels.COUNT])

    @property
    def size_pages(self) -> int:
        """Pages that the tier has room for: as many as are sure to find it, or as lie here.

        There are more of the latter where pages are coded, up to the capacity. 0 where what lies
        here are copies of what lies in another tier.
        """
        if self._holds_copies:
            return 0
        return max(self._size_pages, min(len(self), self._capacity_pages))

    @property
    def num_pinned(self) -> int:
        """Pages in the tier that are pinned."""
        return int(self._lists.counts[kernels.PINS])

    def has(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages lie in the tier."""
        present: npt.NDArray[np.bool_] = self._lists.state[rows] != kernels.ABSENT
        return present

    def held(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages are held."""
        held: npt.NDArray[np.bool_] = self._lists.held[rows]
        return held

    def spare(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages are got from elsewhere; see `spare_where`."""
        spare: npt.NDArray[np.bool_] = self._lists.spare[rows]
        return spare

    def enter(self, rows: Rows) -> None:
        """Pages are in the tier now; root first, and after `used` where they are new."""
        kernels.enter(self._lists, self._shared.pages, rows)
        kernels.mark_dirty(self._shared.queue.needs, rows, self._bit)

    def exit(self, rows: Rows) -> None:
        """Pages left the tier otherwise than through `evict`."""
        kernels.leave(self._lists, self._shared.pages, rows, self._young)

    def hold_where(self, rows: Rows, stay: npt.NDArray[np.bool_]) -> None:
        """Sets for each page whether it is held, in place of what was set before."""
        kernels.hold_where(self._lists, rows, stay, self._young)

    def spare_where(self, rows: Rows, spare: npt.NDArray[np.bool_]) -> None:
        """Sets for each page whether a request that waits for it can have it from another tier.

        Then it leaves as if nobody waited for it. A page that enters again keeps what was set last.
        """
        kernels.spare_where(self._lists, rows, spare, self._young)

    def demote(self, rows: Rows) -> int:
        """These pages leave this tier before others that nobody waits for, until they are used.

        Those that other paths share, or that are pinned, stay as they are.

        Args:
            rows: root first, all valid.

        Returns:
            How many lie here and were not to leave so before.
        """
        own = self.demotable(rows)
        # The deepest lies at the end from which they leave.
        return int(kernels.demote(self._lists, own if self._young else own[::-1].copy()))

    def demotable(self, rows: Rows) -> Rows:
        """Which of some pages `demote` would move: no path shares them, and nobody pins them."""
        pages = self._shared.pages
        if not self._shared.config.lookahead:
            return rows[:0]
        own = (pages.known[rows] != 0) & (pages.shared[rows] == 0) & (pages.pinned[rows] == 0)
        found: Rows = rows[own]
        return found

    def next_to_leave(self, count: int, now_s: float) -> Rows:
        """Up to `count` pages that `evict` would take out first; they stay. O(count)."""
        rows = self.evict(count, now_s)
        self.put_back(rows)
        return rows

    def put_back(self, rows: Rows) -> None:
        """Undoes the eviction of the last pages that `evict` took out, in the order it gave."""
        kernels.put_back(self._lists, self._shared.pages, rows, self._young)
        kernels.mark_dirty(self._shared.queue.needs, rows, self._bit)

    def evict(self, count: int, now_s: float, tenant: int | None = None) -> Rows:
        """Takes out up to `count` pages and returns them in the order of leaving.

        First those that nobody waits for, then those that are needed latest. Where tenants have
        shares, those who have more than theirs give first, both kinds.

        Args:
            count: pages asked for.
            now_s: time.
            tenant: for whose pages room is made: then others that are within their shares give
                nothing, and there may be fewer pages; None: that is not known.
        """
        out = np.empty(max(count, 0), np.int64)
        everybody = np.full(len(self._shares), len(out), np.int64)
        if not self.has_shares:
            return out[: self._evict(out, everybody, now_s)]
        num = self._evict(out, self._above_shares(0 if tenant is None else count, tenant), now_s)
        if tenant is None:
            # Second pass: what is above its share of what will be left. Third: whatever may leave.
            num += self._evict(out[num:], self._above_shares(num - count), now_s)
            return out[: num + self._evict(out[num:], everybody, now_s)]
        # What those above their share hold cannot leave now: a tenant has its own to give.
        everybody[np.arange(len(everybody)) != tenant] = 0
        return out[: num + self._evict(out[num:], everybody, now_s)]

    def _evict(self, out: Rows, may_give: npt.NDArray[np.int64], now_s: float) -> int:
        """Takes out pages into `out`, of each tenant so many at most; returns how many."""
        if not len(out):
            return 0
        shared, times = self._shared, self.return_times
        num = kernels.evict_unwanted(
            self._lists, shared.pages, shared.hints, shared.queue.needs.head, times.scores,
            shared.config.return_times and times.active, shared.config.lookahead, self._young,
            shared.config.lookahead and times.left_never_return, self._most_pinned, now_s,
            may_give, out,
        )  # fmt: skip
        if num < len(out) and shared.config.lookahead:
            num += kernels.evict_wanted(
                self._lists, shared.pages, shared.queue.needs, shared.queue.slots(),
                self._bit, self._young, may_give, out[num:],
            )  # fmt: skip
        return int(num)

    def _above_shares(self, coming: int = 0, tenant: int | None = None) -> npt.NDArray[np.int64]:
        """By how many pages each tenant has more than its share of what lies here.

        Of a full tier that is its share of the tier; what others leave free of theirs is lent.

        Args:
            coming: with a tenant, its pages that replace as many others; without, the change of the
                total, below 0 if pages have left.
            tenant: whose.
        """
        sizes = self._lists.sizes.copy()
        if tenant is not None:
            sizes[tenant] += coming
        total = len(self) + (coming if tenant is None else 0)
        by_right = np.floor(self._shares * total).astype(np.int64)
        above: npt.NDArray[np.int64] = np.maximum(sizes - by_right, 0)
        return above

    def is_within_share(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages are of tenants that have no more than their share of what lies here."""
        within: npt.NDArray[np.bool_] = self._above_shares() == 0
        return within[self._shared.pages.tenant[rows]]

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares."""
        return len(self._shares) > 1

    @property
    def num_by_tenant(self) -> list[int]:
        """Pages of each tenant with a share, and in front of these of all others.

        Empty where nobody has a share.
        """
        return [int(num) for num in self._lists.sizes] if self.has_shares else []

    def worth(self, rows: Rows, now_s: float) -> Worth:
        """What pages are worth, of this tier or another; the one with less leaves sooner."""
        shared, times = self._shared, self.return_times
        scores, by_hint = np.zeros(len(rows)), np.zeros(len(rows), np.bool_)
        hint_kernels.worth(shared.hints, times.scores, shared.pages, rows, now_s, scores, by_hint)
        pinned = self.stays_pinned(rows)
        scores[pinned] = np.inf
        by_hint |= pinned
        follows_scores = shared.config.return_times and times.active
        return Worth(self.needed(rows), scores, by_hint, follows_scores)

    def needed(self, rows: Rows) -> npt.NDArray[np.float64]:
        """How soon a waiting request needs pages; see `Worth`."""
        needed = np.full(len(rows), -np.inf)
        if self._shared.config.lookahead:
            places = self._shared.queue.needed_at(rows)
            needed[places >= 0] = -places[places >= 0]
        return needed

    def are_over(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages leave before all that nobody waits for, as nobody is to want them again.

        Their conversation is said to be over, and who says so is believed; or it was cut, and goes
        on without them, where such pages have not come back. Nobody waits for them or pins them.
        """
        pages, hints = self._shared.pages, self._shared.hints
        if not self._shared.config.lookahead:
            return np.zeros(len(rows), np.bool_)
        kinds = pages.kind[rows]
        over: npt.NDArray[np.bool_] = kinds == page_kernels.ENDED
        over &= hints.trusted[hints.owner[rows], hint_kernels.ENDS]
        if self.return_times.left_never_return:
            over |= kinds == page_kernels.LEFT_BEHIND
        over &= (pages.known[rows] != 0) & (pages.pinned[rows] == 0)
        return over & np.isneginf(self.needed(rows))

    def stays_pinned(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which pages leave last because they are pinned; none while there are too many."""
        if self.num_pinned > self._most_pinned:
            return np.zeros(len(rows), np.bool_)
        pinned: npt.NDArray[np.bool_] = self._shared.pages.pinned[rows] != 0
        return pinned

    def with_what_leads(self, rows: Rows, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Those of some pages that are chosen, or that lead to such or to pages that lie here.

        Args:
            rows: i64 `[N]`, none twice.
            chosen: bool `[N]`.
        """
        pages, num = self._shared.pages, len(rows)
        leads = np.append(chosen | (self._lists.children[rows] > 0), False)
        order = np.argsort(rows)
        parents = np.where(pages.known[rows] != 0, pages.parent[rows], -1)
        place = np.minimum(np.searchsorted(rows, parents, sorter=order), num - 1)
        above = np.where(rows[order[place]] == parents, order[place], num)  # `num`: not among them
        above = np.append(above, num)
        for _ in range(num.bit_length()):  # each time over twice as many pages
            leads[above[leads]] = True
            above = above[above]
        result: npt.NDArray[np.bool_] = leads[:num]
        return result

    # ---- called by the policy ----

    def used(self, path: Rows, old_parents: npt.NDArray[np.int32]) -> None:
        """Notes a use; see `PlacementPolicy.used`."""
        restamps = self._shared.order.restamps_on_use
        kernels.used(self._lists, self._shared.pages, path, old_parents, restamps, self._young)

    def touched(self, rows: Rows) -> None:
        """Makes pages the last of their class to leave; see `PlacementPolicy.touched`."""
        if not self._shared.order.restamps_on_use:
            kernels.move(self._lists, self._shared.pages, rows)
            return
        kernels.touch(self._lists, self._shared.pages, rows)

    def adopt(self, path: Rows, old_parents: npt.NDArray[np.int32]) -> None:
        """Notes that pages have other parents now; see `PlacementPolicy.enqueue`."""
        kernels.used(self._lists, self._shared.pages, path, old_parents, False, self._young)

    def left_behind(self, rows: Rows) -> None:
        """Notes that conversations go on without these pages."""
        if self.return_times.left_never_return:  # else they leave by the classes they had
            kernels.move(self._lists, self._shared.pages, rows)

    def reclassified(self, rows: Rows) -> None:
        """Notes that pages are of other classes now, by a hint or a pin."""
        kernels.move(self._lists, self._shared.pages, rows)

    def settle(self, rows: Rows) -> None:
        """Nobody waits for these pages any more."""
        kernels.settle(self._lists, rows, self._young)

    # ---- private ----

    @property
    def _most_pinned(self) -> int:
        """Pinned pages that leave last: a share of the pages that lie here now."""
        return int(self._shared.config.pin_share * len(self))

    @property
    def _young(self) -> bool:
        return self._shared.order.youngest_first
