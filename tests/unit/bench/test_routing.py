"""When the bench of routing fails."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.case import ALLOW_DIRTY
from bench.serve import routing


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
