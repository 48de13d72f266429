"""The running server under kill -9, damaged records, failing and hanging disks, and aborts.

By default without kills and faults at random, which `tests/tiers/test_disk_kill.py` and
`tests/faults/test_storm.py` have without a server; the long form has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults import QUICK, Prompts, damage_running_server, learn, run_kills
from bench.faults.case import MAX_STALL_MS
from bench.faults.prompts import PromptSource, References
from bench.faults.running import READ_FAULTS, WRITE_FAULTS, RunningFaults
from bench.faults.tally import Tallies
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Half of what `python -m bench faults` has: most prompts are there to push others out of it.
HOST_PAGES = 60


@pytest.fixture(scope="module", autouse=True)
def short_answers() -> Iterator[None]:
    """Of three tokens, of a prefill and of two decode steps: faults change what is before them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.faults.prompts.MAX_NEW_TOKENS", 3)
        yield


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(1)


@pytest.fixture(scope="module")
def prompts(source: PromptSource) -> Prompts:
    """Half as many as `python -m bench faults` takes, but of those for random faults.

    Fewer of these would only make more rounds. A default run learns no answers to those of tests of
    the long form, which are half of all.
    """
    taken = Prompts.take(source, either(0, len(QUICK.kills)), quick=True)
    taken.random = either([], [*taken.random, *source.take(2)])
    return taken


@pytest.fixture(scope="module")
def references(
    prompts: Prompts, source: PromptSource, tmp_path_factory: pytest.TempPathFactory
) -> References:
    return learn(prompts, source, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def faults(
    source: PromptSource, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFaults]:
    folder = tmp_path_factory.mktemp("running")
    running = RunningFaults(folder, source, references, Tallies(), host_pages=HOST_PAGES)
    with running.start():
        yield running


def assert_harmless(tallies: Tallies) -> None:
    harmful = {kind: tally for kind, tally in tallies.by_kind.items() if not tally.harmless}
    assert harmful == {}


def test_damaged_records_are_misses_and_counted(faults: RunningFaults, prompts: Prompts) -> None:
    damage_running_server(faults, prompts)
    injected = {
        kind: tally.injected
        for kind, tally in faults.tallies.by_kind.items()
        if kind.startswith("server_")
    }
    assert sum(injected.values()) >= 50
    assert min(injected.values()) >= 10
    assert len(injected) == 7
    assert_harmless(faults.tallies)


@pytest.mark.parametrize("kind", READ_FAULTS)
def test_a_disk_that_fails_to_read(faults: RunningFaults, prompts: Prompts, kind: str) -> None:
    faults.failing_reads(faults.put_on_disk(prompts.reads[kind]), kind, **READ_FAULTS[kind])
    assert_harmless(faults.tallies)


@pytest.mark.parametrize("kind", WRITE_FAULTS)
def test_a_disk_that_fails_to_write(faults: RunningFaults, prompts: Prompts, kind: str) -> None:
    faults.failing_writes(prompts.writes[kind], kind, **WRITE_FAULTS[kind])
    assert_harmless(faults.tallies)


def test_aborts_leave_nothing_wrong_and_nothing_held(
    faults: RunningFaults, prompts: Prompts
) -> None:
    faults.aborts(faults.put_on_disk(prompts.aborted_loads), prompts.aborted_saves)
    assert_harmless(faults.tallies)


def test_a_disk_that_hangs_drops_saves_and_holds_nobody_up(
    faults: RunningFaults, prompts: Prompts
) -> None:
    """New prompts are answered while every call of the disk hangs; then the others are, too."""
    assert faults.hung_disk(faults.put_on_disk(prompts.hung), num_prompts=20) > 0
    assert_harmless(faults.tallies)


@pytest.mark.long
def test_a_disk_that_fails_at_random(faults: RunningFaults, prompts: Prompts) -> None:
    faults.random_faults(prompts.random, wanted=20, seed=1)
    injected = {k: t for k, t in faults.tallies.by_kind.items() if k.startswith("server_disk_")}
    assert sum(tally.injected for tally in injected.values()) >= 20
    assert_harmless(faults.tallies)


def test_no_fault_held_the_scheduler_up(faults: RunningFaults) -> None:
    """The last of the tests on this server: what all of them did to the scheduler's thread.

    What waits for a disk that hangs waits as long as that hangs: for seconds, and longer where the
    machine is slow, as prompts are answered meanwhile. `bench faults` has the real bound.
    """
    stalls = faults.control.report()["stalls"]
    print("hung for", faults.hung_s, "s:", stalls)
    assert stalls["max_ms"] < max(5 * MAX_STALL_MS, 1e3 * faults.hung_s / 8), stalls


@pytest.mark.long
def test_kills_lose_no_acknowledged_page(
    source: PromptSource, prompts: Prompts, references: References, tmp_path: Path
) -> None:
    """One kill of each kind; `python -m bench faults` makes twenty."""
    tallies = Tallies()
    found = run_kills(tmp_path, source, prompts, references, tallies, QUICK.kills)
    injected = {kind: tally.injected for kind, tally in tallies.by_kind.items()}
    assert sum(injected.values()) == len(QUICK.kills)
    for kind in ("kill_writing_unsealed_segment", "kill_sealing", "kill_reclaiming"):
        assert injected[kind] >= 1
    assert found["answers_checked_after_restart"] >= len(QUICK.kills)
    assert_harmless(tallies)
