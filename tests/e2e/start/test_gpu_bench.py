"""The servers of `bench gpu`, on the CPU: what a machine with a device runs once is tried here."""

from __future__ import annotations

import pytest

from bench.core.case import CaseFailedError
from bench.core.output import Progress
from bench.gpu import servers

pytestmark = pytest.mark.e2e


def test_both_servers_answer_alike_and_from_where_they_should() -> None:
    seen = servers.measure("cpu", servers.TINY, Progress())
    found = servers.figures(seen)
    assert set(found) == {"plain", "hier_kv"}
    number = servers.TINY.prefixes * (2 + servers.TINY.rounds)
    for one in found.values():
        assert f"{number} of {number} answers as the plain server's" in one["notes"]
        assert one["decode_device_p99_ms"] >= one["decode_device_p50_ms"] > 0
    tiny, times = servers.TINY, seen["hier_kv"].ttft_ms
    assert len(times["host"]) == tiny.prefixes * tiny.rounds
    assert len(times["device"]) == tiny.prefixes
    assert len(times["host_beside"]) == len(times["device_beside"]) == tiny.beside
    assert found["hier_kv"]["host_over_plain_device"] > 0
    assert any("rotation of 2 of 2 layers" in note for note in found["hier_kv"]["notes"])
    assert [row[0] for row in servers.table(found, servers.TINY).rows] == ["plain", "hier_kv"]

    some = next(iter(seen["hier_kv"].answers))
    seen["hier_kv"].answers[some][0] ^= 1
    with pytest.raises(CaseFailedError, match="answers are not those behind a hit on the device"):
        servers.compare(seen)
