"""Measuring a link and a decoder that are not used: when, how much, and what it proves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.coded_remote.link import LinkMeter
from sglang_ext.coded_remote.probe import Probe, Prober
from sglang_ext.coded_remote.publish import Publisher
from sglang_ext.coded_remote.run import FetchedSpan, Speeds
from sglang_ext.coded_remote.transfer import Part
from sglang_ext.streaming import LinkEstimator
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.page_rules import AnyPage
from sglang_ext.tiers.records.record import RAW_CODEC
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.types import StoreCounters
from tests.tiers.remote.remote_cases import open_store
from tests.unit.codec.test_page_codec import LAYOUT
from tests.unit.remote.remote_world import codec_of
from tests.unit.remote.test_run import found

NUM_PAGES = 12
TOKEN_S = 1e-4


def prefill_s(num_new: int, num_before: int) -> float:
    return TOKEN_S * num_new


def run_of(
    link: LinkEstimator, deadline_s: float | None = None, token_s: float = TOKEN_S
) -> FetchedSpan:
    return FetchedSpan(
        [found(number)[0] for number in range(NUM_PAGES)],
        link,
        Speeds(LAYOUT.slot_bytes, 1e9, lambda new, before: token_s * new),
        now_s=0.0,
        deadline_s=deadline_s,
        pages_behind=0,
    )


@pytest.fixture
def prober(tmp_path: Path) -> Iterator[Prober]:
    arena = HostArena(4, LAYOUT.slot_bytes)
    codec = codec_of("hier", 3)
    books = Books(
        arena,
        PageIndex(64),
        disk_pages=None,
        write_policy="write_through",
        counters=StoreCounters(),
        events=EventLog(""),
    )
    remote = open_store(f"file://{tmp_path}?size=1GB&free=1")
    publisher = Publisher(books, remote, codec, DecodedPages(), AnyPage())
    yield Prober(publisher, LAYOUT.slot_bytes)
    remote.close()


@pytest.mark.parametrize(
    ("bytes_per_s", "seconds", "expected"),
    [
        pytest.param(None, 0.001, 1e8, id="unknown"),
        pytest.param(1e6, 0.001, 1e8, id="much faster"),
        pytest.param(1e8, 0.0008, 1.007e8, id="a little faster"),
        pytest.param(1e9, 0.001, 1e9, id="slower"),
        pytest.param(1e6, 0.0, 1e6, id="no time"),
    ],
)
def test_a_short_measurement_changes_an_estimate_upwards_only(
    bytes_per_s: float | None, seconds: float, expected: float
) -> None:
    link = LinkEstimator(64e6, prior_bytes_per_s=bytes_per_s, prior_bytes=4e6)
    link.observe_probe(100_000, seconds)
    assert link.bytes_per_s == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("beside", [False, True])
def test_a_probe_proves_nothing_beside_a_fetch(beside: bool) -> None:
    meter = LinkMeter()
    meter.estimator = LinkEstimator(prior_bytes_per_s=1e6, prior_bytes=10e6)
    meter.tick(0.0, needed=False)
    meter.began()
    if beside:
        meter.began()
        meter.tick(0.019, needed=False)
        meter.ended()
    meter.arrived(100_000)
    meter.tick(0.020, needed=False)
    meter.ended(probe=True)
    assert meter.is_idle
    assert meter.busy_s == 0.0, "nobody waited"
    assert meter.estimator.bytes_per_s is not None
    assert (meter.estimator.bytes_per_s > 1.5e6) == (not beside)


def test_as_many_pages_as_the_share_of_computing_pays_for_and_one_at_least(prober: Prober) -> None:
    per_page = found(0)[0].sizes[-1]
    computing_s = prefill_s((NUM_PAGES + 1) * 64, 0)
    for bytes_per_s, least, most in ((1.0, 1, 1), (4 * per_page / (0.05 * computing_s), 3, 5)):
        link = LinkEstimator(prior_bytes_per_s=bytes_per_s)
        prober._not_before_s = 0.0
        prober.consider(run_of(link), link, LinkEstimator(prior_bytes_per_s=1e12), 0.0)
        probe = prober.take(0.0)
        assert probe is not None
        assert least <= len(probe.pages) <= most
        assert [part.end - part.start for part in probe.parts] == [
            page.sizes[-1] for page in probe.pages
        ]
        prober.done(0.0)


def test_one_at_a_time_and_then_a_pause(prober: Prober) -> None:
    link = LinkEstimator(prior_bytes_per_s=1e3)
    decoding = LinkEstimator(prior_bytes_per_s=1e9)
    prober.consider(run_of(link), link, decoding, 10.0)
    assert prober.take(10.0) is not None
    prober.consider(run_of(link), link, decoding, 10.5)
    assert prober.take(10.5) is None
    prober.done(11.0)
    prober.consider(run_of(link), link, decoding, 14.9)
    assert prober.take(14.9) is None
    prober.consider(run_of(link), link, decoding, 15.1)
    assert prober.take(15.1) is not None


def test_nothing_is_measured_that_would_change_nothing(prober: Prober) -> None:
    link = LinkEstimator(prior_bytes_per_s=1e3)
    run = run_of(link, deadline_s=60.0, token_s=1e-6)
    prober.consider(run, link, LinkEstimator(prior_bytes_per_s=1e9), 0.0)
    assert prober.take(0.0) is None


def test_what_cannot_be_decoded_measures_nothing(prober: Prober) -> None:
    link = LinkEstimator(prior_bytes_per_s=1e3)
    prober.consider(run_of(link), link, LinkEstimator(prior_bytes_per_s=1e9), 0.0)
    probe = prober.take(0.0)
    assert probe is not None
    where, value, _ = found(0)
    assert where == probe.pages[0]
    part = probe.parts[0]
    good = value[part.start : part.end]
    assert prober.decode(probe, [good])[0] == LAYOUT.slot_bytes
    assert prober.decode(probe, [np.zeros_like(good)])[0] == 0
    assert prober.decode(probe, [])[0] == 0


def test_a_copy_of_raw_pages_says_nothing_of_the_decoder(prober: Prober) -> None:
    where, value, _ = found(0)
    meta = replace(where.meta, codec=RAW_CODEC)
    raw = replace(where, meta=meta, stages=None, sizes=(value.size,))
    probe = Probe([raw])
    assert probe.parts == [Part(raw, 0, value.size)]
    assert prober.decode(probe, [value]) == (0, 0.0)
