"""The planner of streamed contexts, driven by links that behave and by links that do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.streaming import (
    ChunkFetch,
    ChunkOffer,
    ContextStream,
    LinkEstimator,
    LinkShare,
    QualityScale,
    StreamCosts,
)

QUALITY = QualityScale((0.03, 0.006, 0.001, 0.0003), default_level=2)
SIZES = (10_000, 30_000, 60_000, 110_000)
RAW = 1_000


def offers(num: int) -> list[ChunkOffer]:
    return [ChunkOffer(100, SIZES) for _ in range(num)]


def costs(prefill_s: float = 1.0, decode: float = 1e12) -> StreamCosts:
    return StreamCosts(RAW, decode, lambda new, before: prefill_s * new)


def planner(
    num: int = 4,
    *,
    deadline_s: float | None = None,
    speed: float | None = None,
    prefill_s: float = 1.0,
    decode: float = 1e12,
    question_tokens: int = 0,
) -> ContextStream:
    return ContextStream(
        offers(num),
        costs(prefill_s, decode),
        QUALITY,
        LinkEstimator(prior_bytes_per_s=speed),
        now_s=0.0,
        deadline_s=deadline_s,
        question_tokens=question_tokens,
    )


def drive(stream: ContextStream, bytes_per_s: float) -> tuple[float, list[ChunkFetch]]:
    """Runs a planner on a steady link until it begins; returns when, and what was fetched."""
    now_s, free_s, flying, done = 0.0, 0.0, [], []
    while not stream.may_begin(now_s):
        while fetch := stream.next_fetch(now_s):
            free_s = max(free_s, now_s) + fetch.num_bytes / bytes_per_s
            flying.append((free_s, fetch))
        assert flying or stream.plan.begin_s > now_s, "it neither begins nor asks"
        next_s = min([flying[0][0]] if flying else [], default=stream.plan.begin_s)
        if next_s > stream.plan.begin_s > now_s:
            now_s = stream.plan.begin_s
            continue
        now_s, fetch = flying.pop(0)
        done.append(fetch)
        stream.arrived(fetch, now_s)
    return now_s, done


def test_without_a_deadline_every_chunk_comes_at_the_default_level() -> None:
    stream = planner(speed=1e6)
    _, done = drive(stream, 1e6)
    assert stream.levels == (2, 2, 2, 2)
    assert [(fetch.start, fetch.end) for fetch in done] == [(0, SIZES[2])] * 4


def test_two_fetches_are_in_flight() -> None:
    stream = planner(speed=1e6)
    assert stream.next_fetch(0.0) is not None
    assert stream.next_fetch(0.0) is not None
    assert stream.next_fetch(0.0) is None


def test_a_slow_link_is_worse_than_computing() -> None:
    stream = planner(speed=1e3, prefill_s=0.01)
    assert stream.plan.num_loaded == 0
    assert stream.may_begin(0.0)


def test_the_end_of_a_context_is_computed_where_that_is_faster() -> None:
    """0.06 s a chunk on the link, 0.02 s computed: behind nothing that is worth fetching."""
    mixed = ContextStream(
        [ChunkOffer(1_000, SIZES), ChunkOffer(10, SIZES)],
        costs(1e-4),
        QUALITY,
        LinkEstimator(prior_bytes_per_s=1e6),
        now_s=0.0,
        question_tokens=0,
    )
    assert mixed.plan.num_loaded == 1  # 60 ms against 100; then 1 ms computed against 60


def test_with_time_everything_comes_at_the_best_level() -> None:
    stream = planner(deadline_s=10.0, speed=1e6)
    begin_s, _ = drive(stream, 1e6)
    assert stream.levels == (3, 3, 3, 3)
    assert begin_s < 1.0


def test_all_chunks_get_the_coarsest_level_before_any_is_refined() -> None:
    stream = planner(deadline_s=10.0, speed=1e6)
    _, done = drive(stream, 1e6)
    assert [fetch.level for fetch in done] == sorted(fetch.level for fetch in done)
    assert [fetch.chunk for fetch in done[:4]] == [0, 1, 2, 3]


def test_refinements_stop_at_the_deadline() -> None:
    stream = planner(deadline_s=0.2, speed=1e6)
    begin_s, done = drive(stream, 1e6)
    assert begin_s <= 0.2
    assert all(level >= 1 for level in stream.levels)
    assert sum(fetch.num_bytes for fetch in done) <= 0.2e6


def test_text_is_the_best_quality_where_it_fits() -> None:
    assert planner(deadline_s=10.0, speed=1e6, prefill_s=0.01).plan.num_loaded == 0
    assert planner(deadline_s=10.0, speed=1e6, prefill_s=1.0).plan.num_loaded == 4


def test_a_link_that_drops_costs_refinements_and_not_the_deadline() -> None:
    stream = planner(deadline_s=1.0, speed=1e8)
    begin_s, _ = drive(stream, 1e5)
    assert begin_s <= 1.0
    assert min(stream.levels) == 0


def test_a_slow_decoder_gets_each_chunk_once() -> None:
    stream = planner(deadline_s=1.0, speed=1e6, decode=1e6)
    assert not stream.decodes_at_end
    _, done = drive(stream, 1e6)
    assert [fetch.chunk for fetch in done] == [0, 1, 2, 3]
    assert all(fetch.start == 0 for fetch in done)


def test_a_chunk_that_cannot_be_had_is_computed_with_all_behind_it() -> None:
    stream = planner(speed=1e6)
    first, second = stream.next_fetch(0.0), stream.next_fetch(0.0)
    assert first is not None
    assert second is not None
    stream.arrived(first, 0.1)
    stream.failed(second, 0.2)
    assert stream.plan.num_loaded == 1
    assert stream.may_begin(0.2)


def test_fetches_that_overtake_each_other_count_once_nothing_is_missing_before_them() -> None:
    stream = planner(1, deadline_s=10.0)
    fetches = []
    for turn in range(3):
        pair = [stream.next_fetch(0.01 * turn), stream.next_fetch(0.01 * turn)]
        for fetch in reversed(pair):
            if fetch is not None:
                stream.arrived(fetch, 0.01 * turn)
                fetches.append(fetch)
    assert len(fetches) > 3
    assert fetches[0].start == fetches[1].end  # it was overtaken
    assert stream.levels == (max(fetch.level for fetch in fetches),)


def test_a_refinement_behind_a_lost_one_is_not_used() -> None:
    stream = planner(1, deadline_s=10.0, speed=1e6)
    base = stream.next_fetch(0.0)
    assert base is not None
    first = stream.next_fetch(0.0)
    stream.arrived(base, 0.01)
    second = stream.next_fetch(0.01)
    assert first is not None
    assert second is not None
    stream.failed(first, 0.02)
    stream.arrived(second, 0.03)
    assert stream.levels == (0,)
    assert stream.may_begin(0.03)


@given(
    st.integers(1, 6),
    st.floats(1e4, 1e8),
    st.floats(1e4, 1e8),
    st.one_of(st.none(), st.floats(0.01, 5.0)),
    st.floats(1e-5, 1e-1),
    st.sampled_from([1e5, 1e7, 1e12]),
)
def test_every_context_begins_on_what_its_plan_promises(
    num: int,
    believed: float,
    real: float,
    deadline_s: float | None,
    prefill_s: float,
    decode: float,
) -> None:
    stream = planner(num, deadline_s=deadline_s, speed=believed, prefill_s=prefill_s, decode=decode)
    _, done = drive(stream, real)
    assert all(level >= 0 for level in stream.levels[: stream.plan.num_loaded])
    for chunk in range(num):  # bytes of a chunk come once, in order and without a gap
        parts = [fetch for fetch in done if fetch.chunk == chunk]
        assert [fetch.start for fetch in parts] == [0, *[fetch.end for fetch in parts]][:-1]


def test_contexts_take_turns() -> None:
    rng = random.Random(3)
    share = LinkShare(max_in_flight=1)
    streams = {name: planner(3, deadline_s=10.0, speed=1e6) for name in "abc"}
    for name, stream in streams.items():
        share.add(name, stream)
    order, now_s = [], 0.0
    while found := share.next_fetch(now_s):
        owner, fetch = found
        order.append((fetch.level, fetch.chunk))
        now_s += rng.uniform(0.001, 0.01)
        streams[str(owner)].arrived(fetch, now_s)
        share.done()
    assert order == sorted(order)
    assert all(stream.levels == (3, 3, 3) for stream in streams.values())


def test_an_estimate_follows_the_link() -> None:
    link = LinkEstimator(memory_bytes=1e6)
    assert link.bytes_per_s is None
    for _ in range(5):
        link.observe(1_000_000, 1.0)
    assert link.bytes_per_s == pytest.approx(1e6)
    for _ in range(5):
        link.observe(1_000_000, 0.1)
    assert link.bytes_per_s == pytest.approx(1e7, rel=0.1)


class _Counted(ChunkOffer):
    """An offer that counts how often its bytes are asked for."""

    num_asked = 0

    def bytes_between(self, have: int, want: int) -> int:
        _Counted.num_asked += 1
        return super().bytes_between(have, want)


@pytest.mark.parametrize("deadline_s", [None, 1000.0])
def test_a_decision_looks_at_each_chunk_as_often_however_many_there_are(
    deadline_s: float | None,
) -> None:
    """A prompt of a million tokens has some thousand: looks at all pairs would take seconds."""
    asked = []
    for num in (20, 2000):
        stream = ContextStream(
            [_Counted(100, SIZES) for _ in range(num)],
            costs(),
            QUALITY,
            LinkEstimator(prior_bytes_per_s=1e9),
            now_s=0.0,
            deadline_s=deadline_s,
        )
        _Counted.num_asked = 0
        fetch = stream.next_fetch(0.0)
        assert fetch is not None
        stream.arrived(fetch, 0.001)
        asked.append(_Counted.num_asked / num)
    assert asked[0] == asked[1] <= 2 * len(SIZES)


def test_levels_that_do_not_pay_are_passed_over() -> None:
    scale = QualityScale((0.03, 0.029, 0.001), default_level=2)
    assert scale.steps((100, 200, 300)) == (0, 2)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 2), (3, 1)])
def test_sizes_that_do_not_rise_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="more bytes than for the one before"):
        ChunkOffer(1, sizes)
