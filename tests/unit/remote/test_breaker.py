"""The circuit breaker, on a clock of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiers.remote.breaker import BreakerConfig, BreakerState, CircuitBreaker

CONFIG = BreakerConfig(max_failures=3, first_wait_s=1.0, max_wait_s=8.0)


def closed() -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    breaker.begin_probe()
    breaker.end_probe(0.0, ok=True)
    return breaker


def test_it_begins_open_with_a_probe_due() -> None:
    breaker = CircuitBreaker(CONFIG)
    assert not breaker.allows()
    assert breaker.probe_in_s(0.0) == 0.0
    breaker.begin_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.probe_in_s(0.0) is None
    breaker.end_probe(0.0, ok=True)
    assert breaker.allows()
    assert (breaker.num_opened, breaker.num_closed) == (0, 1)


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = closed()
    assert not breaker.failed(1.0)
    assert not breaker.failed(1.0)
    breaker.succeeded()
    assert not breaker.failed(1.0)
    assert not breaker.failed(1.0)
    assert breaker.failed(1.0)
    assert not breaker.allows()
    assert breaker.num_opened == 1


def test_a_wrong_password_opens_it_at_once() -> None:
    assert closed().failed(1.0, at_once=True)


def test_probes_come_ever_later_up_to_a_bound() -> None:
    breaker = closed()
    breaker.failed(100.0, at_once=True)
    now_s, waits = 100.0, []
    for _ in range(6):
        wait_s = breaker.probe_in_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += wait_s
        breaker.begin_probe()
        breaker.end_probe(now_s, ok=False)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_one_that_answers_probes_and_fails_calls_is_probed_less_often() -> None:
    breaker = closed()
    now_s, waits = 0.0, []
    for _ in range(4):
        breaker.failed(now_s, at_once=True)
        wait_s = breaker.probe_in_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += wait_s
        breaker.begin_probe()
        breaker.end_probe(now_s, ok=True)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    breaker.succeeded()
    breaker.failed(now_s, at_once=True)
    assert breaker.probe_in_s(now_s) == 1.0


def test_a_call_from_before_does_not_close_it() -> None:
    breaker = closed()
    breaker.failed(1.0, at_once=True)
    breaker.succeeded()
    assert not breaker.allows()
    assert not breaker.failed(1.0)
    assert breaker.num_opened == 1


@given(st.lists(st.sampled_from(["ok", "bad", "auth", "probe ok", "probe bad"]), max_size=60))
def test_it_always_finds_a_store_that_is_back(events: list[str]) -> None:
    breaker = closed()
    now_s = 0.0
    for event in events:
        now_s += 0.1
        if event == "ok":
            breaker.succeeded()
        elif event.startswith("probe"):
            if breaker.probe_in_s(now_s) is not None:
                breaker.begin_probe()
                breaker.end_probe(now_s, ok=event == "probe ok")
        else:
            breaker.failed(now_s, at_once=event == "auth")
    wait_s = breaker.probe_in_s(now_s)
    assert breaker.allows() == (wait_s is None)
    if wait_s is not None:
        assert 0.0 <= wait_s <= CONFIG.max_wait_s
        breaker.begin_probe()
        breaker.end_probe(now_s + wait_s, ok=True)
    assert breaker.allows()
    assert breaker.num_opened <= breaker.num_closed
