"""The page's layout and its tail, which is read from disk and never trusted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.device.layout import (
    BLOCK_ALIGN_BYTES,
    HEADER_BYTES,
    ROPE_BOUND,
    ROPE_DELTA,
    ROPE_PRE,
    SLOT_ALIGN_BYTES,
    PageLayout,
    PageTails,
    read_tails,
    write_tail,
)

LAYOUT = PageLayout(4, (32, 32, 32), (32, 0, 48), 2)
K_VALUES = 32 // 2 * 4


def slot(layout: PageLayout = LAYOUT) -> np.ndarray:
    return np.zeros(layout.slot_bytes, np.uint8)


def read_tail(page: np.ndarray, layout: PageLayout) -> PageTails | None:
    """Reads it beside a page that must not be touched."""
    slots = np.stack([np.full_like(page, 0xAB), page])
    tails = read_tails(slots, np.array([1]), layout)
    slots[:] = 0xFF  # what was decoded does not look into the slots any more
    return tails


def entries(counts: list[int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.integers(0, K_VALUES, (sum(counts), 2)).astype(np.uint32)
    made[:, 1] = rng.integers(0, 1 << 16, sum(counts))
    return made


@given(
    page_size=st.integers(1, 128),
    k=st.lists(st.integers(1, 40).map(lambda n: 2 * n), min_size=1, max_size=6),
    with_v=st.booleans(),
)
def test_blocks_do_not_overlap(page_size: int, k: list[int], with_v: bool) -> None:
    v = tuple(k) if with_v else (0,) * len(k)
    layout = PageLayout(page_size, tuple(k), v, 2)
    spans = [(o, o + n * page_size) for o, n in zip(layout.k_offsets, k, strict=True)]
    spans += [(o, o + n * page_size) for o, n in zip(layout.v_offsets, v, strict=True)]
    spans = sorted(span for span in spans if span[0] < span[1])
    spans.append((layout.tail_offset, layout.tail_offset + layout.tail_bytes(0)))
    assert spans[0][0] == HEADER_BYTES
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
        assert start % BLOCK_ALIGN_BYTES == 0
    assert layout.slot_bytes % SLOT_ALIGN_BYTES == 0
    end = layout.tail_offset + layout.tail_bytes(layout.max_corrections)
    assert layout.slot_bytes - 8 < end <= layout.slot_bytes  # no room is wasted, none overrun
    assert layout.kv_bytes == (sum(k) + sum(v)) * page_size
    assert layout.max_corrections >= 16


@given(
    counts=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    state=st.sampled_from([ROPE_PRE, ROPE_BOUND, ROPE_DELTA]),
    position=st.integers(0, 2**40),
)
def test_a_tail_comes_back(counts: list[int], state: int, position: int) -> None:
    page, pairs = slot(), entries(counts)
    num_bytes = write_tail(
        page, LAYOUT, rope_state=state, position=position, counts=counts, entries=pairs
    )
    assert num_bytes == LAYOUT.payload_bytes(len(pairs))
    tail = read_tail(page, LAYOUT)
    assert tail is not None
    assert (tail.rope_state.tolist(), tail.position.tolist()) == ([state], [position])
    assert tail.layer.tolist() == np.repeat([0, 1, 2], counts).tolist()
    assert (tail.element == pairs[:, 0]).all()
    assert (tail.bits == pairs[:, 1]).all()


def test_an_earlier_page_in_the_slot_leaves_no_corrections() -> None:
    page = slot()
    write_tail(
        page, LAYOUT, rope_state=ROPE_PRE, position=0, counts=[5, 0, 2], entries=entries([5, 0, 2])
    )
    write_tail(page, LAYOUT, rope_state=ROPE_BOUND, position=64)
    tail = read_tail(page, LAYOUT)
    assert tail is not None
    assert len(tail.element) == 0
    assert (tail.rope_state.tolist(), tail.position.tolist()) == ([ROPE_BOUND], [64])


def test_tails_of_many_pages_keep_to_their_page() -> None:
    slots = np.zeros((5, LAYOUT.slot_bytes), np.uint8)
    counts = {3: [1, 0, 2], 0: [0, 0, 0], 4: [0, 7, 0]}
    for number, each in counts.items():
        write_tail(
            slots[number],
            LAYOUT,
            rope_state=number % 3,
            position=64 * number,
            counts=each,
            entries=entries(each, number),
        )
    tails = read_tails(slots, np.array([3, 0, 4]), LAYOUT)
    assert tails is not None
    assert tails.position.tolist() == [192, 0, 256]
    assert tails.rope_state.tolist() == [0, 0, 1]
    assert tails.page.tolist() == [0] * 3 + [2] * 7
    assert tails.layer.tolist() == [0, 2, 2] + [1] * 7
    pairs = np.concatenate([entries(counts[3], 3), entries(counts[4], 4)])
    assert (tails.element == pairs[:, 0]).all()
    assert (tails.bits == pairs[:, 1]).all()
    assert read_tails(slots, np.array([3, 1]), LAYOUT) is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 2), (0, 0), (1, 3), (1, 0xFFFFFFFF), (4, 6), (4, 8), (4, 0xFFFFFFFF), (5, 1),
        (6, 8), (6, 0xFFFFFFFF), (7, 1), (8, 3), (9, K_VALUES), (9, 0xFFFFFFFF),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_none(word: int, value: int) -> None:
    page, counts = slot(), [5, 0, 2]
    pairs = entries(counts)
    write_tail(page, LAYOUT, rope_state=ROPE_PRE, position=3, counts=counts, entries=pairs)
    page[LAYOUT.tail_offset :].view(np.uint32)[word] = value
    assert read_tail(page, LAYOUT) is None


@given(
    data=st.binary(min_size=0, max_size=400),
    at=st.integers(0, 300),
    counts=st.lists(st.integers(0, 30), min_size=3, max_size=3),
)
@settings(max_examples=400)
def test_fuzzed_tails_never_raise_and_never_point_outside(
    data: bytes, at: int, counts: list[int]
) -> None:
    page = slot()
    pairs = entries(counts)
    write_tail(page, LAYOUT, rope_state=ROPE_PRE, position=3, counts=counts, entries=pairs)
    start = LAYOUT.tail_offset + at
    piece = np.frombuffer(data, np.uint8)[: LAYOUT.slot_bytes - start]
    page[start : start + len(piece)] = piece
    tail = read_tail(page, LAYOUT)
    if tail is None:
        return
    assert len(tail.layer) == len(tail.element) == len(tail.bits) <= LAYOUT.max_corrections
    assert (tail.element < K_VALUES).all()
    assert (tail.layer < LAYOUT.num_layers).all()


def test_all_zeros_and_all_ones() -> None:
    assert read_tail(slot(), LAYOUT) is None
    assert read_tail(np.full(LAYOUT.slot_bytes, 0xFF, np.uint8), LAYOUT) is None
