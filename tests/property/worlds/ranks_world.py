"""Ranks of one server without the server: a scheduler, a page store and a disk for each.

Every rank is a thread that runs the same scheduler on the same random script, over the real
`Lockstep`, `PromiseBook`, `WaitingRoom` and `PageStore`. What differs between ranks is what differs
in a server: how long the store takes, what fails, what is damaged, what else presses on DRAM.

Weights and an adapter change at any point of it, in each of SGLang's pause modes, with a flush and
without, in one call or in a session. What a page holds follows from the weights and the adapter
that computed it, whatever name it is stored under, so a page that reaches the device under others
shows.

Where one rank keeps the pages of all, the others have a store that knows of none and read the first
one's memory; each ends a reading at steps of its own choice.

Under `cost` each rank is told of speeds of its own, which have nothing to do with the others' and
change by its own chance.

Each decision goes into the rank's trace; the traces must be equal.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.admission.cost_feeds import CostFeeds  # noqa: E402
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute  # noqa: E402
from sglang_ext.admission.waiting import WaitingRoom  # noqa: E402
from sglang_ext.admission.waiting_request import ReusablePrefix  # noqa: E402
from sglang_ext.identity.model_identity import ModelIdentity  # noqa: E402
from sglang_ext.ranks.consensus import Vector  # noqa: E402
from sglang_ext.ranks.lockstep import Lockstep  # noqa: E402
from sglang_ext.ranks.shared_promises import SharedBook  # noqa: E402
from sglang_ext.ranks.stages import StagedLockstep  # noqa: E402
from sglang_ext.seam.cache import HierKVRadixCache  # noqa: E402
from sglang_ext.tiers.disk import DiskConfig, DiskTier  # noqa: E402
from sglang_ext.tiers.disk.segments.fileio import FileIO  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from sglang_ext.tiers.policy.cost_model import CostModel  # noqa: E402
from sglang_ext.tiers.records.record import HEADER_BYTES  # noqa: E402
from sglang_ext.tiers.remote import RemoteStore  # noqa: E402
from sglang_ext.tiers.store import KeySpace, LivePages, PageStore, PageStoreConfig  # noqa: E402
from sglang_ext.tiers.store.reader_store import ReaderStore  # noqa: E402
from sglang_ext.tiers.store.types import StoreCounters  # noqa: E402
from testkit.slow.store import add_jitter  # noqa: E402
from tests.tiers.remote.remote_cases import open_store  # noqa: E402
from tests.tiers.tier_pages import PAYLOAD_BYTES, SLOT_BYTES, key, make_slot, payload  # noqa: E402

PAGE = 4
NUM_SLOTS = 20
NUM_DOCUMENTS, PAGES_PER_DOCUMENT, SHARED_PAGES = 8, 7, 2
WAIT_S = 300.0  # for another rank, and for the end of what is under way
ENDS_S = 1200.0  # a rank's thread, which waits for nothing longer than `WAIT_S`, on any machine
NUM_WEIGHTS, NUM_ADAPTERS = 3, 2  # few, so that old ones come back and their pages are of use
ADAPTER_ID = "tone"
JITTER_S, DISK_DELAY_S, REMOTE_DELAY_S, TIMEOUT_MS = 0.001, 0.01, 0.004, 8.0
TOKEN_S, PAGE_S = (1e-6, 1e-4, 3e-3), (1e-5, 1e-3, 2e-2)  # speeds that ranks are told of
LOAD_S = (1e-6, 1e-6, 1e-2)  # of a page, to the device
MAX_LATE_STEPS = 12  # of a reading of shared pages, behind what SGLang waits for


class Wire:
    """The reductions of a group: entered by all ranks, or the test fails."""

    def __init__(self, num_ranks: int) -> None:
        self.rounds = [0] * num_ranks
        self._vectors: list[Vector] = [np.empty(0, np.int32)] * num_ranks
        self._least = np.empty(0, np.int32)
        self._barrier = threading.Barrier(num_ranks, action=self._reduce)

    def min_reduce(self, rank: int, vector: Vector) -> None:
        self._vectors[rank] = vector.copy()
        self._barrier.wait(WAIT_S)
        vector[:] = self._least
        self.rounds[rank] += 1

    def abort(self) -> None:
        """A rank failed: the others must not wait for it."""
        self._barrier.abort()

    def _reduce(self) -> None:
        assert len({len(vector) for vector in self._vectors}) == 1
        self._least = np.min(self._vectors, axis=0)


class Stages:
    """What pipeline stages wait for in SGLang's loop, where every step of each has a batch.

    A stage has a step's requests and proxies from the one before it, and a batch's output, which
    the last stage sends and the others hand on, from the one before it in *its* next step. Even
    stages send first. A reduction is begun in one call and waited for in another.
    """

    def __init__(self, num_ranks: int, num_stages: int) -> None:
        self.num_stages = num_stages
        self.rounds = [0] * num_ranks
        self._num_ranks, self._num_of_stage = num_ranks, num_ranks // num_stages
        names = ("entered", "sent", "ended")
        self._steps: dict[str, list[float]] = {name: [-1.0] * num_ranks for name in names}
        self._vectors: dict[int, dict[int, Vector]] = {}
        self._is_over = False
        self._changed = threading.Condition()

    def begin_reduce(self, rank: int, vector: Vector) -> Callable[[], None]:
        number = self.rounds[rank]
        self.rounds[rank] += 1
        with self._changed:
            told = self._vectors.setdefault(number, {})
            told[rank] = vector.copy()
            self._changed.notify_all()

        def wait() -> None:
            with self._changed:
                self._await(lambda: len(told) == self._num_ranks)
                vector[:] = np.min(list(told.values()), axis=0)

        return wait

    def enter(self, rank: int, step: int) -> None:
        """The requests of a step are there."""
        self._await_before(rank, "entered", step)
        self._mark(rank, "entered", step)

    def exchange(self, rank: int, step: int) -> None:
        """The batch of a step runs, and what became of an earlier one is known."""
        self._await_before(rank, "ended", step)
        stage = rank // self._num_of_stage
        if stage % 2 == 0:
            self._mark(rank, "sent", step)
        if stage:
            self._await_before(rank, "sent", step + 1)
        else:
            last = rank - self._num_of_stage  # of the last stage
            self._await_rank(last, "sent", step - self.num_stages + 1)
        self._mark(rank, "sent", step)
        self._mark(rank, "ended", step)

    def leave(self, rank: int) -> None:
        """A rank has no further step."""
        for name in self._steps:
            self._mark(rank, name, math.inf)

    def abort(self) -> None:
        """A rank failed: the others must not wait for it."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _await_before(self, rank: int, name: str, step: int) -> None:
        if rank >= self._num_of_stage:
            self._await_rank(rank - self._num_of_stage, name, step)

    def _await_rank(self, rank: int, name: str, step: int) -> None:
        with self._changed:
            self._await(lambda: self._steps[name][rank] >= step)

    def _mark(self, rank: int, name: str, step: float) -> None:
        with self._changed:
            self._steps[name][rank] = step
            self._changed.notify_all()

    def _await(self, is_so: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: is_so() or self._is_over, WAIT_S):
            raise threading.BrokenBarrierError("stages wait for each other")
        if not is_so():
            raise threading.BrokenBarrierError


class BadDisk(FileIO):
    """A disk of one rank, whose reads are late and fail."""

    def __init__(self, rng: random.Random, failure: float) -> None:
        self._rng, self._failure, self._lock = rng, failure, threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            delay_s, fails = self._rng.uniform(0, DISK_DELAY_S), self._rng.random() < self._failure
        time.sleep(delay_s)
        if fails:
            raise OSError(errno.EIO, "injected")
        return super().preadv(fd, buffers, offset)


class Handle(NamedTuple):
    """A request's name, as SGLang's: the same on all ranks."""

    rid: int
    attempt: int


class Request(NamedTuple):
    """A request for the first pages of a document."""

    handle: Handle
    document: int
    num_pages: int

    @property
    def lora_id(self) -> str | None:
        """Two of the documents are asked for under the adapter."""
        return ADAPTER_ID if self.document >= NUM_DOCUMENTS - 2 else None


# What computed a page: numbers of the weights and of the adapter, -1 without; several are a mix.
Makers = frozenset[tuple[int, int]]


class Running(NamedTuple):
    """An admitted request; `made_by` is of what it attended to so far."""

    request: Request
    pages: LivePages | None
    made_by: Makers


def page_number(document: int, page: int) -> int:
    """Documents come in pairs that share their first pages."""
    return (document // 2 if page < SHARED_PAGES else 100 + document) * 100 + page


def hashes_of(document: int, num_pages: int) -> Any:
    """u8 `[N, 32]`."""
    numbers = [page_number(document, page) for page in range(num_pages)]
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)


def content(number: int, made_by: Makers) -> Any:
    """Payload of a page, u8 `[PAYLOAD_BYTES]`, by what computed it."""
    return payload(key(number), repr(sorted(made_by)).encode())


class Rank:
    """One rank: what SGLang's scheduler and cache are to `Lockstep`, and a page store."""

    def __init__(
        self,
        folder: Path,
        number: int,
        wire: Wire | Stages,
        *,
        seed: int,
        policy: str,
        failure: float,
        lookahead: bool,
        remote: bool,
        changes: bool,
        memory: mmap.mmap | None = None,
    ) -> None:
        self.number = number
        self.shares = memory is not None
        self.changes = changes
        self.script = random.Random(seed)  # the same on all ranks
        self.own = random.Random(1000 * seed + number)
        self.failure = failure
        reads = memory is not None and number > 0
        self.arena = self._make_arena(NUM_SLOTS, SLOT_BYTES, memory=memory, is_borrowed=reads)
        has_disk, has_remote = not remote and not reads, remote and not reads
        self.disk = self._open_disk(folder / f"{number}") if has_disk else None
        self.remote = self._open_remote(folder / f"remote-{number}") if has_remote else None
        placement = PolicyConfig() if lookahead else None
        self.feeds = CostFeeds(CostModel(TIMEOUT_MS / 1e3), PAYLOAD_BYTES, StoreCounters())
        self.store = (ReaderStore if reads else PageStore)(
            self.arena,
            PageIndex(16 if reads else 256),
            self.disk,
            PageStoreConfig(placement=placement),
            on_read=self.feeds.on_read,
            on_fetch=self.feeds.on_fetch,
            counters=self.feeds.counters,
            remote=self.remote,
        )
        if self.disk is not None:
            self.store.connect(self.disk)
        names = (
            "saves.begin",
            "saves.finish",
            "plans.begin",
            "plans.finish_promotion",
            "loads.pin_leading",
        )
        add_jitter(self.store._books, names, JITTER_S, seed=self.own.randrange(1 << 30))
        self.weights, self.adapter = 0, 0
        self.model = torch.nn.Linear(2, 2, bias=False)
        self.lora = SimpleNamespace(layers=[], scaling=1.0)
        self.identity = ModelIdentity(self.model, {}, {}, lambda: {ADAPTER_ID: self.lora})
        self._write_weights(0)
        self.session_open = False

        # What `Lockstep` asks for.
        self.by_cost = policy == "cost" and not reads
        self.waiting_room = WaitingRoom(
            self.store, prefetch_policy=policy, prefetch_timeout_ms=TIMEOUT_MS,
            decider=self._load_or_compute() if self.by_cost else None,
            dram=self._dram_choice() if self.by_cost else None,
        )  # fmt: skip
        self.linker = self
        self.hier_linker = self
        self.hit_markers: dict[str, Any] = {}
        self.media = SimpleNamespace(end=lambda reason: None)  # no prompt has images
        self._searches: list[Any] = []
        self.stages = wire if isinstance(wire, Stages) else None
        self.admission = self._admission_of(wire)

        self.queue: list[Request] = []
        self.running: list[Running] = []
        self.device: list[list[Makers]] = [[] for _ in range(NUM_DOCUMENTS)]
        self.pending: deque[tuple[int, int, int]] = deque()
        self.ended: deque[bool] = deque()
        self.to_save: deque[tuple[KeySpace, Any, list[int], list[Makers]] | None] = deque()
        self.work = threading.Condition()
        self.trace: list[Any] = []
        self.counts: dict[str, int] = {}
        self.next_id = self.num_steps = self.num_stage_steps = 0
        self._seen: dict[int, str] = {}  # slot to digest, while it is loaded
        self.late: list[tuple[int, LivePages, Request]] = []  # readings, by the step of their ends
        self.saver = threading.Thread(target=self._run_saves, daemon=True)
        self.saver.start()

    def _make_arena(self, *args: Any, **options: Any) -> HostArena:
        return HostArena(*args, **options)

    def _open_io(self, io: FileIO) -> FileIO:
        """The disk's system calls."""
        return io

    def _admission_of(self, wire: Wire | Stages) -> Lockstep:
        parts = (self.store, self.waiting_room, self._handles, self)
        common: dict[str, Any] = {
            "page_size": PAGE,
            "find_damaged": self.find_damaged,
            "num_on_device": self._num_on_device,
            "gather": lambda content: [content],
        }
        if isinstance(wire, Wire):
            return Lockstep(
                *parts,
                min_reduce=lambda vector: wire.min_reduce(self.number, vector),
                shares_pages=self.shares,
                **common,
            )
        return StagedLockstep(
            *parts,
            num_stages=wire.num_stages,
            begin_reduce=lambda vector: wire.begin_reduce(self.number, vector),
            **common,
        )

    def _load_or_compute(self) -> LoadOrCompute:
        return LoadOrCompute(
            self.store, self.feeds.cost, page_tokens=PAGE, kv_bytes_per_page=PAYLOAD_BYTES
        )

    def _dram_choice(self) -> DramChoice:
        return DramChoice(
            self.feeds.cost, self.store.counters, page_tokens=PAGE, kv_bytes_per_page=PAYLOAD_BYTES
        )

    def _handles(self) -> list[Handle]:
        return [request.handle for request in self.queue]

    def _open_disk(self, folder: Path) -> DiskTier:
        io = BadDisk(random.Random(self.own.random()), self.failure)
        config = DiskConfig(folder, 16 << 20, 0, segment_bytes=256 << 10, direct_io="off")
        return DiskTier(config, io=self._open_io(io))

    def _open_remote(self, folder: Path) -> RemoteStore:
        folder.mkdir()
        remote = open_store(f"file://{folder}?size=1GB")
        ended_in_time(remote.wait_usable(WAIT_S))
        seed = self.own.randrange(1 << 30)
        add_jitter(remote, ("head", "get", "put"), REMOTE_DELAY_S, seed=seed)
        return remote

    # ---- what `Lockstep` asks ----

    def find_damaged(self, slots: Any, position: int) -> Any:
        assert position % PAGE == 0
        damaged = [at for at in range(len(slots)) if self.own.random() < self.failure]
        return np.array(damaged, np.int64)

    def num_pending_saves(self) -> int:
        return len(self.pending)

    def ended_saves(self, most: int) -> list[bool]:
        return [self.ended[at] for at in range(min(most, len(self.ended), len(self.pending)))]

    def take_completed_offloads(self, count: int) -> list[bool]:
        return [self.ended.popleft() for _ in range(count)]

    def commit_completed_offloads(self, results: list[bool]) -> None:
        for result in results:
            self.note("saved", self.pending.popleft(), result)

    def end_loads(self) -> tuple[list[str], bool]:
        raise NotImplementedError  # `_try` tells of loads itself

    def _num_on_device(self, document_and_length: tuple[int, int]) -> int:
        document, num_pages = document_and_length
        return min(len(self.device[document]), num_pages)

    def quiesce(self) -> None:
        """As the cache does: waits for the saves and takes their results."""
        end_s = time.monotonic() + WAIT_S
        while len(self.ended) < len(self.pending):
            ended_in_time(time.monotonic() < end_s)
            time.sleep(0.001)
        self.admission.drain_saves()
        assert not self.pending

    def weights_change(self) -> None:
        HierKVRadixCache.weights_change(cast(Any, self))

    def _void_promises(self) -> None:
        HierKVRadixCache._void_promises(cast(Any, self))

    def release_all_plans(self) -> None:
        HierKVRadixCache.release_all_plans(cast(Any, self))

    # ---- the scheduler ----

    def run(self, num_steps: int) -> None:
        """The whole script, and all that it began to its end; on the rank's own thread."""
        for _ in range(num_steps):
            self.step()
        self.drain()
        if self.stages is not None:
            self.stages.leave(self.number)

    def step(self) -> None:
        """One step of the scheduler, in SGLang's order."""
        self._enter_step()
        for _ in range(self.script.randrange(3)):
            self._arrive()
        if self.queue and self.script.random() < 0.1:
            self._abort()
        for document in range(NUM_DOCUMENTS):
            if self.script.random() < 0.2:  # the device is small
                del self.device[document][self.script.randint(0, len(self.device[document])) :]
        self.num_steps += 1
        if self.changes:
            self._change()
        if self.num_steps % 70 == 0:
            self._clear()
        self.press()
        self.measure()
        self._end_late()
        for failed in self.admission.step():
            self.note("failed", failed)
        for request in list(self.queue):
            if len(self.running) >= 3:
                break
            self._try(request)
        self._exchange()
        while self.running and (len(self.running) >= 3 or self.script.random() < 0.5):
            self._finish()

    def _enter_step(self) -> None:
        if self.stages is not None:
            self.stages.enter(self.number, self.num_stage_steps)

    def _exchange(self) -> None:
        if self.stages is not None:
            self.stages.exchange(self.number, self.num_stage_steps)
            self.num_stage_steps += 1

    def press(self) -> None:
        """Other pages come into this rank's DRAM and push some out."""
        if self.own.random() < 0.2:
            number = 50_000 + self.own.randrange(40)
            hashes = np.frombuffer(key(number), np.uint8).reshape(1, 32)
            space = self.store.space(bytes(32))  # of nothing that is asked for
            self._save(space, hashes, [number], [frozenset()])

    def measure(self) -> None:
        """Now and then this rank alone finds other speeds."""
        if not self.by_cost or self.own.random() >= 0.05:
            return
        cost, token_s, page_s = self.feeds.cost, self.own.choice(TOKEN_S), self.own.choice(PAGE_S)
        load_s = self.own.choice(LOAD_S)
        for num_pages in (1, 2, 4, 8) * 2:
            num_tokens, num_bytes = num_pages * PAGE, num_pages * SLOT_BYTES
            cost.note_prefill([(num_tokens, 0)], token_s * num_tokens)
            cost.note_read(num_bytes, page_s * num_pages)
            cost.note_fetch(num_bytes, page_s * num_pages)
            cost.note_load(num_bytes, load_s * num_pages)

    def drain(self) -> None:
        """Runs until every request was served; fails when they wait for each other."""
        end_s = time.monotonic() + WAIT_S
        while self.queue or self.running or self.pending or self.num_readings:
            self._enter_step()
            self.press()
            self.num_steps += 1
            self._end_late()
            self.admission.step()
            for request in list(self.queue):
                self._try(request)
            self._exchange()
            while self.running:
                self._finish()
            self.note("left", len(self.queue))
            assert time.monotonic() < end_s, ("deadlock", self.number, self.queue)
        self.waiting_room.leave_all()  # a read that only measures may still be under way
        self.waiting_room.step([])
        assert not self.waiting_room._came, "requests that came are kept for good"
        assert not self.waiting_room._left, "requests that left are kept for good"

    def close(self) -> None:
        """Ends the threads and checks the accounts."""
        with self.work:
            self.to_save.append(None)
            self.work.notify()
        self.saver.join(WAIT_S)
        if not self.saver.is_alive():
            self.store.close()

    def check_accounts(self) -> None:
        ended_in_time(self.store.wait_idle(WAIT_S))
        end_s = time.monotonic() + WAIT_S
        while self.arena._pins.any() or self.store._books.spills.entries:
            assert time.monotonic() < end_s, np.flatnonzero(self.arena._pins)
            time.sleep(0.002)
        assert self.store._books.pins.num_pages == 0
        assert len(self.admission.promises) == self.num_readings == len(self.late) == 0
        if self.store.keeps_pages:  # the slots of the others are borrowed
            self.store.check()
        else:
            self.arena.check()

    def note(self, kind: str, *values: Any) -> None:
        self.trace.append((kind, *values))
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _arrive(self) -> None:
        document = self.script.randrange(NUM_DOCUMENTS)
        num_pages = self.script.randint(1, PAGES_PER_DOCUMENT)
        self._enqueue(Request(Handle(self.next_id, 0), document, num_pages))
        self.next_id += 1

    def _enqueue(self, request: Request) -> None:
        key_of_prompt = (request.document, request.num_pages)
        num_on_device = self._num_on_device(key_of_prompt)
        space = self.identity.space_of(request, self.store)
        if space is not None:
            hashes, num_tokens = hashes_of(*key_of_prompt), request.num_pages * PAGE
            prefix = ReusablePrefix(space, hashes, num_on_device, 255, prompt_tokens=num_tokens)
            self.admission.enter(request.handle, prefix, key_of_prompt)
        self.queue.append(request)

    def _abort(self) -> None:
        request = self.queue.pop(self.script.randrange(len(self.queue)))
        self.admission.promises.leave(request.handle)

    def _clear(self) -> None:
        """As the cache does, under whatever is on its way."""
        self._void_promises()
        self.store.clear()
        self.note("cleared", len(self.queue))

    def _try(self, request: Request) -> None:
        handle, document, num_pages = request
        promises, space = self.admission.promises, self.identity.space_of(request, self.store)
        admitted = self.admission.may_admit(handle)
        self.note("admitted" if admitted else "held", handle)
        if not admitted:
            return
        on_device = min(len(self.device[document]), num_pages - 1)
        made_by: Makers = frozenset().union(*self.device[document][:on_device])
        # SGLang always computes the last token: of whole pages, the last is not promised.
        promised = 0
        if space is not None:
            num = promises.num_promised(handle, space, on_device)
            promised = min(num, num_pages - 1 - on_device)
        pages = None
        if promised > 0 and space is not None:
            hashes = hashes_of(document, num_pages)[on_device : on_device + promised]
            ticket = promises.take(handle, space, on_device, hashes)
            assert ticket is not None
            pages = self.store.gate.load(ticket, space)
            assert pages is not None
            self._check_content(pages, request, on_device)
            self.note("loaded", handle, on_device, promised, ticket.quality.tolist())
            self.note("loaded under", *self._maker(request))
            if self.stages is None:  # of several stages the server ends where one does not land
                self.admission.loads_ended([handle], landed=self.own.random() >= self.failure)
            if self.script.random() < 0.3:  # its result is used at once
                for failed in self.admission.settle_loads([handle]):
                    self.note("failed", failed)
        self.queue.remove(request)
        promises.admit(handle, num_pages - 1)
        self.running.append(Running(request, pages, made_by | {self._maker(request)}))

    def _finish(self) -> None:
        running = self.running.pop(0)
        request, made_by = running.request, running.made_by | {self._maker(running.request)}
        handle, document, num_pages = request
        self._end_load(running)
        if self.script.random() < 0.1:
            self._retract(request)
            return
        space = self.identity.space_of(request, self.store)
        promises = self.admission.promises
        last = promises.take_last(handle, key(page_number(document, num_pages - 1)))
        self.note("last page", handle, last is not None)
        pages = None
        if last is not None and space is not None:
            pages = self.store.gate.load(last, space)
        elif last is not None:
            self.store.end_load(last)
        if pages is not None:
            self._check_content(pages, request, num_pages - 1)
            self._end_reading(pages, request)
        promises.leave(handle)
        start = len(self.device[document])
        if num_pages > start:
            self.device[document] += [made_by] * (num_pages - start)
            if space is not None:
                self._offload(space, document, start)

    def _end_load(self, running: Running) -> None:
        if running.pages is not None:
            self._end_reading(running.pages, running.request)

    def _end_reading(self, pages: LivePages, request: Request) -> None:
        """A device may read on when the scheduler has done with a request."""
        if self.shares:
            steps = self.own.randrange(MAX_LATE_STEPS)
            self.late.append((self.num_steps + steps, pages, request))
            return
        self._check_content(pages, request, None)
        self.store.end_load(pages.ticket)

    def _end_late(self) -> None:
        due = [each for each in self.late if each[0] <= self.num_steps]
        self.late = [each for each in self.late if each[0] > self.num_steps]
        for _, pages, request in due:
            self._check_content(pages, request, None)
            self.store.end_load(pages.ticket)

    @property
    def num_readings(self) -> int:
        """Loads of shared pages that are not over on all ranks."""
        promises = self.admission.promises
        return len(promises.readings) if isinstance(promises, SharedBook) else 0

    def _retract(self, request: Request) -> None:
        """It gives up its KV and goes back to the queue."""
        handle = request.handle
        self.admission.promises.leave(handle)
        self._enqueue(request._replace(handle=handle._replace(attempt=handle.attempt + 1)))

    def _offload(self, space: KeySpace, document: int, start: int) -> None:
        made_by = self.device[document][start:]
        end = start + len(made_by)
        self.pending.append((document, start, end))
        numbers = [page_number(document, page) for page in range(start, end)]
        with self.work:
            self.to_save.append((space, hashes_of(document, end)[start:], numbers, made_by))
            self.work.notify()

    # ---- weights and adapters ----

    def _change(self) -> None:
        if self.script.random() < 0.06:
            self._change_weights()
        if self.script.random() < 0.03:
            self._change_adapter()
        if self.session_open and self.script.random() < 0.5:
            self._change_weights()
        if not self.running and self.script.random() < 0.3:
            self._flush()

    def _change_weights(self) -> None:
        """One of SGLang's calls that write weights, as `seam/hooks/weights.py` goes around it."""
        mode = self.script.choice(("none", "in_place", "retract", "abort"))
        if mode in ("retract", "abort"):
            self._pause(retract=mode == "retract")
        if not self.running and self.script.random() < 0.5:  # all was evicted, or never there
            self._drop_device()
        self.weights_change()
        self.identity.begin_update(device_is_empty=self._device_is_empty())
        fails = self.script.random() < 0.1
        if not fails:
            self._write_weights(self.script.randrange(NUM_WEIGHTS))
        flush = self.script.random() < 0.6
        if flush and not self.running:
            self._flush()
        self.session_open = self.script.random() < 0.2
        self.identity.end_update(
            device_is_empty=self._device_is_empty(), incomplete=self.session_open
        )
        self.note(f"weights, {mode}, {'flush' if flush else 'no flush'}", self.weights)

    def _flush(self) -> None:
        """`/flush_cache`; waiting requests are no hindrance in a pause."""
        self.admission.promises.leave_all()
        self._drop_device()
        self.identity.device_was_reset()

    def _pause(self, *, retract: bool) -> None:
        running, self.running = self.running, []
        for each in running:
            self._end_load(each)
            if retract:
                self._retract(each.request)
            else:
                self.admission.promises.leave(each.request.handle)

    def _change_adapter(self) -> None:
        """The adapter is loaded again under its id, with other weights."""
        self.weights_change()
        self.adapter = self.script.randrange(NUM_ADAPTERS)
        weights = {"lora_A": torch.full((2, 2), float(self.adapter))}
        self.lora = SimpleNamespace(layers=[SimpleNamespace(weights=weights)], scaling=1.0)
        self.identity.adapters_changed(self.store)
        self.note("adapter", self.adapter)

    def _write_weights(self, number: int) -> None:
        self.weights = number
        with torch.no_grad():
            self.model.weight.fill_(1.0 + number)

    def _drop_device(self) -> None:
        for pages in self.device:
            pages.clear()

    def _device_is_empty(self) -> bool:
        return not self.running and not any(self.device)

    def _maker(self, request: Request) -> tuple[int, int]:
        return self.weights, self.adapter if request.lora_id is not None else -1

    # ---- pages ----

    def _check_content(self, pages: LivePages, request: Request, first: int | None) -> None:
        """Pages are what the weights and the adapter of now compute; None: as they were before."""
        for at, slot in enumerate(pages.ticket.slots.tolist()):
            # Not the header: the spill thread puts the checksum there when it may.
            digest = hashlib.sha256(self.arena.slots[slot][HEADER_BYTES:].tobytes()).hexdigest()
            if first is None:
                assert digest == self._seen[slot], "a page changed while it was loaded"
            else:
                wanted = page_number(request.document, first + at)
                found = self.arena.slots[slot][HEADER_BYTES : HEADER_BYTES + 64].tobytes()
                right = content(wanted, frozenset([self._maker(request)]))[:64].tobytes()
                assert found == right, ("KV of other weights", wanted, slot)
                self._seen[slot] = digest

    def _run_saves(self) -> None:
        while True:
            with self.work:
                self.work.wait_for(lambda: bool(self.to_save))
                job = self.to_save.popleft()
            if job is None:
                return
            self.ended.append(self._save(*job))

    def _save(
        self, space: KeySpace, hashes: Any, numbers: list[int], made_by: list[Makers]
    ) -> bool:
        ticket = self.store.begin_save(space, hashes, np.empty((0, 32), np.uint8))
        pages = ticket.pages.tolist()
        records = [make_slot(numbers[page], space.digest, space.lora) for page in pages]
        for page, record in zip(pages, records, strict=True):
            record[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = content(
                numbers[page], made_by[page]
            )
        self._fill(ticket.slots, records)
        ok = self.own.random() >= self.failure
        self.store.finish_save(ticket, ok=ok)
        return ok and ticket.dropped == 0

    def _fill(self, slots: Any, records: Sequence[Any]) -> None:
        """A save writes its slots."""
        for slot, record in zip(slots.tolist(), records, strict=True):
            self.arena.slots[slot] = record


class WaitedInVainError(AssertionError):
    """A rank waited too long for what is no other rank's: on a busy machine it shows nothing."""


def ended_in_time(is_so: bool) -> None:
    """Raises `WaitedInVainError` unless it is so."""
    if not is_so:
        raise WaitedInVainError


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Waits until the threads of all ranks have ended.

    A wait for another rank ends by itself, after `WAIT_S`; what a rank does meanwhile takes as long
    as the machine likes, and may not be looked at before.
    """
    end_s = time.monotonic() + ENDS_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "ranks do not end"


def run_ranks(
    folder: Path,
    *,
    num_ranks: int,
    num_steps: int,
    seed: int,
    policy: str,
    failure: float = 0.05,
    lookahead: bool = True,
    remote: bool = False,
    changes: bool = False,
    num_stages: int = 1,
    shared: bool = False,
    kind: Callable[..., Rank] = Rank,
) -> tuple[list[Rank], Wire | Stages]:
    """Runs all ranks through the script, lets every request end, and checks the accounts.

    With `remote` each rank has a remote store behind its DRAM, and no disk; with `changes` the
    weights and an adapter change; with `shared` the first rank keeps the pages of all.
    """
    memory = mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES) if shared else None
    wire = Wire(num_ranks) if num_stages == 1 else Stages(num_ranks, num_stages)
    ranks = [
        kind(
            folder, number, wire, seed=seed, policy=policy, failure=failure, lookahead=lookahead,
            remote=remote, changes=changes, memory=memory,
        )
        for number in range(num_ranks)
    ]  # fmt: skip
    errors: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            rank.run(num_steps)
        except BaseException as error:
            errors.append(error)
            wire.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    join_all(threads)
    try:
        if errors:
            first = next(
                (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None
            )
            raise first or errors[0]
        for rank in ranks:
            rank.check_accounts()
    finally:
        for rank in ranks:
            rank.close()
    return ranks, wire
