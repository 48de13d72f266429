"""The soak's own rounds, a few of them: two servers over the same folders, both killed.

`python -m bench.soak` goes on for an hour, and looks whether anything grows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak.life import Soak
from bench.soak.probes import Probes
from bench.soak.report import make_report
from bench.soak.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.long
def test_mixed_traffic_over_two_servers_is_answered_as_it_should_be(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    soak = Soak(world, Probes.learn(world), print)
    soak.live("kill", lambda num_rounds: num_rounds < 2)
    soak.live("kill", lambda num_rounds: num_rounds < 1)
    report = make_report(soak)
    counts, reused = report.results["counts"], report.results["probes_reused"]
    assert counts["weights changed under traffic"] == 1
    assert counts["answered"] > 0
    assert counts["aborted running"] + counts["hung up"] > 0
    assert reused["device"] > 0
    assert reused["host"] + reused.get("disk", 0) > 0
