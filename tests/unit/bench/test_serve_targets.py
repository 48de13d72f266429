"""When the benches of routing and of telling fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.core.case import ALLOW_DIRTY
from bench.serve import routing, telling, telling_probe


@pytest.mark.parametrize(
    ("tiers", "flags", "status"), [(0.8, [], 1), (0.8, ["--quick"], 0), (0.95, [], 0)]
)
def test_in_full_it_fails_below_its_target(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiers: float,
    flags: list[str],
    status: int,
) -> None:
    def measured(*_: Any) -> dict[str, Any]:
        shares = {"reused_random": 0.5, "reused_device": 0.6, "reused_tiers": tiers}
        return {"chats": 2, "turns": 2, **shares, "tiers_over_device": tiers / 0.6}

    monkeypatch.setenv(ALLOW_DIRTY, "1")
    monkeypatch.setattr(routing, "measure_routing", measured)
    assert routing.main(flags) == status
    said = capsys.readouterr()
    assert f"{tiers / 0.6:.2f}" in said.out
    assert ("expected 1.5 times as much" in said.err) == bool(status)


@pytest.mark.parametrize(("share", "status"), [(0.0099, 0), (0.0101, 1)])
def test_it_fails_where_telling_is_more_than_a_hundredth_of_the_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float, status: int
) -> None:
    def measured(*_: Any) -> dict[str, Any]:
        ratios = ("cpu_ratio", "process_cpu_ratio", "server_cpu_ratio", "throughput_ratio")
        found: dict[str, Any] = dict.fromkeys(ratios, 1.0)
        found |= {f"{name}_ci95": (0.9, 1.1) for name in ratios}
        times = ("telling", "sending", "sglangs", "thread")
        found |= {f"{name}_us_per_token": 1.0 for name in times}
        found["thread_us_per_token_on"] = 100.0
        return {**found, "pairs": 1, "samples": {}, "told": {}, "share_of_thread": share}

    monkeypatch.setenv(ALLOW_DIRTY, "1")
    monkeypatch.setattr(telling, "measure_telling", measured)
    assert telling.main(["--quick"]) == status
    said = capsys.readouterr()
    assert f"{share:.2%} of its 100 us" in said.out
    assert ("at most 1% of the scheduler's thread" in said.err) == bool(status)


def test_idle_steps_count_as_telling_only_where_they_tell(tmp_path: Path) -> None:
    """An idle scheduler asks for events thousands of times a second: nobody waits for that."""
    probe, there = telling_probe._Probe(tmp_path / "told"), [False]
    take = probe.noted(lambda: [1] if there[0] else [])
    publish = probe.counted(lambda: [take(), sum(range(100_000))], "telling_s")

    def told_by(step: Callable[[], object], *, is_there: bool) -> float:
        there[0], before = is_there, probe._spent_s["telling_s"]
        step()
        publish()
        return probe._spent_s["telling_s"] - before

    idle = probe.begins(lambda: None, is_idle=True)
    batch = probe.begins(lambda: None, is_idle=False)
    assert told_by(idle, is_there=False) == 0
    assert told_by(idle, is_there=True) > 0
    assert told_by(idle, is_there=False) == 0
    assert told_by(batch, is_there=False) > 0
    # In front of the first batch: what leaves the device for it is noted, and published behind it.
    remove = probe.counted(lambda: sum(range(100_000)), "telling_s", always=True)
    idle()
    before = probe._spent_s["telling_s"]
    remove()
    assert probe._spent_s["telling_s"] > before
