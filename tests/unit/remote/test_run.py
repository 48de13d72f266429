"""A stretch of pages in memory: what the planner asks for, put together again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.coded_remote.run import FetchedSpan, Speeds
from sglang_ext.device.layout import U8
from sglang_ext.streaming import LinkEstimator
from sglang_ext.tiers.records.record import parse_header
from sglang_ext.tiers.remote.base import RemoteKey
from sglang_ext.tiers.remote.staged import START_BYTES, read_stages, stage, unstage
from tests.unit.codec.test_page_codec import LAYOUT, page
from tests.unit.remote.remote_world import codec_of, no_prefill

NUM_PAGES = 30


def found(number: int) -> tuple[FoundPage, U8, U8]:
    """A page as a look-up finds it, the value in the store, and the coded record."""
    codec = codec_of("hier", 3)
    record = codec.encode(page(number))
    assert record is not None
    levels = codec.levels(record)
    value = stage(record, levels.first, levels.ends)
    stages = read_stages(value, value.size)
    meta = stages.meta
    key = RemoteKey(meta.namespace, meta.page_hash, meta.lora, "hier.3")
    sizes = tuple(end - START_BYTES for end in stages.ends)
    return FoundPage(number, key, meta, stages, sizes), value, record


def test_bytes_in_pieces_are_the_records_again() -> None:
    pages = [found(number) for number in range(NUM_PAGES)]
    link = LinkEstimator(prior_bytes_per_s=1e6)
    speeds = Speeds(LAYOUT.slot_bytes, 1e12, no_prefill)
    run = FetchedSpan(
        [each[0] for each in pages], link, speeds, now_s=0.0, deadline_s=60.0, pages_behind=1
    )
    assert [len(chunk) for chunk in run.chunks] == [12, 18]
    assert run.stream.decodes_at_end
    num_fetches = 0
    while (fetch := run.stream.next_fetch(0.0)) is not None:
        for part in run.parts(fetch):
            run.add(part.page, part.start, pages[part.page.number][1][part.start : part.end])
        run.stream.arrived(fetch, 0.0)
        num_fetches += 1
    assert run.stream.levels == (3, 3)
    assert num_fetches > 2, "levels come one by one"
    assert run.held_bytes == sum(each[0].sizes[-1] for each in pages)
    for where, _, record in pages:
        assert where.stages is not None
        for step in range(4):
            data = run.take(where, step)
            assert data is not None
            coded = unstage(where.stages, step, data)
            assert np.array_equal(coded[512:], record[512 : 512 + data.size])
            assert parse_header(coded)[0].level == step


def test_what_comes_after_a_page_is_done_with_is_ignored() -> None:
    where, value, _ = found(0)
    speeds = Speeds(LAYOUT.slot_bytes, 1e12, no_prefill)
    run = FetchedSpan([where], LinkEstimator(), speeds, now_s=0.0, deadline_s=None, pages_behind=0)
    run.add(where, START_BYTES, value[START_BYTES : START_BYTES + 10])
    assert (run.held_bytes, run.take(where, 0)) == (10, None)
    run.forget([where])
    run.add(where, START_BYTES, value[START_BYTES:])
    assert (run.held_bytes, run.take(where, 3)) == (0, None)


def test_stages_name_no_level_that_their_page_has_not() -> None:
    """Whoever writes to a store may say that they begin at any; levels name counters and costs."""
    where, _, _ = found(0)
    assert where.stages is not None
    assert [where.level(step) for step in range(4)] == [0, 1, 2, 3]
    forged = replace(where, stages=replace(where.stages, first_level=200))
    assert {forged.level(step) for step in range(4)} == {where.meta.level}
