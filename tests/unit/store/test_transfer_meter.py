"""What the read meter measures, on a clock of our own."""

from __future__ import annotations

import pytest

from sglang_ext.tiers.policy.cost_model import TransferBacklog
from sglang_ext.tiers.store.movers.transfer_meter import TransferMeter


class Rig:
    """A meter, its clock and what it measured."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.measured: list[tuple[int, float, int, float]] = []
        self.meter = TransferMeter(lambda *four: self.measured.append(four), lambda: self.now_s)


def test_reads_that_overlap_count_once() -> None:
    rig = Rig()
    rig.meter.queued(300)
    rig.now_s += 9  # nobody reads yet
    rig.meter.began(100)
    rig.now_s += 1
    rig.meter.began(200)
    rig.now_s += 2
    rig.meter.ended(100, read_s=3)
    rig.now_s += 1
    rig.meter.ended(200, read_s=3)
    rig.meter.plan_ended()
    assert rig.measured == [(300, 4.0, 0, 0.0)]


def test_idle_time_between_plans_does_not_count() -> None:
    rig = Rig()
    for _ in range(2):
        rig.now_s += 60
        rig.meter.queued(100)
        rig.meter.began(100)
        rig.now_s += 2
        rig.meter.ended(100, read_s=2)
        rig.meter.plan_ended()
    assert rig.measured == [(100, 2.0, 0, 0.0)] * 2


def test_reading_and_decoding_get_their_shares() -> None:
    rig = Rig()
    rig.meter.queued(100)
    rig.meter.began(100)
    rig.now_s += 4
    rig.meter.ended(100, read_s=1, decode_bytes=500, decode_s=3)
    rig.meter.plan_ended()
    [(num_bytes, read_s, decoded, decode_s)] = rig.measured
    assert (num_bytes, decoded) == (100, 500)
    assert read_s == pytest.approx(1)
    assert decode_s == pytest.approx(3)


def test_a_read_that_failed_measures_nothing() -> None:
    rig = Rig()
    rig.meter.queued(100)
    rig.meter.began(100)
    rig.now_s += 4
    rig.meter.ended(100, whole=False)
    rig.meter.plan_ended()
    assert rig.measured == []


def test_the_queue_says_what_is_ahead_and_what_is_late() -> None:
    rig = Rig()
    assert rig.meter.queue() == TransferBacklog()
    rig.meter.queued(300)
    assert rig.meter.queue() == TransferBacklog(bytes_ahead=300)
    rig.meter.began(100)
    rig.now_s += 5
    assert rig.meter.queue() == TransferBacklog(300, 0, 100, 5.0)
    rig.meter.began(50)
    rig.now_s += 1
    rig.meter.ended(100)
    assert rig.meter.queue() == TransferBacklog(200, 0, 50, 0.0)
    rig.meter.queued(-150)  # given up
    assert rig.meter.queue() == TransferBacklog(50, 0, 50, 0.0)
    rig.meter.ended(50)
    assert rig.meter.queue() == TransferBacklog()
