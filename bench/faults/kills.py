"""kill -9 of the real server, over and over, on one disk folder.

While a server is under load the next one starts beside it, up to the moment before it opens the
disk folder; there it waits until its predecessor is dead.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.inject import Control, environment
from bench.faults.prompts import (
    PAGE_TOKENS,
    PROMPT_PAGES,
    Answer,
    PromptSource,
    References,
    ask,
)
from bench.faults.running import START_S
from bench.faults.store.audit import Auditor, Log
from bench.faults.tally import FaultCheckError, Tallies, Tally, check
from testkit.server import Server, ServerError

# Small, so that segments are sealed and reclaimed often: 480 pages, 62 in a segment.
_OPTIONS = (
    *("--max-total-tokens", "8192"),
    *("--enable-hier-kv", "--hier-kv-host-size", "0.06", "--hier-kv-disk-size", "0.125"),
    *("--hier-kv-prefetch-policy", "wait_complete", "--hier-kv-write-policy", "write_through"),
)
_NUM_CLIENTS = 4
_PATIENCE_S = 300.0  # for a state that comes soon, on any machine
_MAX_LOG_BYTES = 60_000  # of one server before it dies at random
_NUM_CHECKED = 3
RANDOM = "random"


@dataclass(frozen=True)
class Kill:
    """When a server dies: at the `count`-th time of a step, or at a random time."""

    step: str
    count: int = 1

    @property
    def kind(self) -> str:
        """What the server was doing, as the report says it."""
        if self.step == "record":
            return "kill_writing_unsealed_segment"
        if self.step.startswith("reuse"):
            return "kill_reclaiming"
        return "kill_at_random" if self.step == RANDOM else "kill_sealing"


FULL = (
    *(Kill("record", count) for count in (1, 2, 3, 5, 8)),
    Kill("seal:before_footer"),
    *(Kill("record", count) for count in (13, 21, 34)),
    Kill("footer"),
    Kill(RANDOM),
    Kill("reuse:before_open"),
    *(Kill("record", count) for count in (4, 7, 17)),
    Kill("seal:before_truncate"),
    Kill("reuse:opened"),
    Kill(RANDOM),
    Kill("reuse:before_open"),
    Kill("record", 11),
)
QUICK = (
    Kill("record", 9),
    Kill("seal:before_truncate"),
    Kill("reuse:opened"),
    Kill(RANDOM),
)
NUM_PROMPTS = len(FULL)


@dataclass
class _Kept:
    """A prompt that was saved while nothing else ran, so that its answer has a reference."""

    prompt: list[int]
    pages: list[str]


@dataclass
class Kills:
    """Kills servers and checks what the next one makes of the folder.

    Attributes:
        folder: for everything written.
        source: prompts for the load.
        prompts: prompts that `references` knows, one a kill.
        references: plain SGLang's answers.
        tallies: where results go.
    """

    folder: Path
    source: PromptSource
    prompts: list[list[int]]
    references: References
    tallies: Tallies
    log: Log = field(default_factory=Log)
    auditor: Auditor = field(default_factory=Auditor)
    startups_s: list[float] = field(default_factory=list)
    num_checked_answers: int = 0
    num_acknowledged: int = 0
    _kept: list[_Kept] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(5))

    @property
    def disk(self) -> Path:
        """The disk folder."""
        return self.folder / "disk"

    def run(self, kills: tuple[Kill, ...]) -> None:
        """Kills one server after another, then starts a last one to check what is left.

        Raises:
            FaultCheckError: a server did not die where it should.
        """
        current = self._prepare(0)
        current.server.start()
        try:
            for number, kill in enumerate(kills):
                after_kind = kills[number - 1].kind if number else kill.kind
                self._check_after_restart(current, self.tallies[after_kind])
                following = self._prepare(number + 1)
                following.server.start()
                try:
                    self._kill_under_load(current, kill)
                except BaseException:
                    following.server.kill()
                    raise
                current = following
            self._check_after_restart(current, self.tallies[kills[-1].kind])
        finally:
            current.server.kill()

    def _prepare(self, number: int) -> _Round:
        folder = self.folder / f"server-{number:02}"
        folder.mkdir(parents=True)
        control = Control(folder / "control.json")
        gate = folder / "gate"
        control.set(gate=str(gate))
        events = folder / "events.jsonl"
        server = Server(
            [
                *_OPTIONS,
                *("--hier-kv-disk-dir", str(self.disk), "--hier-kv-event-log", str(events)),
                *("--hier-kv-disk-io", ("buffered", "auto")[number % 2]),
            ],
            log_path=folder / "server.log",
            env=environment(folder / "plugin", control),
            start_timeout_s=START_S,
            stop="kill",
        )
        return _Round(server, control, gate, events)

    def _check_after_restart(self, current: _Round, tally: Tally) -> None:
        """Opens the gate, and checks recovery and answers; keeps a further prompt."""
        opened_at = time.monotonic()
        current.gate.touch()
        server = current.server.wait_ready()
        self.startups_s.append(time.monotonic() - opened_at)
        state = server.get("/server_info")["internal_states"][0]["hier_kv"]
        # A page may lie there twice, so this is a bound; the audit names the pages.
        check(
            state["disk"]["records_recovered"] >= len(self.log.acknowledged),
            f"the server recovered {state['disk']['records_recovered']} records of "
            f"{len(self.log.acknowledged)} acknowledged pages",
        )
        self._kept = [kept for kept in self._kept if self.log.acknowledged.issuperset(kept.pages)]
        for kept in self._kept[-_NUM_CHECKED:]:
            answer = self._ask(server, kept.prompt, tally)
            if answer is None:
                continue
            self.num_checked_answers += 1
            tally.wrong_tokens += not self.references.agree(kept.prompt, answer)
            missing = PROMPT_PAGES - answer.by_tier.get("disk", 0) // PAGE_TOKENS
            tally.lost_acknowledged_pages += missing
        self._keep_one_more(current, tally)

    def _keep_one_more(self, current: _Round, tally: Tally) -> None:
        if not self.prompts:
            return
        prompt = self.prompts.pop()
        answer = self._ask(current.server, prompt, tally)
        if answer is None:
            return
        tally.wrong_tokens += not self.references.agree(prompt, answer)
        deadline = time.monotonic() + _PATIENCE_S
        while not self.log.saves or len(self.log.saves[-1]) < PROMPT_PAGES:
            check(time.monotonic() < deadline, "a prompt was not saved")
            time.sleep(0.01)
            self.log.follow(current.events)
        pages = self.log.saves[-1][:PROMPT_PAGES]
        self.log.saves.clear()
        self.log.wait_written(current.events, pages, _PATIENCE_S)
        self._kept.append(_Kept(prompt, pages))

    def _ask(self, server: Server, prompt: list[int], tally: Tally) -> Answer | None:
        try:
            return ask(server, prompt)
        except (ServerError, OSError):
            tally.failed_requests += 1
            return None

    def _kill_under_load(self, current: _Round, kill: Kill) -> None:
        tally = self.tallies[kill.kind]
        if kill.step != RANDOM:
            current.control.set(kill={"step": kill.step, "count": kill.count})
        load = _Load(current.server, self.source)
        try:
            if kill.step == RANDOM:
                _wait_for_log(current, self._rng.randrange(_MAX_LOG_BYTES))
            else:
                _wait_for_death(current, kill)
        finally:
            current.server.kill()
            load.stop()
        tally.injected += 1
        tally.failed_requests += load.num_errors
        self.log.follow(current.events)
        self.log.saves.clear()
        self.num_acknowledged = max(self.num_acknowledged, len(self.log.acknowledged))
        lost, changed = self.auditor.audit(self.disk, self.log, self.folder / "copy")
        tally.lost_acknowledged_pages += len(lost)
        tally.wrong_tokens += len(changed)

    def figures(self) -> dict[str, Any]:
        """What is reported beside the tallies."""
        return {
            "answers_checked_after_restart": self.num_checked_answers,
            "acknowledged_pages_max": self.num_acknowledged,
            "samples": {"restart_after_gate_s": [round(s, 2) for s in self.startups_s]},
        }


@dataclass
class _Round:
    """One server of the row."""

    server: Server
    control: Control
    gate: Path
    events: Path


class _Load:
    """Clients that send new prompts until the server is gone."""

    def __init__(self, server: Server, source: PromptSource) -> None:
        self.num_errors = 0
        self._server = server
        self._source = source
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(_NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                (prompt,) = self._source.take(1)
            try:
                ask(self._server, prompt)
            except ServerError:  # an answer, and it says "error"; a dead server gives none
                self.num_errors += 1
            except Exception:
                return

    def stop(self) -> None:
        """Waits for the clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _wait_for_log(current: _Round, num_bytes: int) -> None:
    """Waits until a server has logged so much more."""
    wanted = current.events.stat().st_size + num_bytes
    deadline = time.monotonic() + _PATIENCE_S
    while current.events.stat().st_size < wanted:
        check(time.monotonic() < deadline, "a server under load logged nothing")
        time.sleep(0.005)


def _wait_for_death(current: _Round, kill: Kill) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while current.server.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    reached = current.control.step_killed_at()
    if reached != kill.step:
        with contextlib.suppress(ServerError):
            tail = current.server.log()[-2000:]
        raise FaultCheckError(f"the server should die at {kill.step}, not {reached!r}:\n{tail}")
