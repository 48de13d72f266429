"""Loops of the return-time estimator: a sampled directory of pages, two small caches in it, scores.

The directory holds sampled pages by name, whether they are still stored or not, and from it the
hazard of return is learned by class and age. In the same directory two miniature caches run side by
side, one by the base order, one by the scores: their hits tell which of the two to follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.linked_rows import NONE, append, cut
from sglang_ext.tiers.policy.page_kernels import IN_USE, LEFT_BEHIND, NUM_INNER, NUM_LEARNED

WAYS = 8
NUM_BINS = 27  # of age: three in two octaves from half a second to a day, the last one open
_FIRST_S = 0.5
_BINS_PER_OCTAVE = 1.5
_PRIOR = 16.0  # returns that a class is taken to have seen at the common rate

# Places of `counts`
HITS_BASE, HITS_SCORE, ONLY_ONE, USES, SIZE_BASE, SIZE_SCORE, STAMP = range(7)


class SampledPages(NamedTuple):
    """Sampled pages, in sets of `WAYS`; and the statistics.

    Attributes:
        name: u64 per slot, 0 for an empty slot.
        kind: u8 per slot, class at the last use.
        last_s: f64 per slot, time of the last use.
        base_prev, base_next, score_prev, score_next: i32 per slot, lists of the two caches; -2
            in `*_prev` where the page is not in that cache.
        base_ends: i32[2, 1], oldest and youngest of the base cache.
        score_ends: i32[2, NUM_LEARNED], of each class of the other.
        stamp: i64 per slot, when it was linked last.
        hits: f64[NUM_LEARNED, NUM_BINS], returns by class and age.
        exits: f64[NUM_LEARNED, NUM_BINS], pages that left the directory unreturned.
        scores: f64[NUM_LEARNED, NUM_BINS].
        counts: i64[7].
    """

    name: npt.NDArray[np.uint64]
    kind: npt.NDArray[np.uint8]
    last_s: npt.NDArray[np.float64]
    base_prev: npt.NDArray[np.int32]
    base_next: npt.NDArray[np.int32]
    score_prev: npt.NDArray[np.int32]
    score_next: npt.NDArray[np.int32]
    base_ends: npt.NDArray[np.int32]
    score_ends: npt.NDArray[np.int32]
    stamp: npt.NDArray[np.int64]
    hits: npt.NDArray[np.float64]
    exits: npt.NDArray[np.float64]
    scores: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


def new_directory(num_slots: int) -> SampledPages:
    """An empty directory; `num_slots` is a power of two and at least `WAYS`."""
    links: list[Any] = [np.full(num_slots, -2, np.int32) for _ in range(4)]
    tables: list[Any] = [np.zeros((NUM_LEARNED, NUM_BINS)) for _ in range(3)]
    make: Any = SampledPages
    directory: SampledPages = make(
        np.zeros(num_slots, np.uint64),
        np.zeros(num_slots, np.uint8),
        np.zeros(num_slots),
        *links,
        np.full((2, 1), NONE, np.int32),
        np.full((2, NUM_LEARNED), NONE, np.int32),
        np.zeros(num_slots, np.int64),
        *tables,
        np.zeros(7, np.int64),
    )
    return directory


@compiled
def age_bin(age_s: float) -> int:
    """Bin of an age."""
    if age_s <= _FIRST_S:
        return 0
    return min(int(np.log2(age_s / _FIRST_S) * _BINS_PER_OCTAVE) + 1, NUM_BINS - 1)


@compiled
def _mix(value: Any) -> Any:
    """SplitMix64's finaliser."""
    h = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@compiled
def _cut(prev: Any, next_: Any, ends: Any, column: int, slot: int) -> None:
    cut(prev, next_, ends, column, slot)
    prev[slot] = -2


@compiled
def _leave_caches(directory: Any, slot: int) -> None:
    d = directory
    if d.base_prev[slot] != -2:
        _cut(d.base_prev, d.base_next, d.base_ends, 0, slot)
        d.counts[SIZE_BASE] -= 1
    if d.score_prev[slot] != -2:
        _cut(d.score_prev, d.score_next, d.score_ends, d.kind[slot], slot)
        d.counts[SIZE_SCORE] -= 1


@compiled
def _first_slot(directory: Any, h: Any) -> Any:
    """First slot of the set of a page whose mixed name is `h`."""
    return np.int64((h >> np.uint64(20)) & np.uint64(directory.name.size // WAYS - 1)) * WAYS


@compiled
def _find(directory: Any, h: Any) -> Any:
    """Slot of the page whose mixed name is `h`; `NONE` where it is not in the directory."""
    first: Any = _first_slot(directory, h)
    for slot in range(first, first + WAYS):
        if directory.name[slot] == h | np.uint64(1):
            return slot
    return NONE


@compiled
def _slot_of(directory: Any, name: Any, h: Any, now_s: float) -> Any:
    """The page's slot and whether it was there; else the slot of the set's oldest page, emptied."""
    d = directory
    first: Any = _first_slot(d, h)
    oldest: Any = first
    for slot in range(first, first + WAYS):
        if d.name[slot] == name:
            return slot, True
        older = d.name[oldest] != 0 and d.last_s[slot] < d.last_s[oldest]
        if d.name[slot] == 0 or older:
            oldest = slot
    if d.name[oldest] != 0:
        d.exits[d.kind[oldest], age_bin(now_s - d.last_s[oldest])] += 1
        _leave_caches(d, oldest)
    d.name[oldest] = name
    return oldest, False


@compiled
def _shrink_score_cache(directory: Any, now_s: float) -> None:
    d = directory
    best, best_score, best_stamp = NONE, 0.0, 0
    for kind in range(NUM_LEARNED):
        slot = d.score_ends[0, kind]
        if slot == NONE:
            continue
        score = d.scores[kind, age_bin(now_s - d.last_s[slot])]
        older = score == best_score and d.stamp[slot] < best_stamp
        if best == NONE or score < best_score or older:
            best, best_score, best_stamp = slot, score, d.stamp[slot]
    _cut(d.score_prev, d.score_next, d.score_ends, d.kind[best], best)
    d.counts[SIZE_SCORE] -= 1


@compiled
def _count_hits(directory: Any, names: Any, mask: Any) -> None:
    """Counts what a path hits in each cache: its leading pages, up to the first that is missing."""
    d = directory
    in_base, in_score = True, True
    for i in range(names.size):
        h = _mix(names[i])
        if h & mask:
            continue
        slot = _find(d, h)
        in_base = in_base and slot != NONE and d.base_prev[slot] != -2
        in_score = in_score and slot != NONE and d.score_prev[slot] != -2
        if not (in_base or in_score):
            return
        d.counts[HITS_BASE] += in_base
        d.counts[HITS_SCORE] += in_score
        d.counts[ONLY_ONE] += in_base != in_score


@compiled
def learn(
    directory: Any, names: Any, kinds: Any, now_s: float, arrived_s: float, mask: Any,
    capacity: int, restamps: bool, youngest_first: bool,
) -> None:  # fmt: skip
    """Notes the use of a path in the directory and in both caches.

    Args:
        directory: The columns.
        names: u64[N], names of the pages, root first.
        kinds: u8[N], their classes from now on.
        now_s: Time of the use.
        arrived_s: When the request arrived; return times are measured to it.
        mask: u64, a page is sampled when these bits of its mixed name are zero.
        capacity: Sampled pages that either cache holds.
        restamps: As in `BaseOrder`.
        youngest_first: As in `BaseOrder`.
    """
    d = directory
    _count_hits(d, names, mask)
    for i in range(names.size - 1, -1, -1):
        h = _mix(names[i])
        if h & mask:
            continue
        name = h | np.uint64(1)
        d.counts[USES] += 1
        slot, found = _slot_of(d, name, h, now_s)
        in_base = d.base_prev[slot] != -2
        in_score = d.score_prev[slot] != -2
        if found:
            d.hits[d.kind[slot], age_bin(arrived_s - d.last_s[slot])] += 1
        if in_base and restamps:
            _cut(d.base_prev, d.base_next, d.base_ends, 0, slot)
            append(d.base_prev, d.base_next, d.base_ends, 0, slot)
        elif not in_base:
            append(d.base_prev, d.base_next, d.base_ends, 0, slot)
            d.counts[SIZE_BASE] += 1
        if in_score:
            _cut(d.score_prev, d.score_next, d.score_ends, d.kind[slot], slot)
            d.counts[SIZE_SCORE] -= 1
        d.kind[slot] = kinds[i]
        d.last_s[slot] = now_s
        d.counts[STAMP] += 1
        d.stamp[slot] = d.counts[STAMP]
        append(d.score_prev, d.score_next, d.score_ends, d.kind[slot], slot)
        d.counts[SIZE_SCORE] += 1
    # A whole path comes in before anything leaves, as in the real thing.
    while d.counts[SIZE_BASE] > capacity:
        leaving = d.base_ends[1 if youngest_first else 0, 0]
        _cut(d.base_prev, d.base_next, d.base_ends, 0, leaving)
        d.counts[SIZE_BASE] -= 1
    while d.counts[SIZE_SCORE] > capacity:
        _shrink_score_cache(d, now_s)


@compiled
def relabel(directory: Any, names: Any, kind: int, now_s: float, mask: Any) -> None:
    """Changes the class of pages, without a use.

    In the statistics of its old class a page counts as gone, unreturned, at its present age.
    """
    d = directory
    for i in range(names.size):
        h = _mix(names[i])
        slot = NONE if h & mask else _find(d, h)
        if slot == NONE or d.kind[slot] == kind:
            continue
        d.exits[d.kind[slot], age_bin(now_s - d.last_s[slot])] += 1
        if d.score_prev[slot] != -2:
            _cut(d.score_prev, d.score_next, d.score_ends, d.kind[slot], slot)
            append(d.score_prev, d.score_next, d.score_ends, kind, slot)
        d.kind[slot] = kind
        d.last_s[slot] = now_s


@compiled
def _wider_class(kind: int) -> int:
    """0 for pages inside a path, 1 for last pages, 2 for those left behind."""
    return 0 if kind < NUM_INNER else 1 if kind < LEFT_BEHIND else 2


@compiled
def _score_row(hazard: Any, widths: Any, scores: Any) -> None:
    """For each age the best ratio of expected return to expected stay over all horizons."""
    for start in range(NUM_BINS):
        alive, returned, stayed, best = 1.0, 0.0, 0.0, 0.0
        for k in range(start, NUM_BINS):
            returned += alive * hazard[k]
            stayed += alive * (1.0 - 0.5 * hazard[k]) * widths[k]
            alive *= 1.0 - hazard[k]
            best = max(best, returned / stayed)
        scores[start] = best


@compiled
def rescore(directory: Any, now_s: float, decay: float) -> None:
    """Computes the scores from what was seen, then lets it fade by `decay`."""
    d = directory
    lost = d.exits.copy()
    for slot in range(d.name.size):
        if d.name[slot] != 0:
            lost[d.kind[slot], age_bin(now_s - d.last_s[slot])] += 1
    widths = np.empty(NUM_BINS)
    for k in range(NUM_BINS):
        low = 0.0 if k == 0 else _FIRST_S * 2.0 ** ((k - 1) / _BINS_PER_OCTAVE)
        widths[k] = _FIRST_S * 2.0 ** (k / _BINS_PER_OCTAVE) - low
    wide_hits = np.zeros((3, NUM_BINS))
    wide_risk = np.zeros((3, NUM_BINS))
    risk = np.zeros((NUM_LEARNED, NUM_BINS))
    for kind in range(NUM_LEARNED):
        reached = 0.0
        for k in range(NUM_BINS - 1, -1, -1):
            reached += d.hits[kind, k] + lost[kind, k]
            risk[kind, k] = reached - 0.5 * lost[kind, k]  # lost in the middle of the bin
        wide_hits[_wider_class(kind)] += d.hits[kind]
        wide_risk[_wider_class(kind)] += risk[kind]
    hazard = np.empty(NUM_BINS)
    for kind in range(NUM_LEARNED):
        wide = _wider_class(kind)
        returned, expected = _PRIOR, _PRIOR
        for k in range(NUM_BINS):
            hazard[k] = wide_hits[wide, k] / max(wide_risk[wide, k], 1.0)
            returned += d.hits[kind, k]
            expected += risk[kind, k] * hazard[k]
        for k in range(NUM_BINS):
            hazard[k] = min(hazard[k] * returned / expected, 0.999)
        _score_row(hazard, widths, d.scores[kind])
    for k in range(NUM_BINS):
        d.scores[IN_USE, k] = d.scores[:NUM_INNER, k].max()
    d.hits[:] *= decay
    d.exits[:] *= decay
