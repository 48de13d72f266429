"""Loops of hints: when conversations are said to come back, and how often each owner was right.

A hint is judged by one page in the middle of what its conversation shares with no other path, known
by name, so that it is judged after its pages left, too: the first of them may be a prompt that is
shared from now on, and the last ones a part of an answer that the client leaves out. What is
learned of an owner is the hazard of return by the share of the hinted time that has gone by: a
spike at 1 for exact hints, a hill for rough ones, and nothing that helps for wrong ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.compiled import compiled
from sglang_ext.tiers.policy.page_kernels import ENDED, HINTED, LEFT_BEHIND, NUM_LEARNED
from sglang_ext.tiers.policy.return_kernels import WAYS, _first_slot, _mix, age_bin

NUM_OWNERS = 256
NUM_PARTS = 17  # of a hinted time: eighths up to twice it, and what is later
_PARTS_PER_SPAN = 8
_TWICE = 2 * _PARTS_PER_SPAN
_LAST_WIDTH = 2.0
NUM_ENTRIES = 1 << 13
_LEAST_S = 0.5  # no hint is taken to be finer than that
_SWEEP = 512  # entries looked at with each hint

RETURNS, ENDS = 0, 1
# An owner is taken to have been right so often, half of it just before and half just after the
# time, before anything is known.
_PRIOR = 8.0
_FADE_AT = 512.0  # what was seen counts half when it is so much
# Hints of returns are followed while so many of them come true between half and twice their time.
_RIGHT = 0.5
# Pages of ended conversations leave first while no more than the share _FEW of these came back.
# Before any was seen, _UNSEEN of them count as not come back.
_FEW, _UNSEEN = 0.05, 32.0
# Where an owner says both, what came back tells soonest whether it knows: who does not know says of
# as large a share of it that it is over as of all. Its word counts while that share is at most
# _TELLS of what it would be by chance, but for _CHANCE conversations, and if it says returns of at
# least the share _CONTROL of what it says.
_TELLS, _CHANCE, _CONTROL = 1.0 / 3.0, 2.0, 0.1


class Hints(NamedTuple):
    """The columns, all owned by `PlacementPolicy`; 6 bytes a row and some 300 KB.

    Attributes:
        span_s: f32 per row, time from the hint to the return that it names.
        owner: u8 per row, whose hint it was.
        kind: u8 per row, class that the page had before it.
        name: u64 per entry, the page by which a hint is followed, 0 for an empty one.
        at_s: f64 per entry, time of the hint.
        entry_span_s: f64 per entry, 0 for the end of a conversation.
        entry_owner: u8 per entry.
        hits: f64[NUM_OWNERS, NUM_PARTS], returns by the share of the time that had gone by.
        gone: f64[NUM_OWNERS], hints of which twice the time went by without a return.
        ended: f64[NUM_OWNERS, 2], conversations said to be over, and those of them that came back.
        returning: f64[NUM_OWNERS, 2], conversations said to come back, and those of them that did.
        rate: f64[NUM_OWNERS, NUM_PARTS], expected returns for a page and hinted time of room.
        trusted: bool[NUM_OWNERS, 2], whether hints of returns and of ends are followed.
        counts: i64[2], the next entry to be looked at, entries in use.
    """

    span_s: npt.NDArray[np.float32]
    owner: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    name: npt.NDArray[np.uint64]
    at_s: npt.NDArray[np.float64]
    entry_span_s: npt.NDArray[np.float64]
    entry_owner: npt.NDArray[np.uint8]
    hits: npt.NDArray[np.float64]
    gone: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    returning: npt.NDArray[np.float64]
    rate: npt.NDArray[np.float64]
    trusted: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]


def new_hints(num_rows: int) -> Hints:
    """No hint was given; memory of rows is committed as they are used."""
    hints = Hints(
        np.zeros(num_rows, np.float32),
        np.zeros(num_rows, np.uint8),
        np.zeros(num_rows, np.uint8),
        np.zeros(NUM_ENTRIES, np.uint64),
        np.zeros(NUM_ENTRIES),
        np.zeros(NUM_ENTRIES),
        np.zeros(NUM_ENTRIES, np.uint8),
        np.zeros((NUM_OWNERS, NUM_PARTS)),
        np.zeros(NUM_OWNERS),
        np.zeros((NUM_OWNERS, 2)),
        np.zeros((NUM_OWNERS, 2)),
        np.zeros((NUM_OWNERS, NUM_PARTS)),
        np.ones((NUM_OWNERS, 2), np.bool_),
        np.zeros(2, np.int64),
    )
    for owner in range(NUM_OWNERS):
        judge(hints, owner)
    return hints


@compiled
def _part(share: float) -> int:
    """Bin of a share of a hinted time."""
    if share <= 0.0:
        return 0
    return min(int(share * _PARTS_PER_SPAN), NUM_PARTS - 1)


@compiled
def _tells(hints: Any, owner: int) -> Any:
    """Whether what an owner says to be over comes back less often than by chance."""
    over, came_back = hints.ended[owner, 0], hints.ended[owner, 1]
    said = over + hints.returning[owner, 0]
    if hints.returning[owner, 0] < _CONTROL * said:
        return True  # it says of hardly any that they come back: nothing to compare with
    by_chance = (came_back + hints.returning[owner, 1]) * over / max(said, 1.0)
    return came_back <= _CHANCE + _TELLS * by_chance


@compiled
def judge(hints: Any, owner: int) -> None:
    """Computes from what was seen of an owner what its hints are worth, and whether to follow."""
    hits = hints.hits[owner].copy()
    tells = _tells(hints, owner)
    right = hits[_PARTS_PER_SPAN // 2 : _TWICE].sum() + (_PRIOR if tells else 0.0)
    hits[_PARTS_PER_SPAN - 1] += 0.5 * _PRIOR
    hits[_PARTS_PER_SPAN] += 0.5 * _PRIOR
    hints.trusted[owner, RETURNS] = right >= _RIGHT * (hits.sum() + hints.gone[owner])
    given, returned = hints.ended[owner, 0], hints.ended[owner, 1]
    hints.trusted[owner, ENDS] = tells and returned <= _FEW * (given + _UNSEEN)
    hazard = np.empty(NUM_PARTS)
    reached = hints.gone[owner]
    for k in range(NUM_PARTS - 1, -1, -1):
        reached += hits[k]
        hazard[k] = min(hits[k] / max(reached, 1e-9), 0.999)
    for start in range(NUM_PARTS):
        alive, returns, stayed, best = 1.0, 0.0, 0.0, 0.0
        for k in range(start, NUM_PARTS):
            width = 1.0 / _PARTS_PER_SPAN if k < NUM_PARTS - 1 else _LAST_WIDTH
            returns += alive * hazard[k]
            stayed += alive * (1.0 - 0.5 * hazard[k]) * width
            alive *= 1.0 - hazard[k]
            best = max(best, returns / stayed)
        hints.rate[owner, start] = best
    if hits.sum() + hints.gone[owner] > _FADE_AT:
        hints.hits[owner] *= 0.5
        hints.gone[owner] *= 0.5
    if max(given, hints.returning[owner, 0]) > _FADE_AT:
        hints.ended[owner] *= 0.5
        hints.returning[owner] *= 0.5


@compiled
def _entry_of(hints: Any, name: Any) -> Any:
    """The entry of a name and whether it is there; else the oldest of its set."""
    h = _mix(name)
    first: Any = _first_slot(hints, h)
    oldest: Any = first
    for entry in range(first, first + WAYS):
        if hints.name[entry] == h | np.uint64(1):
            return entry, True
        if hints.name[entry] == 0 or (
            hints.name[oldest] != 0 and hints.at_s[entry] < hints.at_s[oldest]
        ):
            oldest = entry
    return oldest, False


@compiled
def _sweep(hints: Any, now_s: float) -> None:
    """Looks at some entries for hints whose time is long over."""
    for _ in range(_SWEEP):
        entry = hints.counts[0]
        hints.counts[0] = (entry + 1) % NUM_ENTRIES
        span_s = hints.entry_span_s[entry]
        if hints.name[entry] == 0 or span_s == 0.0 or now_s - hints.at_s[entry] < 2.0 * span_s:
            continue
        hints.name[entry] = 0
        hints.counts[1] -= 1
        owner = hints.entry_owner[entry]
        hints.gone[owner] += 1.0
        judge(hints, owner)


@compiled
def _follow(hints: Any, name: Any, span_s: float, owner: int, now_s: float) -> None:
    """Notes by which page a hint is to be judged."""
    entry, _found = _entry_of(hints, name)
    hints.counts[1] += hints.name[entry] == 0
    hints.name[entry] = _mix(name) | np.uint64(1)
    hints.at_s[entry] = now_s
    hints.entry_span_s[entry] = span_s
    hints.entry_owner[entry] = owner
    if span_s == 0.0:
        hints.ended[owner, 0] += 1.0
    else:
        hints.returning[owner, 0] += 1.0
    judge(hints, owner)


@compiled
def give(
    hints: Any, pages: Any, names: Any, path: Any, span_s: float, owner: int, now_s: float
) -> Any:
    """Notes a hint of a conversation, and moves its pages to the class that the hint gives them.

    Pages that other paths share, or that nobody used yet, stay what they are, and so do all while
    the owner is not trusted.

    Args:
        hints: The columns.
        pages: What is known of pages.
        names: u64 per row.
        path: i64[N], root first; rows that do not exist are passed over.
        span_s: Until the conversation comes back; 0: never.
        owner: Below `NUM_OWNERS`.
        now_s: Time.

    Returns:
        i64[M], the pages that moved, in the order in which they are to be linked anew.
    """
    _sweep(hints, now_s)
    own = np.empty(path.size, np.int64)
    num = 0
    for i in range(path.size):
        row = path[i]
        if row < 0 or row >= pages.known.size or not pages.known[row] or pages.shared[row]:
            continue
        if pages.uses[row]:  # else its name is not known yet, by which the hint would be judged
            own[num] = row
            num += 1
    if num == 0:
        return own[:0].copy()
    if span_s > 0.0:
        span_s = max(span_s, _LEAST_S)
    _follow(hints, names[own[num // 2]], span_s, owner, now_s)
    if not hints.trusted[owner, ENDS if span_s == 0.0 else RETURNS]:
        return own[:0].copy()
    moved = np.empty(num, np.int64)
    num_moved = 0
    for row in own[:num]:
        if LEFT_BEHIND <= pages.kind[row] < NUM_LEARNED:
            continue  # or in use by another request
        if pages.kind[row] < NUM_LEARNED:
            hints.kind[row] = pages.kind[row]
        pages.kind[row] = ENDED if span_s == 0.0 else HINTED + age_bin(span_s)
        pages.last_s[row] = now_s
        hints.span_s[row] = span_s
        hints.owner[row] = owner
        moved[num_moved] = row
        num_moved += 1
    moved = moved[:num_moved]
    return moved[::-1].copy() if span_s == 0.0 else moved  # what ended leaves from this end on


@compiled
def note_use(hints: Any, names: Any, arrived_s: float) -> None:
    """Notes that pages were used, and judges the hints that are followed from any of them.

    Args:
        hints: The columns.
        names: u64[N], of the pages.
        arrived_s: When the request came.
    """
    if hints.counts[1] == 0:
        return
    for i in range(names.size):
        entry, found = _entry_of(hints, names[i])
        if not found:
            continue
        owner = hints.entry_owner[entry]
        span_s = hints.entry_span_s[entry]
        hints.name[entry] = 0
        hints.counts[1] -= 1
        if arrived_s < hints.at_s[entry]:
            # It was on its way: nothing is shown by it, and nothing of what would have been.
            told = hints.ended if span_s == 0.0 else hints.returning
            told[owner, 0] = max(told[owner, 0] - 1.0, 0.0)
            judge(hints, owner)
            continue
        if span_s == 0.0:
            hints.ended[owner, 1] += 1.0
        else:
            hints.returning[owner, 1] += 1.0
            hints.hits[owner, _part((arrived_s - hints.at_s[entry]) / span_s)] += 1.0
        judge(hints, owner)


@compiled
def is_followed(hints: Any, kind: int, row: int) -> Any:
    """Whether a page of class `ENDED` or behind it leaves by its hint."""
    return hints.trusted[hints.owner[row], ENDS if kind == ENDED else RETURNS]


@compiled
def value(hints: Any, last_s: Any, row: int, now_s: float) -> Any:
    """Expected returns of a hinted page for each second of room."""
    span_s = hints.span_s[row]
    part = _part((now_s - last_s[row]) / span_s)
    return hints.rate[hints.owner[row], part] / span_s


@compiled
def score(hints: Any, scores: Any, pages: Any, row: int, now_s: float) -> Any:
    """Score of a page at its present age, without its hint."""
    kind = pages.kind[row]
    if kind >= NUM_LEARNED:
        kind = hints.kind[row]
    return scores[kind, age_bin(now_s - pages.last_s[row])]


@compiled
def worth(
    hints: Any, scores: Any, pages: Any, rows: Any, now_s: float, out: Any, by_hint: Any
) -> None:
    """What pages that nobody waits for are worth; -1 for what leaves before all others.

    Args:
        hints: The columns.
        scores: What was learned of classes; see `SampledPages`.
        pages: What is known of pages.
        rows: i64[N].
        now_s: Time.
        out: f64[N], out.
        by_hint: bool[N], out: whether that is by what was said of the page, not of its class.
    """
    for i in range(rows.size):
        row = rows[i]
        kind = pages.kind[row]
        by_hint[i] = kind >= ENDED and is_followed(hints, kind, row)
        if by_hint[i]:
            out[i] = -1.0 if kind == ENDED else value(hints, pages.last_s, row, now_s)
        else:
            out[i] = score(hints, scores, pages, row, now_s)
