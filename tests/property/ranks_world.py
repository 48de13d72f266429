"""Ranks of one server without the server: a scheduler, a page store and a disk for each.

Every rank is a thread that runs the same scheduler on the same random script, over the real
`Lockstep`, `PromiseBook`, `WaitingRoom` and `PageStore`. What differs between ranks is what differs
in a server: how long the store takes, what fails, what is damaged, what else presses on DRAM.

Each decision goes into the rank's trace; the traces must be equal.
"""

from __future__ import annotations

import errno
import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from sglang_ext.consensus import Vector
from sglang_ext.lockstep import AgreedPrompt, Lockstep
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.fileio import FileIO
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.remote import RemoteStore
from sglang_ext.tiers.store import LoadTicket, PageStore, StoreConfig
from sglang_ext.tiers.store.jitter import add_jitter
from sglang_ext.waiting import WaitingRoom
from sglang_ext.waiting_request import Wish
from tests.tiers.remote_cases import open_store
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, key, make_slot

PAGE = 4
NUM_SLOTS = 20
NUM_DOCUMENTS, PAGES_PER_DOCUMENT, SHARED_PAGES = 8, 7, 2
WAIT_S = 30.0
JITTER_S, DISK_DELAY_S, REMOTE_DELAY_S, TIMEOUT_MS = 0.001, 0.01, 0.004, 8.0


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


def page_number(document: int, page: int) -> int:
    """Documents come in pairs that share their first pages."""
    return (document // 2 if page < SHARED_PAGES else 100 + document) * 100 + page


def hashes_of(document: int, num_pages: int) -> Any:
    """u8 `[N, 32]`."""
    numbers = [page_number(document, page) for page in range(num_pages)]
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)


class Rank:
    """One rank: what SGLang's scheduler and cache are to `Lockstep`, and a page store."""

    def __init__(
        self,
        folder: Path,
        number: int,
        wire: Wire,
        *,
        seed: int,
        policy: str,
        failure: float,
        lookahead: bool,
        remote: bool,
    ) -> None:
        self.number = number
        self.script = random.Random(seed)  # the same on all ranks
        self.own = random.Random(1000 * seed + number)
        self.failure = failure
        self.arena = HostArena(NUM_SLOTS, SLOT_BYTES)
        self.disk = None if remote else self._open_disk(folder / f"{number}")
        self.remote = self._open_remote(folder / f"remote-{number}") if remote else None
        placement = PolicyConfig() if lookahead else None
        self.store = PageStore(
            self.arena,
            PageIndex(256),
            self.disk,
            StoreConfig(placement=placement),
            remote=self.remote,
        )
        if self.disk is not None:
            self.store.connect(self.disk)
        names = ("begin_save", "finish_save", "begin_plan", "finish_promotion", "pin_leading")
        add_jitter(self.store._directory, names, JITTER_S, seed=self.own.randrange(1 << 30))
        self.store.open_namespace(NAMESPACE, {})
        self.space = self.store.space(NAMESPACE)

        # What `Lockstep` asks of a cache.
        self.page_size = PAGE
        self.waiting_room = WaitingRoom(
            self.store, prefetch_policy=policy, prefetch_timeout_ms=TIMEOUT_MS
        )
        self.linker = self
        self.hier_linker = self
        self.tree_core = SimpleNamespace(match_full_device_prefix=self._match)
        self.lockstep = Lockstep(
            cast(Any, self),
            lambda vector: wire.min_reduce(number, vector),
            lambda content: [content],
        )

        self.queue: list[Request] = []
        self.running: list[tuple[Request, LoadTicket | None]] = []
        self.on_device = [0] * NUM_DOCUMENTS
        self.pending: deque[tuple[int, int, int]] = deque()
        self.ended: deque[bool] = deque()
        self.to_save: deque[tuple[int, int, int] | None] = deque()
        self.work = threading.Condition()
        self.trace: list[Any] = []
        self.counts: dict[str, int] = {}
        self.next_id = self.num_steps = 0
        self._seen: dict[int, str] = {}  # slot to digest, while it is loaded
        self.saver = threading.Thread(target=self._run_saves, daemon=True)
        self.saver.start()

    def _open_disk(self, folder: Path) -> DiskTier:
        io = BadDisk(random.Random(self.own.random()), self.failure)
        config = DiskConfig(folder, 16 << 20, 0, segment_bytes=256 << 10, direct_io="off")
        return DiskTier(config, io=io)

    def _open_remote(self, folder: Path) -> RemoteStore:
        folder.mkdir()
        remote = open_store(f"file://{folder}?size=1GB")
        assert remote.wait_usable(WAIT_S)
        seed = self.own.randrange(1 << 30)
        add_jitter(remote, ("head", "get", "put"), REMOTE_DELAY_S, seed=seed)
        return remote

    # ---- what `Lockstep` asks ----

    def waiting_queue(self) -> list[Any]:
        return [SimpleNamespace(cache_request_handle=request.handle) for request in self.queue]

    def find_damaged(self, slots: Any, position: int) -> Any:
        assert position % PAGE == 0
        damaged = [at for at in range(len(slots)) if self.own.random() < self.failure]
        return np.array(damaged, np.int64)

    def ended_saves(self, most: int) -> list[bool]:
        return [self.ended[at] for at in range(min(most, len(self.ended), len(self.pending)))]

    def take_completed_offloads(self, count: int) -> list[bool]:
        return [self.ended.popleft() for _ in range(count)]

    def commit_completed_offloads(self, results: list[bool]) -> None:
        for result in results:
            self.note("saved", self.pending.popleft(), result)

    def _match(self, document_and_length: tuple[int, int]) -> tuple[int, None, int]:
        document, num_pages = document_and_length
        return PAGE * min(self.on_device[document], num_pages), None, 0

    # ---- the scheduler ----

    def step(self) -> None:
        """One step of the scheduler, in SGLang's order."""
        for _ in range(self.script.randrange(3)):
            self._arrive()
        if self.queue and self.script.random() < 0.1:
            self._abort()
        for document in range(NUM_DOCUMENTS):
            if self.script.random() < 0.2:  # the device is small
                self.on_device[document] = self.script.randint(0, self.on_device[document])
        self.num_steps += 1
        if self.num_steps % 70 == 0:
            self._clear()
        self.press()
        self._step_room()
        for failed in self.lockstep.step():
            self.note("failed", failed)
        for request in list(self.queue):
            if len(self.running) >= 3:
                break
            self._try(request)
        while self.running and (len(self.running) >= 3 or self.script.random() < 0.5):
            self._finish()

    def _step_room(self) -> None:
        self.waiting_room.step([request.handle for request in self.queue])

    def press(self) -> None:
        """Other pages come into this rank's DRAM and push some out."""
        if self.own.random() < 0.2:
            number = 50_000 + self.own.randrange(40)
            hashes = np.frombuffer(key(number), np.uint8).reshape(1, 32)
            self._save(hashes, [number])

    def drain(self) -> None:
        """Runs until every request was served; fails when they wait for each other."""
        end_s = time.monotonic() + WAIT_S
        while self.queue or self.running or self.pending:
            self.press()
            self._step_room()
            self.lockstep.step()
            for request in list(self.queue):
                self._try(request)
            while self.running:
                self._finish()
            self.note("left", len(self.queue))
            assert time.monotonic() < end_s, ("deadlock", self.number, self.queue)

    def close(self) -> None:
        """Ends the threads and checks the accounts."""
        with self.work:
            self.to_save.append(None)
            self.work.notify()
        self.saver.join(WAIT_S)
        if not self.saver.is_alive():
            self.store.close()

    def check_accounts(self) -> None:
        assert self.store.wait_idle(WAIT_S)
        end_s = time.monotonic() + WAIT_S
        while self.arena._pins.any() or self.store._directory.spill_queue:
            assert time.monotonic() < end_s, np.flatnonzero(self.arena._pins)
            time.sleep(0.002)
        assert self.store._directory.num_planned_pages == 0
        assert len(self.lockstep.promises) == 0
        self.store.check()

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
        num_above = self._match(key_of_prompt)[0] // PAGE
        wish = Wish(self.space, hashes_of(*key_of_prompt), num_above, 255)
        self.lockstep.promises.enter(request.handle, wish, AgreedPrompt(key_of_prompt))
        self.queue.append(request)

    def _abort(self) -> None:
        request = self.queue.pop(self.script.randrange(len(self.queue)))
        self.lockstep.promises.leave(request.handle)

    def _clear(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while len(self.ended) < len(self.pending):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        self.lockstep.drain_saves()
        assert not self.pending
        self.lockstep.promises.leave_all()
        self.store.clear()
        self.note("cleared", len(self.queue))

    def _try(self, request: Request) -> None:
        handle, document, num_pages = request
        promises = self.lockstep.promises
        admitted = self.lockstep.may_admit(handle)
        self.note("admitted" if admitted else "held", handle)
        if not admitted:
            return
        on_device = min(self.on_device[document], num_pages - 1)
        # SGLang always computes the last token: of whole pages, the last is not promised.
        promised = min(promises.num_promised(handle, on_device), num_pages - 1 - on_device)
        ticket = None
        if promised > 0:
            hashes = hashes_of(document, num_pages)[on_device : on_device + promised]
            ticket = promises.take(handle, on_device, hashes)
            assert ticket is not None
            self._check_content(ticket, document, on_device)
            self.note("loaded", handle, on_device, promised, ticket.quality.tolist())
            self.lockstep.loads_ended([handle], landed=self.own.random() >= self.failure)
            if self.script.random() < 0.3:  # its result is used at once
                for failed in self.lockstep.settle_loads([handle]):
                    self.note("failed", failed)
        self.queue.remove(request)
        promises.admit(handle, num_pages - 1)
        self.running.append((request, ticket))

    def _finish(self) -> None:
        (handle, document, num_pages), ticket = self.running.pop(0)
        if ticket is not None:
            self._check_content(ticket, document, None)
            self.store.release(ticket.slots)
        promises = self.lockstep.promises
        if self.script.random() < 0.1:  # retracted
            promises.leave(handle)
            self._enqueue(Request(handle._replace(attempt=handle.attempt + 1), document, num_pages))
            return
        last = promises.take_last(handle, key(page_number(document, num_pages - 1)))
        self.note("last page", handle, last is not None)
        if last is not None:
            self._check_content(last, document, num_pages - 1)
            self.store.release(last.slots)
        promises.leave(handle)
        start = self.on_device[document]
        if num_pages > start:
            self.on_device[document] = num_pages
            self.pending.append((document, start, num_pages))
            with self.work:
                self.to_save.append((document, start, num_pages))
                self.work.notify()

    # ---- pages ----

    def _check_content(self, ticket: LoadTicket, document: int, first: int | None) -> None:
        for at, slot in enumerate(ticket.slots.tolist()):
            digest = hashlib.sha256(self.arena.slots[slot].tobytes()).hexdigest()
            if first is None:
                assert digest == self._seen[slot], "a page changed while it was loaded"
            else:
                wanted = page_number(document, first + at)
                found = self.arena.slots[slot][512 : 512 + 64].tobytes()
                assert found == make_slot(wanted)[512 : 512 + 64].tobytes(), (wanted, slot)
                self._seen[slot] = digest

    def _run_saves(self) -> None:
        while True:
            with self.work:
                self.work.wait_for(lambda: bool(self.to_save))
                job = self.to_save.popleft()
            if job is None:
                return
            document, start, end = job
            numbers = [page_number(document, page) for page in range(start, end)]
            self.ended.append(self._save(hashes_of(document, end)[start:], numbers))

    def _save(self, hashes: Any, numbers: list[int]) -> bool:
        ticket = self.store.begin_save(self.space, hashes, np.empty((0, 32), np.uint8))
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            self.arena.slots[slot] = make_slot(numbers[page])
        ok = self.own.random() >= self.failure
        self.store.finish_save(ticket, ok=ok)
        return ok and ticket.dropped == 0


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
) -> tuple[list[Rank], Wire]:
    """Runs all ranks through the script, lets every request end, and checks the accounts.

    With `remote` each rank has a remote store behind its DRAM, and no disk.
    """
    wire = Wire(num_ranks)
    ranks = [
        Rank(
            folder, number, wire, seed=seed, policy=policy, failure=failure, lookahead=lookahead,
            remote=remote,
        )
        for number in range(num_ranks)
    ]  # fmt: skip
    errors: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            for _ in range(num_steps):
                rank.step()
            rank.drain()
        except BaseException as error:
            errors.append(error)
            wire.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
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
