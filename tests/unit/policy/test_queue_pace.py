"""How fast a queue moves: by its admissions, without what it was held for."""

from __future__ import annotations

import pytest

from sglang_ext.tiers.policy.speed_estimators import QueuePace


def test_a_turn_is_so_many_admissions_away() -> None:
    pace = QueuePace()
    for now_s in (0.0, 2.0, 4.0):
        pace.admitted(now_s, 0.0)
        assert pace.turn_in_s(5, now_s) == 0.0  # too few to say
    pace.admitted(6.0, 0.0)
    assert pace.turn_in_s(0, 6.0) == pytest.approx(2.0)
    assert pace.turn_in_s(4, 6.0) == pytest.approx(10.0)
    assert pace.turn_in_s(4, 9.0) == pytest.approx(7.0)
    assert pace.turn_in_s(0, 60.0) == 0.0
    pace.rest()
    assert pace.turn_in_s(4, 6.0) == 0.0


def test_several_at_a_time_and_a_change_of_pace() -> None:
    pace = QueuePace()
    for step in range(40):
        for _ in range(4):
            pace.admitted(10.0 * step, 0.0)
    # Of the last 32 eight steps are between the first and the last, less one.
    assert pace.turn_in_s(0, 390.0) == pytest.approx(70.0 / 31)
    for step in range(64):
        pace.admitted(390.0 + step, 0.0)
    assert pace.turn_in_s(9, 453.0) == pytest.approx(10.0)


def test_what_a_request_was_held_for_its_own_pages_is_no_pace() -> None:
    """Else loads that hold the queue would make more loads look free."""
    held, swift = QueuePace(), QueuePace()
    for number in range(8):
        held.admitted(5.0 * number, 4.0)
        swift.admitted(1.0 * number, 0.0)
    assert held.turn_in_s(3, 35.0) == pytest.approx(swift.turn_in_s(3, 7.0)) == pytest.approx(4.0)
