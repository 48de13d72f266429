"""The case `faults`: kills, damage and failing disks, and what they did to answers and pages.

`inject.py` says how faults get into the server's process. `kills.py` kills it over one disk folder,
`running.py` damages records and fails the disk under it, `store_damage.py` does much more damage to
the page store without a server, `open_time.py` measures the start on a full folder.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.faults import kills as kills_module
from bench.faults.kills import Kill, Kills
from bench.faults.open_time import measure_open
from bench.faults.prompts import PromptSource, References
from bench.faults.records import DAMAGES
from bench.faults.running import READ_FAULTS, WRITE_FAULTS, RunningFaults
from bench.faults.store_damage import damage_store
from bench.faults.tally import FaultCheckError, Tallies
from bench.server import ROOT, Server

__all__ = ["FaultCheckError", "run"]

_PLAIN = ("--page-size", "64", "--max-total-tokens", "98304", "--sleep-on-idle")
_PARTIAL_PAGES = 3


def run(quick: bool) -> dict[str, Any]:
    """Runs every kind of fault.

    Args:
        quick: fewer of each, in about four minutes.

    Returns:
        `by_kind`: {name: {injected, wrong_tokens, failed_requests, lost_acknowledged_pages}};
        `kills`, `slow_disk`, `open`: what was measured on the way; `samples`.

    Raises:
        FaultCheckError: a fault was not injected as meant or not counted.
    """
    scratch = ROOT / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=scratch))
    try:
        return _run(folder, quick)
    finally:
        shutil.rmtree(folder)


def _run(folder: Path, quick: bool) -> dict[str, Any]:
    tallies = Tallies()
    source = PromptSource(1)
    plan = kills_module.QUICK if quick else kills_module.FULL
    prompts = Prompts.take(source, len(plan), quick=quick)
    references = learn(prompts, source, folder)
    damage_store(folder / "store", 3 if quick else 12, tallies)
    slow, samples = run_on_one_server(folder, source, prompts, references, tallies, quick=quick)
    kills = run_kills(folder, source, prompts, references, tallies, plan)
    opened = measure_open(folder / "open", 1.0 if quick else 10.0, 5)
    samples["kills"] = kills.pop("samples")
    samples["open"] = opened.pop("samples")
    by_kind = tallies.to_dict()
    return {
        "by_kind": by_kind,
        "kills": kills,
        "slow_disk": slow,
        "open": opened,
        "samples": samples,
    }


class Prompts:
    """Prompts with a reference, by what they are for.

    Attributes:
        damage: per kind of damage.
        partial: damaged behind their first pages.
        cut: for the truncated segment.
        reads: per kind of failing read.
        writes: per kind of failing write.
        aborted_loads: saved, and aborted when they come back.
        aborted_saves: aborted when they are new.
        kills: one a kill.
    """

    def __init__(self) -> None:
        self.damage: dict[str, list[list[int]]] = {}
        self.partial: list[list[int]] = []
        self.cut: list[list[int]] = []
        self.reads: dict[str, list[list[int]]] = {}
        self.writes: dict[str, list[list[int]]] = {}
        self.aborted_loads: list[list[int]] = []
        self.aborted_saves: list[list[int]] = []
        self.kills: list[list[int]] = []

    @classmethod
    def take(cls, source: PromptSource, num_kills: int, *, quick: bool) -> Prompts:
        """Prompts for one run."""
        share = 2 if quick else 1
        taken = cls()
        taken.damage = {kind: source.take(4 // share) for kind in DAMAGES}
        taken.partial = source.take(4 // share)
        taken.cut = source.take(8)
        taken.reads = {kind: source.take(4 // share) for kind in READ_FAULTS}
        taken.writes = {kind: source.take(2) for kind in WRITE_FAULTS}
        taken.aborted_loads = source.take(8 // share)
        taken.aborted_saves = source.take(6 // share)
        taken.kills = source.take(num_kills)
        return taken

    def all_but_partial(self) -> list[list[int]]:
        """Every prompt that needs the references without and with all pages cached."""
        groups = [*self.damage.values(), *self.reads.values(), *self.writes.values()]
        groups += [self.cut, self.aborted_loads, self.aborted_saves, self.kills]
        return [prompt for group in groups for prompt in group]


def learn(prompts: Prompts, source: PromptSource, folder: Path) -> References:
    """Asks plain SGLang for all references."""
    (other,) = source.take(1)
    with Server(_PLAIN, log_path=folder / "plain.log", stop="kill") as server:
        references = References(server)
        references.learn(prompts.all_but_partial(), other)
        references.learn(prompts.partial, other, pages=[_PARTIAL_PAGES])
    return references


def run_on_one_server(
    folder: Path,
    source: PromptSource,
    prompts: Prompts,
    references: References,
    tallies: Tallies,
    *,
    quick: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every fault but death, on one server.

    Returns:
        What the slow disk did, and the raw samples behind it.
    """
    faults = RunningFaults(folder / "running", source, references, tallies)
    with faults.start():
        damage_running_server(faults, prompts)
        for kind, injected in READ_FAULTS.items():
            faults.failing_reads(faults.put_on_disk(prompts.reads[kind]), kind, **injected)
        for kind, injected in WRITE_FAULTS.items():
            faults.failing_writes(prompts.writes[kind], kind, **injected)
        faults.aborts(faults.put_on_disk(prompts.aborted_loads), prompts.aborted_saves)
        slow = faults.slow_disk(40, 1 if quick else 3)
    return slow, dict(faults.samples)


def damage_running_server(faults: RunningFaults, prompts: Prompts) -> None:
    """Damages records of prompts that lie on disk only, and asks for those prompts."""
    pages = [0, 2, 3, 6, 9]
    groups = [*prompts.damage.values(), prompts.partial, prompts.cut]
    victims = faults.put_on_disk([prompt for group in groups for prompt in group])
    by_group = [[victims.pop(0) for _ in group] for group in groups]
    *damaged, partial, cut = by_group
    for kind, group in zip(prompts.damage, damaged, strict=True):
        if kind == "swapped_record":
            faults.swap(group, pages)
        else:
            faults.damage(group, kind, pages)
    faults.damage(partial, "bit_flip_payload", [_PARTIAL_PAGES, 7])
    faults.cut_a_segment(cut)


def run_kills(
    folder: Path,
    source: PromptSource,
    prompts: Prompts,
    references: References,
    tallies: Tallies,
    plan: tuple[Kill, ...],
) -> dict[str, Any]:
    """Kills one server after another over one folder; returns what was counted beside."""
    kills = Kills(folder / "kills", source, list(prompts.kills), references, tallies)
    kills.run(plan)
    return kills.figures()
