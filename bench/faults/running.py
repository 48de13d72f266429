"""Damage and failing disks under the running server: each a miss, counted, and never a failure."""

from __future__ import annotations

import errno
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from bench.faults.records import DAMAGES, Spot, find_records
from bench.faults.store.audit import Log
from bench.faults.store.schedule import HONEST, LYING_READS, LYING_WRITES
from bench.faults.tally import Tallies, Tally, check
from testkit.requests import flush_device, num_on_their_way
from testkit.server import Server, ServerError

HOST_PAGES = 120
_SLOT_GB = 266240 / (1 << 30)
_OPTIONS = (
    *("--max-total-tokens", "8192", "--enable-hier-kv"),
    *("--hier-kv-disk-size", "1", "--hier-kv-disk-segment-size", "0.0156"),
    # Damage is done through the page cache.
    *("--hier-kv-disk-io", "buffered", "--hier-kv-prefetch-policy", "wait_complete"),
)
_NUM_CLIENTS = 4
START_S = 900.0  # for a server to start, on any machine
_PATIENCE_S = 300.0  # for a state that comes soon, on any machine
_CRAWLING_BYTES_PER_S = 1e6  # a cheap SSD moves 1 GB a second
_LONG_ANSWER = 1024  # tokens: an abort comes before the end of it


@dataclass
class Victim:
    """A prompt whose pages lie on disk and, after `put_on_disk`, nowhere else."""

    prompt: list[int]
    pages: list[str]


@dataclass
class RunningFaults:
    """One server that meets every fault but death.

    It has many methods because there are many faults.

    Attributes:
        folder: for everything written.
        source: prompts without a reference.
        references: plain SGLang's answers.
        tallies: where results go.
        options: further flags of the server.
        host_pages: room in DRAM; as many pages of new prompts push out what it has.
        hung_s: how long `hung_disk` had the disk hang.
    """

    folder: Path
    source: PromptSource
    references: References
    tallies: Tallies
    options: tuple[str, ...] = ()
    host_pages: int = HOST_PAGES
    hung_s: float = 0.0
    log: Log = field(default_factory=Log)
    samples: dict[str, list[float]] = field(default_factory=dict)
    _rng: random.Random = field(default_factory=lambda: random.Random(3))
    _spots: dict[str, Spot] = field(default_factory=dict)

    def start(self) -> Server:
        """The server, not yet started; enter it before the other methods are called."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.control = Control(self.folder / "control.json")
        self.events = self.folder / "events.jsonl"
        self.disk = self.folder / "disk"
        where = ("--hier-kv-disk-dir", str(self.disk), "--hier-kv-event-log", str(self.events))
        room = ("--hier-kv-host-size", f"{self.host_pages * _SLOT_GB + 1e-6:.7f}")
        self.server = Server(
            [*_OPTIONS, *room, *self.options, *where],
            log_path=self.folder / "server.log",
            env=environment(self.folder / "plugin", self.control),
            start_timeout_s=START_S,
            stop="kill",
        )
        return self.server

    # ---- requests and state --------------------------------------------------------------------

    def counts(self, part: str = "host") -> dict[str, Any]:
        """The plugin's counters of a part, `host` (the store's own) or `disk`."""
        state = self.server.get("/server_info")["internal_states"][0]["hier_kv"]
        counts: dict[str, Any] = state[part]
        return counts

    def rejected(self) -> int:
        """Pages read from disk and refused, so far."""
        return sum(n for name, n in self.counts().items() if name.startswith("rejected_"))

    def settle(self) -> None:
        """Waits until nothing is left to write to disk."""
        deadline = time.monotonic() + _PATIENCE_S
        while num_on_their_way(self.counts()):
            check(time.monotonic() < deadline, f"still writing to disk after {_PATIENCE_S:.0f} s")
            time.sleep(0.05)
        self.log.follow(self.events)

    def ask(self, prompt: list[int], tally: Tally, **fields: Any) -> Answer | None:
        """Sends a prompt that has a reference and compares."""
        try:
            answer = ask(self.server, prompt, **fields)
        except (ServerError, OSError):
            tally.failed_requests += 1
            return None
        tally.wrong_tokens += not self.references.agree(prompt, answer)
        return answer

    def put_on_disk(self, prompts: list[list[int]]) -> list[Victim]:
        """Saves new prompts one at a time, then fills device and DRAM with others."""
        victims = [Victim(prompt, self._save(prompt)) for prompt in prompts]
        self.log.wait_written(
            self.events, [page for victim in victims for page in victim.pages], _PATIENCE_S
        )
        self.push_out()
        self._spots = find_records(self.disk)  # before any of them is damaged
        return victims

    def _save(self, prompt: list[int]) -> list[str]:
        """Sends a new prompt, waits until it is saved, and returns its pages in order."""
        # The log's thread has lines of the prompts before to write, which are not this one's.
        self._until(self._is_all_logged, "saves before this one do not end")
        self.log.follow(self.events)
        self.log.saves.clear()
        ask(self.server, prompt)
        deadline = time.monotonic() + _PATIENCE_S
        while sum(map(len, self.log.saves)) < PROMPT_PAGES:
            check(time.monotonic() < deadline, "a new prompt was not saved")
            time.sleep(0.005)
            self.log.follow(self.events)
        return [page for save in self.log.saves for page in save][:PROMPT_PAGES]

    def push_out(self) -> None:
        """Makes everything before leave the device and DRAM."""
        for prompt in self.source.take(self.host_pages // PROMPT_PAGES + 2):
            self._save(prompt)
        flush_device(self.server)
        self.settle()

    # ---- damage --------------------------------------------------------------------------------

    def damage(self, victims: list[Victim], kind: str, pages: list[int]) -> None:
        """Damages pages of each victim in place, and asks for it.

        Args:
            victims: prompts on disk only.
            kind: one of `DAMAGES`.
            pages: numbers of the pages to damage, ascending.
        """
        tally = self.tallies[f"server_{kind}"]
        spots = self._spots
        for number, victim in enumerate(victims):
            other = victims[number - 1].pages[self._rng.randrange(PROMPT_PAGES)]
            foreign = spots[other].load()
            for page in pages:
                spot = spots[victim.pages[page]]
                spot.store(DAMAGES[kind](spot.load(), foreign, self._rng))
            self._expect_misses(victim, len(pages), pages[0], tally)

    def swap(self, victims: list[Victim], pages: list[int]) -> None:
        """Exchanges the records of two victims, in pairs, and asks for both."""
        tally = self.tallies["server_swapped_record"]
        spots = self._spots
        for one, two in zip(victims[::2], victims[1::2], strict=True):
            for page in pages:
                here, there = spots[one.pages[page]], spots[two.pages[page]]
                mine, theirs = here.load(), there.load()
                here.store(theirs)
                there.store(mine)
            for victim in (one, two):
                self._expect_misses(victim, len(pages), pages[0], tally)

    def cut_a_segment(self, victims: list[Victim]) -> None:
        """Ends a segment in the middle of a victim's first record; asks for all that it hurts."""
        tally = self.tallies["server_truncated_file"]
        spots = self._spots
        cut = self._where_to_cut(victims, spots)
        for victim in victims:
            gone = [number for number, page in enumerate(victim.pages) if _behind(spots[page], cut)]
            if gone and self.references.knows(victim.prompt, gone[0]):
                if cut.path.stat().st_size > cut.offset + cut.num_bytes:
                    cut.cut()
                self._expect_misses(victim, len(gone), gone[0], tally)

    def _where_to_cut(self, victims: list[Victim], spots: dict[str, Spot]) -> Spot:
        youngest = max(spot.path.name for spot in spots.values())
        firsts = [spots[victim.pages[0]] for victim in victims]
        sealed = [spot for spot in firsts if spot.path.name != youngest]
        check(sealed, "no victim begins in a sealed segment")
        return max(sealed, key=lambda cut: sum(_behind(spot, cut) for spot in firsts))

    def _expect_misses(self, victim: Victim, num_bad: int, first_bad: int, tally: Tally) -> None:
        before = self.rejected()
        tally.injected += num_bad
        answer = self.ask(victim.prompt, tally)
        if answer is None:
            return
        counted = self.rejected() - before
        check(counted == num_bad, f"{num_bad} pages damaged, {counted} counted")
        tally.lost_acknowledged_pages += max(0, first_bad - answer.cached_tokens // PAGE_TOKENS)

    # ---- failing disks -------------------------------------------------------------------------

    def failing_reads(self, victims: list[Victim], kind: str, **faults: Any) -> None:
        """Asks for victims while reads fail; they are computed again."""
        tally = self.tallies[kind]
        name = "promotion_failures" if "read_raises" in faults else "rejected_missing"
        before = self.counts().get(name, 0)
        self.control.set(**faults)
        for victim in victims:
            answer = self.ask(victim.prompt, tally)
            tally.injected += 1
            check(answer is None or answer.cached_tokens == 0, "a page came from a failing disk")
        self.control.set()
        check(self.counts().get(name, 0) > before, f"{name} did not count failing reads")
        self.settle()  # or what was computed again is written while the next fault is in force

    def failing_writes(self, prompts: list[list[int]], kind: str, **faults: Any) -> None:
        """Asks for new prompts while writes fail; they are only not kept on disk."""
        tally = self.tallies[kind]
        before = self.counts().get("write_dropped_pages", 0)
        self.control.set(**faults)
        for number, prompt in enumerate(prompts, 1):
            self.ask(prompt, tally)
            tally.injected += 1
            deadline = time.monotonic() + _PATIENCE_S
            while self.counts().get("write_dropped_pages", 0) < before + number * PROMPT_PAGES:
                check(time.monotonic() < deadline, "pages that were not written were not counted")
                time.sleep(0.01)
        self.control.set()
        dropped = self.counts()["write_dropped_pages"] - before
        num_pages = PROMPT_PAGES * len(prompts)
        check(dropped == num_pages, f"{num_pages} pages not written, {dropped} counted")
        # It mends: the next prompt is written, and found on disk.
        (victim,) = self.put_on_disk([prompts[0][PAGE_TOKENS:] + prompts[0][:PAGE_TOKENS]])
        answer = ask(self.server, victim.prompt)
        missing = PROMPT_PAGES - answer.by_tier.get("disk", 0) // PAGE_TOKENS
        tally.lost_acknowledged_pages += missing

    def hung_disk(self, victims: list[Victim], num_prompts: int) -> int:
        """Asks for pages on a disk that hangs, and for new prompts, which are answered meanwhile.

        Then the disk goes on, and the former are answered from it.

        Returns:
            Pages that found no room in DRAM and were not kept.
        """
        tally = self.tallies["disk_hung"]
        before = self.counts().get("save_dropped_pages", 0)
        self.control.set(hangs=True)
        started_s = time.monotonic()
        with ThreadPoolExecutor(len(victims)) as pool:
            try:
                jobs = [pool.submit(self.ask, victim.prompt, tally) for victim in victims]
                self._until(lambda: bool(self._num_hanging()), "no call hangs")
                self._drive(num_prompts, tally)
                self._until(
                    lambda: self.counts().get("save_dropped_pages", 0) > before,
                    "a disk that hangs dropped no save",
                )
                check(not any(job.done() for job in jobs), "a page came from a disk that hangs")
            finally:
                self.hung_s = time.monotonic() - started_s
                self.control.set()
            answers = [job.result(timeout=_PATIENCE_S) for job in jobs]
        for answer in answers:
            if answer is not None:
                tally.lost_acknowledged_pages += _missing(answer)
        tally.injected += len(victims) + num_prompts
        self.settle()
        return int(self.counts()["save_dropped_pages"] - before)

    def slow_disk(self, num_prompts: int, repeats: int) -> float:
        """Compares the speed of new prompts with a disk at full and at 1/1000 speed, in turn.

        Returns:
            Throughput with the slow disk over that with the fast one, the median of the pairs.
        """
        tally = self.tallies["disk_1000_times_slower"]
        ratios: list[float] = []
        for _ in range(repeats):
            seconds = {}
            for name, faults in (("fast", {}), ("slow", {"bytes_per_s": _CRAWLING_BYTES_PER_S})):
                self.control.set(**faults)
                seconds[name] = self._drive(num_prompts, tally)
                self.samples.setdefault(f"{name}_disk_s", []).append(round(seconds[name], 3))
                self.control.set()
                self.settle()
            tally.injected += num_prompts
            ratios.append(seconds["fast"] / seconds["slow"])
        self.samples["slow_disk_throughput_ratio"] = [round(ratio, 3) for ratio in ratios]
        return sorted(ratios)[len(ratios) // 2]

    def random_faults(self, prompts: list[list[int]], wanted: int, seed: int) -> None:
        """Asks for prompts in turn while calls of the disk fail, lag and lie at random.

        What leaves DRAM has to be what was used longest ago: a server that learns which prompts
        return keeps just these in DRAM, and its disk is hardly read. Every other round begins with
        nothing stored (by a key of its own), so that no page is computed again behind another that
        was: of such a mixture there is no reference.

        Args:
            prompts: those of which the reference with any number of cached pages is known.
            wanted: rounds go on until so many faults were injected.
            seed: of the faults.
        """
        harm, total, number = Tally(), 0, 0
        before = Counter(self.control.report()["injected"])
        found = before
        while total < wanted:
            kinds = (HONEST, (*LYING_READS, *LYING_WRITES))[number % 3 == 2]
            self.push_out()
            self.control.set(random={"seed": seed + number, "share": 0.3, "kinds": kinds})
            for prompt in prompts:
                self.ask(prompt, harm, extra_key=f"{seed}, {number // 2}")
            found = Counter(self.control.report()["injected"])
            self.control.set()
            total, number = sum((found - before).values()), number + 1
        for kind, count in (found - before).items():
            tally = self.tallies[f"server_disk_{kind}"]
            tally.injected += count
            tally.wrong_tokens += harm.wrong_tokens
            tally.failed_requests += harm.failed_requests

    def _drive(self, num_prompts: int, tally: Tally) -> float:
        started = time.monotonic()
        with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
            jobs = [pool.submit(ask, self.server, p) for p in self.source.take(num_prompts)]
            for job in jobs:
                try:
                    job.result(timeout=_PATIENCE_S)
                except (ServerError, OSError):
                    tally.failed_requests += 1
        return time.monotonic() - started

    # ---- aborts --------------------------------------------------------------------------------

    def aborts(self, victims: list[Victim], new_prompts: list[list[int]]) -> None:
        """Aborts requests while their pages come from disk, and others while theirs are saved.

        What they leave must be neither wrong nor in the way: each is asked for once more after.
        """
        loads, saves = self.tallies["abort_during_load"], self.tallies["abort_during_save"]
        for number, victim in enumerate(victims):
            self._abort_load(victim.prompt, f"load-{number}")
            loads.injected += 1
        for number, prompt in enumerate(new_prompts):
            self._abort_save(prompt, f"save-{number}")
            saves.injected += 1
        self.settle()
        for prompt in new_prompts:
            self.ask(prompt, saves)
        for victim in victims:
            answer = self.ask(victim.prompt, loads)
            if answer is not None:
                loads.lost_acknowledged_pages += _missing(answer)
        self._check_nothing_is_held()

    def _abort_load(self, prompt: list[int], rid: str) -> None:
        """Aborts a request whose read hangs; it is answered before the read ends."""
        # SGLang ignores an abort of a request that it does not know yet, so a read of the one
        # before, which hangs a moment longer, must not be taken for this one's.
        self._until(lambda: not self._num_hanging() and not self._num_waiting(), "a read hangs on")
        self.control.set(hangs=True)
        try:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(self.server.generate, input_ids=prompt, rid=rid)
                self._until(lambda: bool(self._num_waiting()), "the request does not wait")
                self._until(lambda: bool(self._num_hanging()), "no read hangs")
                self.server.post("/abort_request", {"rid": rid})
                try:
                    answer = job.result(timeout=_PATIENCE_S)
                except ServerError:  # aborted in the queue
                    return
                reason = answer["meta_info"]["finish_reason"]["type"]
                check(reason == "abort", f"a request that was aborted ended as {reason}")
        finally:
            self.control.set()

    def _abort_save(self, prompt: list[int], rid: str) -> None:
        """Aborts a request after its first token: its prompt is being saved, or about to be."""
        reason = None
        long = {"max_new_tokens": _LONG_ANSWER, "ignore_eos": True}
        for event in self.server.stream(input_ids=prompt, sampling_params=long, rid=rid):
            if reason is None:
                self.server.post("/abort_request", {"rid": rid})
            reason = (event["meta_info"]["finish_reason"] or {}).get("type", "")
        check(reason == "abort", f"a request that was aborted ended as {reason!r}")

    def _is_all_logged(self) -> bool:
        counts = self.counts()
        return not counts["save_queue"] and not counts["event_log_waiting_lines"]

    def _num_hanging(self) -> int:
        return int(self.control.report()["num_hanging"])

    def _num_waiting(self) -> int:
        return int(self.counts()["waiting_requests"])

    def _until(self, is_so: Callable[[], bool], message: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            check(time.monotonic() < deadline_s, message)
            time.sleep(0.02)

    def _check_nothing_is_held(self) -> None:
        """Every slot of DRAM can still change hands: new prompts are saved, none is dropped."""
        before = self.counts().get("save_dropped_pages", 0)
        for prompt in self.source.take(2 * self.host_pages // PROMPT_PAGES):
            self._save(prompt)
            self.settle()
        dropped = self.counts().get("save_dropped_pages", 0) - before
        check(not dropped, f"{dropped} pages found no slot although nothing was going on")


def _missing(answer: Answer) -> int:
    """Pages of a prompt that were computed although they were stored."""
    return PROMPT_PAGES - answer.cached_tokens // PAGE_TOKENS


def _behind(spot: Spot, cut: Spot) -> bool:
    return spot.path == cut.path and spot.offset >= cut.offset


READ_FAULTS: dict[str, dict[str, Any]] = {
    "disk_read_error": {"read_errno": errno.EIO},
    "worker_exception_reading": {"read_raises": True},
}
WRITE_FAULTS: dict[str, dict[str, Any]] = {
    "disk_full": {"write_errno": errno.ENOSPC},
    "disk_write_error": {"write_errno": errno.EIO},
    "worker_exception_writing": {"write_raises": True},
}
