"""The soak: mixed traffic over three servers in a row, and whether anything grows.

By default some minutes of it, by rounds and not by time; `python -m bench.soak` goes on for an
hour with the same bounds. The long form has more rounds of the last server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak.life import Soak
from bench.soak.probes import Probes
from bench.soak.report import make_report
from bench.soak.world import World
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.longest]

SHORT_LIFE = 5  # rounds of a server that is ended soon
LONG_LIFE = either(14, 60)  # of which memory is bounded behind the first six


def test_mixed_traffic_over_three_servers_is_answered_as_it_should_be(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    soak = Soak(world, Probes.learn(world), print)
    soak.live("kill", lambda num_rounds: num_rounds < SHORT_LIFE)
    soak.live("terminate", lambda num_rounds: num_rounds < SHORT_LIFE)
    soak.live("terminate", lambda num_rounds: num_rounds < LONG_LIFE, beside_plain=True)
    report = make_report(soak)
    counts, reused = report.results["counts"], report.results["probes_reused"]
    assert counts["weights changed under traffic"] == soak.num_rounds // 3
    assert counts["answered"] > 0
    assert counts["aborted running"] + counts["hung up"] > 0
    assert counts["with hints"] > 0
    assert counts["steered"] > 0
    assert counts["turns of long chats, cut"] > 0
    assert counts["tokens moved"] > 0
    assert reused["device"] > 0
    assert reused["host"] + reused.get("disk", 0) > 0
    assert report.results["lives"][-1]["plain_rss_mib_growth"] is not None
