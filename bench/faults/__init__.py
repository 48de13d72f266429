"""The case `faults`: kills, damage and failing disks, and what they did to answers and pages.

`inject.py` says how faults get into the server's process. `kills.py` kills it over one disk folder,
`running.py` damages records and fails the disk under it, `remote_running.py` the network and Redis;
`stalls.py` measures meanwhile how long its scheduler's thread is held up. Without a server, many in
little time, in `faults/store`: `damage.py` damages records, `storm.py` fails disk and coded DRAM at
random, `power.py` cuts the power, `kills.py` kills, `remote_storm.py` fails the shared stores.
`open_time.py` measures the start on a full folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.faults import kills as kills_module
from bench.faults.kills import Kill, Kills
from bench.faults.prompts import PROMPT_PAGES, PromptSource, References
from bench.faults.records import DAMAGES
from bench.faults.remote_running import RemoteFaults
from bench.faults.running import READ_FAULTS, START_S, WRITE_FAULTS, RunningFaults
from bench.faults.store.damage import damage_store
from bench.faults.store.kills import kill_stores
from bench.faults.store.open_time import measure_open
from bench.faults.store.power import cut_power
from bench.faults.store.remote_storm import storm_remotes
from bench.faults.store.storm import storm_disk, storm_memory
from bench.faults.tally import FaultCheckError, Tallies
from testkit.remote.redis_server import redis_binary
from testkit.server import FORK_SERVERS, ROOT, Server

__all__ = ["FaultCheckError", "run"]

_PLAIN = ("--page-size", "64", "--max-total-tokens", "98304", "--sleep-on-idle")
_PARTIAL_PAGES = 3
_NUM_PARTS = 6
_TELL_EVERY_S = 15.0  # between two lines of a part


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
        disk, memory, remotes: random faults without a server.
        power_cuts, store_kills: without a server.
        kills: of the server.
        server_disk: random faults of the disk under the server, at least.
        remote_rounds: of each fault of Redis and its network under the server.
        damage_rounds: of damaged records without a server.
        repeats: of the slow disk.
        open_gb: bytes in the folder whose opening is measured.
        open_repeats: of that.
    """

    disk: int
    memory: int
    remotes: int
    power_cuts: int
    store_kills: int
    kills: tuple[Kill, ...]
    server_disk: int
    remote_rounds: int
    damage_rounds: int
    repeats: int
    open_gb: float
    open_repeats: int


QUICK = Size(100, 40, 60, 10, 2, kills_module.QUICK, 30, 1, 3, 1, 0.5, 3)
FULL = Size(900, 200, 600, 150, 30, kills_module.FULL, 300, 8, 12, 3, 10.0, 5)


def run(quick: bool, seed: int | None = None) -> dict[str, Any]:
    """Runs every kind of fault.

    Args:
        quick: fewer of each, in about four minutes.
        seed: of the random ones; a new one, which is printed, when None.

    Returns:
        `by_kind`: {name: {injected, wrong_tokens, failed_requests, lost_acknowledged_pages}};
        `max_scheduler_stall_ms`, and `stalls` with where they were; `seed`; `kills`, `slow_disk`,
        `open`: what was measured on the way; `part_s`: seconds of each part; `samples`.

    Raises:
        FaultCheckError: a fault was not injected as meant or not counted.
    """
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    print(f"seed {seed}", flush=True)
    scratch = ROOT / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=scratch))
    try:
        with _forked_servers():
            return _run(folder, QUICK if quick else FULL, quick, seed)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _forked_servers() -> Iterator[None]:
    """Forks all servers from one process that has imported SGLang."""
    if FORK_SERVERS in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hier-kv-zygotes-") as folder:
        os.environ[FORK_SERVERS] = folder
        try:
            yield
        finally:
            del os.environ[FORK_SERVERS]


class _Parts:
    """Says what is done and how far that is, and how long each part took.

    Attributes:
        seconds: of each part that ended.
    """

    def __init__(self, tallies: Tallies) -> None:
        self.seconds: dict[str, float] = {}
        self._tallies = tallies

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around one part."""
        before, started_s = self._tallies.num_injected, time.monotonic()
        print(f"part {len(self.seconds) + 1} of {_NUM_PARTS}, {name} ...", flush=True)
        over = threading.Event()
        teller = threading.Thread(target=self._tell, args=(name, before, started_s, over))
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()
        self.seconds[name] = round(time.monotonic() - started_s, 1)
        num = self._tallies.num_injected - before
        harmful = [kind for kind, tally in self._tallies.by_kind.items() if not tally.harmless]
        harm = f"HARM so far by {', '.join(harmful)}" if harmful else "no harm so far"
        print(f"{name}: {num:,} faults in {self.seconds[name]:.0f} s, {harm}", flush=True)

    def _tell(self, name: str, before: int, started_s: float, over: threading.Event) -> None:
        while not over.wait(_TELL_EVERY_S):
            num, seconds = self._tallies.num_injected - before, time.monotonic() - started_s
            print(f"  {name}: {num:,} faults after {seconds:.0f} s", flush=True)


def _run(folder: Path, size: Size, quick: bool, seed: int) -> dict[str, Any]:
    tallies = Tallies()
    parts = _Parts(tallies)
    source = PromptSource(1)
    prompts = Prompts.take(source, len(size.kills), quick=quick)
    with parts.part("stores without a server"):
        storm(folder / "storm", size, seed, tallies)
        damage_store(folder / "store", size.damage_rounds, tallies)
    with parts.part("answers of plain SGLang"):
        references = learn(prompts, source, folder)
    with parts.part("a server on a bad disk"):
        slow, stalls, samples = run_on_one_server(
            folder, source, prompts, references, tallies, size=size, seed=seed
        )
    if redis_binary() is not None:
        with parts.part("a server and a bad Redis"):
            remote = RemoteFaults(folder / "remote", prompts.random, references, tallies)
            remote.run(size.remote_rounds, seed)
            stalls["redis"] = remote.stalls
    with parts.part("kill -9"):
        kills = run_kills(folder, source, prompts, references, tallies, size.kills)
    with parts.part("opening a full folder"):
        opened = measure_open(folder / "open", size.open_gb, size.open_repeats)
    samples["kills"] = kills.pop("samples")
    samples["open"] = opened.pop("samples")
    return {
        "by_kind": tallies.to_dict(),
        "num_injected": tallies.num_injected,
        "max_scheduler_stall_ms": max(each["max_ms"] for each in stalls.values()),
        "stalls": stalls,
        "seed": seed,
        "kills": kills,
        "slow_disk": slow,
        "open": opened,
        "part_s": parts.seconds,
        "samples": samples,
    }


def storm(folder: Path, size: Size, seed: int, tallies: Tallies) -> None:
    """Every random fault that needs no server."""
    folder.mkdir(parents=True)
    # Every fault is logged with its traceback, as it should be; here they are too many to read.
    logging.getLogger("sglang_ext").setLevel(logging.CRITICAL)
    storm_disk(folder, size.disk, seed, tallies)
    storm_memory(folder, size.memory, seed, tallies)
    cut_power(folder, size.power_cuts, seed, tallies)
    kill_stores(folder, size.store_kills, seed, tallies)
    kill_stores(folder, max(1, size.store_kills // 4), seed, tallies, "auto")
    storm_remotes(folder, size.remotes, seed, tallies)
    logging.getLogger("sglang_ext").setLevel(logging.NOTSET)


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
        hung: saved, and asked for while the disk hangs.
        random: for faults that leave any number of pages.
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
        self.hung: list[list[int]] = []
        self.random: list[list[int]] = []
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
        taken.hung = source.take(2)
        taken.random = source.take(4 // share)
        taken.kills = source.take(num_kills)
        return taken

    def all_but_partial(self) -> list[list[int]]:
        """Every prompt that needs the references without and with all pages cached."""
        groups = [*self.damage.values(), *self.reads.values(), *self.writes.values()]
        groups += [self.cut, self.aborted_loads, self.aborted_saves, self.hung, self.kills]
        return [prompt for group in groups for prompt in group]


def learn(prompts: Prompts, source: PromptSource, folder: Path) -> References:
    """Asks plain SGLang for all references."""
    (other,) = source.take(1)
    with Server(
        _PLAIN, log_path=folder / "plain.log", start_timeout_s=START_S, stop="kill"
    ) as server:
        references = References(server)
        references.learn(prompts.all_but_partial(), other)
        references.learn(prompts.partial, other, pages=[_PARTIAL_PAGES])
        references.learn(prompts.random, other, pages=range(1, PROMPT_PAGES))
    return references


def run_on_one_server(
    folder: Path,
    source: PromptSource,
    prompts: Prompts,
    references: References,
    tallies: Tallies,
    *,
    size: Size,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Every fault of the disk but death, on one server, and random ones on another.

    Returns:
        What the slow disk did, the stalls of the scheduler by what failed, and raw samples.
    """
    faults = RunningFaults(folder / "running", source, references, tallies)
    with faults.start():
        damage_running_server(faults, prompts)
        for kind, injected in READ_FAULTS.items():
            faults.failing_reads(faults.put_on_disk(prompts.reads[kind]), kind, **injected)
        for kind, injected in WRITE_FAULTS.items():
            faults.failing_writes(prompts.writes[kind], kind, **injected)
        faults.aborts(faults.put_on_disk(prompts.aborted_loads), prompts.aborted_saves)
        dropped = faults.hung_disk(faults.put_on_disk(prompts.hung), 25)
        slow = {"throughput_ratio": faults.slow_disk(40, size.repeats), "dropped_pages": dropped}
        stalls = faults.control.report()["stalls"]
    forgetful = RunningFaults(
        folder / "random", source, references, tallies, ("--hier-kv-lookahead", "off")
    )
    with forgetful.start():
        forgetful.random_faults(prompts.random, size.server_disk, seed)
        random_stalls = forgetful.control.report()["stalls"]
    return slow, {"disk": stalls, "random disk": random_stalls}, dict(faults.samples)


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
