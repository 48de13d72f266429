"""The server's page store in virtual time: no threads, no waiting, and pages without bytes.

Everything that decides is the product's: the page store with its books, placement, plans,
spiller and promoter, the disk tier with its segments, the waiting room that makes plans from the
queue, and what decides between loading and computing. What is put in their place here are ports: a
clock that somebody sets, an executor that runs one job after another at the disk's speed, an arena
whose slots keep a record's header and no payload, and system calls that move no payload either.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.load_or_compute import DramChoice, LoadOrCompute
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.simulator.forwards import Forwards
from sglang_ext.tiers.anonymous_memory import map_anonymous
from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS, record_blocks
from sglang_ext.tiers.coded_host import CachedDiskTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.policy.cost_model import CostModel
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import (
    DEFAULT_POLICY,
    PageStore,
    PageStoreConfig,
    policy_for_sizes,
)
from sglang_ext.tiers.store.executor import Executor, Job, Work
from sglang_ext.tiers.store.types import Hashes, LoadTicket, SaveTicket, StoreCounters

Ids = npt.NDArray[np.int64]
_DIGEST = bytes(range(32))  # of the one namespace
_INDEX_SLACK = 1.25  # as in the server
_PAGE_TOKENS = 512  # where nobody says otherwise
DEFAULT_PREFETCH_POLICY: str = HierKVConfig.prefetch_policy
"""The server's."""


class VirtualClock:
    """A clock that shows what it was set to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


@dataclass
class _Lane:
    """One work: its jobs run one after another."""

    work: Work
    bytes_per_s: float
    job: Job | None = None
    end_s: float = math.inf


class VirtualExecutor(Executor):
    """Runs jobs in virtual time: one that is taken is run when its bytes have moved.

    Args:
        clock: the time.
        bytes_per_s: by the name of the work.
    """

    def __init__(self, clock: VirtualClock, bytes_per_s: dict[str, float]) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._lanes: list[_Lane] = []

    def start(self, name: str, work: Work, num_at_once: int) -> None:
        """See `Executor.start`; several at once would share the disk's speed."""
        self._lanes.append(_Lane(work, self._bytes_per_s[name]))

    def join(self, work: Work) -> None:
        """See `Executor.join`; a job that was taken is run."""
        for lane in self._lanes:
            if lane.work is work and lane.job is not None:
                self._end(lane)

    def next_s(self) -> float:
        """Takes jobs for what is idle; returns when the first of all is due, infinity for never."""
        for lane in self._lanes:
            if lane.job is None:
                lane.job = lane.work.take()
                if lane.job is not None:
                    lane.end_s = self._clock.now_s + lane.job.num_bytes / lane.bytes_per_s
        return min((lane.end_s for lane in self._lanes), default=math.inf)

    def run_due(self) -> None:
        """Runs the jobs that are due by now, and those that can follow them at once."""
        while self.next_s() <= self._clock.now_s:
            for lane in self._lanes:
                if lane.end_s <= self._clock.now_s:
                    self._end(lane)

    def _end(self, lane: _Lane) -> None:
        job, lane.job, lane.end_s = lane.job, None, math.inf
        assert job is not None
        job.run()


class HeaderArena(HostArena):
    """Slots of full size in name that keep their first block: all but it is shared by all."""

    def _map(self, *, hugepages: bool) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
        num_bytes = self.num_slots * BLOCK_BYTES + self.slot_bytes
        mapping = map_anonymous(num_bytes, hugepages=False)
        flat = np.frombuffer(mapping, np.uint8)
        shape = (self.num_slots, self.slot_bytes)
        return mapping, np.lib.stride_tricks.as_strided(flat, shape, (BLOCK_BYTES, 1))


class HeaderIO(FileIO):
    """System calls on sparse files that move the first block of each slot and nothing behind it.

    Args:
        slot_bytes: what is so long is a slot.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO.pwritev`."""
        start = offset
        for buffer in buffers:
            is_slot = len(buffer) == self._slot_bytes
            os.pwrite(fd, buffer[:BLOCK_BYTES] if is_slot else buffer, offset)
            offset += len(buffer)
        return offset - start

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `FileIO.preadv`."""
        start = offset
        for buffer in buffers:
            is_slot = len(buffer) == self._slot_bytes
            got = os.preadv(fd, [buffer[:BLOCK_BYTES] if is_slot else buffer], offset)
            if not is_slot and got < len(buffer):
                return offset + got - start
            offset += len(buffer)
        return offset - start

    def allocate(self, fd: int, num_bytes: int) -> None:
        """See `FileIO.allocate`; takes no room."""
        os.ftruncate(fd, num_bytes)

    def free_bytes(self, path: Path) -> int:
        """See `FileIO.free_bytes`; there is always room."""
        return 1 << 62


class HeaderCache(CachedDiskTier):
    """Coded DRAM whose records are headers and take the room of a slot.

    Args:
        disk: see `CachedDiskTier`.
        num_pages: that it has room for.
        slot_bytes: what each takes.
    """

    def __init__(self, disk: DiskTier, num_pages: int, slot_bytes: int) -> None:
        super().__init__(disk, num_pages * slot_bytes)
        self._page_bytes = slot_bytes

    def _room_bytes(self, num_bytes: int) -> int:
        return self._page_bytes


@dataclass(frozen=True)
class StoreSizes:
    """What the store is given.

    Attributes:
        page_bytes: KV of one page.
        host_pages: pages that DRAM holds.
        disk_pages: pages that fit the disk's bound; 0 for no disk.
        read_bytes_per_s, write_bytes_per_s: of the disk; infinity for one that is never waited for.
        page_tokens: P.
        coded_pages: pages of the disk that coded DRAM has room for as well; 0 for none.
    """

    page_bytes: int
    host_pages: int
    disk_pages: int
    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf
    page_tokens: int = _PAGE_TOKENS
    coded_pages: int = 0


class ServerStore:
    """A page store and a waiting room as a server has them, and the clock they go by.

    Pages are numbers; a page's hash is made from its number.

    Args:
        store: the product's.
        disk: its disk tier; None without one.
        clock: the time; whoever drives the store sets it.
        executor: runs what moves between DRAM and disk.
        sizes: of the store.
        feeds: what the store's measurements go to.
        prefetch_policy: the server's flag.
        folder: of the disk; removed in the end. None: somebody else's.

    Attributes:
        store, disk, clock, executor: as given.
        page_tokens: P.
        forwards: takes what the device does; whoever drives the store tells.
        room: the product's waiting room.
        space: the one key space.
    """

    def __init__(
        self, store: PageStore, disk: DiskTier | CachedDiskTier | None, clock: VirtualClock,
        executor: VirtualExecutor, sizes: StoreSizes, feeds: CostFeeds,
        prefetch_policy: str = DEFAULT_PREFETCH_POLICY, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.store, self.disk, self.clock, self.executor = store, disk, clock, executor
        self.page_tokens = sizes.page_tokens
        self._folder = folder
        store.open_namespace(_DIGEST, {})
        self.space = store.space(_DIGEST)
        self.forwards = Forwards(feeds, clock)
        decider: LoadOrCompute | None = None
        dram: DramChoice | None = None
        if prefetch_policy == "cost":
            dram = DramChoice(
                feeds.cost, feeds.counters, page_tokens=sizes.page_tokens,
                kv_bytes_per_page=sizes.page_bytes,
            )  # fmt: skip
        if prefetch_policy == "cost" and disk is not None:  # as in the server
            decider = LoadOrCompute(
                store, feeds.cost, page_tokens=sizes.page_tokens,
                kv_bytes_per_page=sizes.page_bytes,
                is_decoding=lambda: self.forwards.is_decoding, clock=clock,
            )  # fmt: skip
        self.room = WaitingRoom(
            store, prefetch_policy=prefetch_policy,
            prefetch_timeout_ms=HierKVConfig.prefetch_timeout_ms, decider=decider, dram=dram,
            clock=clock,
        )  # fmt: skip

    def pin_worth(self, handle: Hashable, hashes: Hashes) -> LoadTicket:
        """Begins the load of a request that is about to run, of what is in DRAM and worth it.

        Args:
            handle: of the request, which waits.
            hashes: u8 `[N, 32]`, of its prompt.
        """
        num_ready = self.store.ready_prefix(self.space, hashes)
        hashes = hashes[: self.room.num_worth(handle, 0, num_ready)]
        ticket = self.store.pin_leading(self.space, hashes)
        self.store.begin_load(self.space, ticket, hashes[: len(ticket.rows)])
        return ticket

    def begin_save(self, hashes: Hashes, num_offered: int) -> SaveTicket:
        """Takes slots for the pages of a path behind the first `num_offered`, offered before.

        From the first of these on that is stored no more, as the server does.
        """
        num_stored = len(self.store.survey(self.space, hashes[:num_offered]).ready)
        ticket = self.store.begin_save(self.space, hashes[num_stored:], hashes[:num_stored])
        slots = self.store.arena.slots
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            meta = RecordMeta(
                hashes[num_stored + page].tobytes(), _DIGEST, b"", num_stored + page, 1, "pre"
            )
            write_meta(slots[slot], meta, 0)
        return ticket

    def end_save(self, ticket: SaveTicket) -> None:
        """Publishes the pages of a save, which are complete now."""
        self.store.finish_save(ticket, ok=True)

    def save(self, hashes: Hashes, num_offered: int) -> None:
        """Saves pages at once; see `begin_save`."""
        self.end_save(self.begin_save(hashes, num_offered))

    def close(self) -> None:
        """Gives everything back."""
        self.room.leave_all()
        self.store.close(timeout_s=0.0)
        self.store.arena.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def virtual_store(
    sizes: StoreSizes, placement: PolicyConfig | None, write_policy: str = DEFAULT_POLICY,
    prefetch_policy: str = DEFAULT_PREFETCH_POLICY,
) -> ServerStore:  # fmt: skip
    """A store without threads and without bytes, over a clock that stands still.

    Args:
        sizes: of the tiers.
        placement: the policy's settings; None for `--hier-kv-lookahead off`.
        write_policy: the server's flag.
        prefetch_policy: another.

    Raises:
        ValueError: pages of this size cannot be stored.
    """
    slot_bytes = record_blocks(sizes.page_bytes) * BLOCK_BYTES
    if slot_bytes > MAX_RECORD_BLOCKS * BLOCK_BYTES:
        raise ValueError(
            f"a page of {sizes.page_bytes:,} bytes is longer than any record; give pages of "
            "fewer tokens"
        )
    clock = VirtualClock()
    executor = VirtualExecutor(
        clock, {"spill": sizes.write_bytes_per_s, "promote": sizes.read_bytes_per_s}
    )
    folder = Path(tempfile.mkdtemp(prefix="hier-kv-simulated-"))
    arena = HeaderArena(sizes.host_pages, slot_bytes, memory_limit_bytes=1 << 62)
    disk: DiskTier | CachedDiskTier | None = None
    if sizes.disk_pages:
        config = DiskConfig(
            folder, sizes.disk_pages * slot_bytes, 0, direct_io="off", helper_threads=0
        )
        disk = DiskTier(config, io=HeaderIO(slot_bytes))
        if sizes.coded_pages:
            disk = HeaderCache(disk, sizes.coded_pages, slot_bytes)
    num_pages = max(1024, int((sizes.host_pages + sizes.disk_pages) * _INDEX_SLACK))
    writing = policy_for_sizes(write_policy, sizes.host_pages, sizes.disk_pages)
    feeds = cost_feeds(sizes)
    store = PageStore(
        arena, PageIndex(num_pages), disk, PageStoreConfig(writing, placement=placement),
        on_read=feeds.on_read, on_write=feeds.on_write, counters=feeds.counters, clock=clock,
        executor=executor,
    )  # fmt: skip
    if disk is not None:
        store.connect(disk)
    return ServerStore(store, disk, clock, executor, sizes, feeds, prefetch_policy, folder)


def cost_feeds(sizes: StoreSizes) -> CostFeeds:
    """Where a store's measurements go, and counters to be its own: a model that knows nothing."""
    cost = CostModel(HierKVConfig.prefetch_timeout_ms / 1e3)
    return CostFeeds(cost, sizes.page_bytes, StoreCounters())


def page_hashes(ids: Ids) -> Hashes:
    """Hashes of pages, by number: u8 `[N, 32]`."""
    words: Any = ids.astype(np.uint64)[:, None] * np.uint64(4) + np.arange(1, 5, dtype=np.uint64)
    words = words * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: Hashes = np.ascontiguousarray(words ^ (words >> np.uint64(31))).view(np.uint8)
    return hashes
