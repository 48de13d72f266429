"""What brings pages from disk to DRAM for requests that wait in the queue."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import BLOCK_BYTES, Location, ReadRequest, Tier
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.quality import ANY, Qualities
from sglang_ext.tiers.records.record import VerifyResult
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.disk_coding import PageDecoder
from sglang_ext.tiers.store.executor import Executor, Job, Work
from sglang_ext.tiers.store.movers.piece_size import PieceSize
from sglang_ext.tiers.store.movers.transfer_meter import TransferMeter
from sglang_ext.tiers.store.types import Hashes, KeySpace, Plan, Rows, Slots
from sglang_ext.tiers.transcoder import PageTranscoder

logger = logging.getLogger(__name__)

PIECE_S = 0.08
"""What a piece should take a thread: short enough that a plan that comes first need not wait long.

Beside a busy interpreter a small piece takes nearly as long as a large one, and must not seem slow.
"""

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 8 << 20, 32 << 20

NUM_THREADS = 2
"""Pieces that are read at a time."""


Mask = npt.NDArray[np.bool_]


class _Read:
    """One piece of a plan's reads. A plan is no longer in flight once its last piece has ended."""

    num_bytes = 0  # to be read from disk
    read_s = decode_s = 0.0  # seconds of the thread
    decode_bytes = 0

    def __init__(self, plan: Plan, space: KeySpace, rows: Rows, slots: Slots, left: list[int]):
        self.plan = plan  # the plan that waits for it; changes if that plan is cancelled
        self.space = space
        self.rows = rows
        self.slots = slots
        self.left = left  # pieces of the plan that are not done, shared; guarded by the promoter


class Promoter(Work):
    """Reads plans' pages, page order first, and verifies every byte before it is published.

    The plan whose request comes first in the queue is read first, whatever was asked for before: a
    piece is chosen when a thread is free for it. A coded record is decoded on the thread that read
    it, after its checksum, its key and its namespace were verified; it is read into its slot, so it
    needs no more memory than a raw one.

    What waits to be read is bounded by the arena: a piece owns slots.
    """

    def __init__(
        self,
        books: Books,
        disk: Tier,
        executor: Executor,
        transcoder: PageTranscoder | None = None,
        meter: TransferMeter | None = None,
        decoded: DecodedPages | None = None,
        rules: PageRules | None = None,
    ) -> None:
        self._table, self._lookups, self._plans = books.table, books.lookups, books.plans
        self._disk = disk
        self._decoder = PageDecoder(transcoder, self._table.arena.slot_bytes, decoded, rules)
        self._meter = meter or TransferMeter()
        self._lock = threading.Condition()
        # Of the plans that begin now; noted under _lock.
        self._piece = PieceSize(PIECE_S, MIN_PIECE_BYTES, MAX_PIECE_BYTES)
        self._reads: dict[Plan, deque[_Read]] = {}  # not begun, by plan, oldest first; guarded
        self._closing = False  # guarded by _lock
        self._executor = executor
        executor.start("promote", self, NUM_THREADS)

    def start(
        self, space: KeySpace, hashes: Hashes, max_quality: int = ANY, priority: int = 0
    ) -> Plan | None:
        """Begins to bring the leading stored pages of a prefix to DRAM.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.
            priority: see `Plan`; equal ones are read in the order of these calls.

        Returns:
            A plan to poll, or None when no page is stored. Does not block.
        """
        plan, rows, slots = self._plans.begin(space, hashes, max_quality, priority)
        if plan is None:
            return None
        if not len(rows):
            return plan
        piece_pages = -(-self._piece.num_bytes // self._table.arena.slot_bytes)
        starts = range(0, len(rows), piece_pages)
        left = [len(starts)]
        ends = [start + piece_pages for start in starts]
        reads = [
            _Read(plan, space, rows[start:end], slots[start:end], left)
            for start, end in zip(starts, ends, strict=True)
        ]
        for read in reads:
            read.num_bytes = self._record_bytes(read)
            self._meter.queued(read.num_bytes)
        with self._lock:
            self._reads[plan] = deque(reads)
            self._lock.notify(len(reads))
        return plan

    def cancel(self, plan: Plan) -> None:
        """Gives a plan's pins back, and drops its unstarted reads that no other plan waits for.

        A read that has begun goes on, and its pages stay useful.
        """
        self._plans.cancel(plan)
        with self._lock:
            reads = self._reads.pop(plan, ())
        # Backwards, and each to the front: what paths share is the beginning of both.
        for read in reversed(reads):
            heir = self._plans.withdraw(read.rows, read.slots)
            if heir is None:
                self._meter.queued(-read.num_bytes)
                self._end(read)
                continue
            read.plan = heir
            with self._lock:
                self._reads.setdefault(heir, deque()).appendleft(read)
                self._lock.notify()

    def close(self) -> None:
        """Ends the threads after the pieces in their hands; those still queued count as failed."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._executor.join(self)
        while (read := self._next()) is not None:
            self._meter.queued(-read.num_bytes)
            self._finish(read, *_nothing(read))

    def _record_bytes(self, read: _Read) -> int:
        num_blocks = self._lookups.to_read(read.rows, read.slots)[2].num_blocks
        slot_blocks = self._table.arena.slot_bytes // BLOCK_BYTES
        return int(np.where(num_blocks > 0, num_blocks, slot_blocks).sum()) * BLOCK_BYTES

    def wait(self) -> bool:
        """See `Work.wait`."""
        with self._lock:
            self._lock.wait_for(lambda: self._closing or bool(self._reads))
            return not self._closing

    def take(self) -> Job | None:
        """See `Work.take`: the next piece of the plan whose request comes first."""
        with self._lock:
            read = None if self._closing else self._next()
        if read is None:
            return None
        self._meter.began(read.num_bytes)
        return Job(read.num_bytes, partial(self._run, read))

    def _run(self, read: _Read) -> None:
        ok, quality = _nothing(read)
        try:
            ok, quality = self._read(read)
        except Exception:
            self._table.counters.add("promotion_failures")
            logger.exception("hier-kv: pages could not be read from disk; they are recomputed")
        self._meter.ended(
            read.num_bytes,
            read_s=read.read_s,
            decode_bytes=read.decode_bytes,
            decode_s=read.decode_s,
            whole=bool(ok.all()),
        )
        self._finish(read, ok, quality)
        if ok.all():
            with self._lock:
                num_bytes = len(read.rows) * self._table.arena.slot_bytes
                self._piece.note(num_bytes, read.read_s)  # pieces are cut by slots

    def _next(self) -> _Read | None:
        """Takes the next piece of the first plan. The caller holds the lock, or is alone."""
        if not self._reads:
            return None
        plan = min(self._reads, key=lambda plan: plan.priority)
        read = self._reads[plan].popleft()
        if not self._reads[plan]:
            del self._reads[plan]
        return read

    def _read(self, read: _Read) -> tuple[Mask, Qualities]:
        """Reads and decodes; returns which pages are there, and how good they are.

        Pages that were cleared since are not read: their rows may be other pages' now.
        """
        ok, qualities = _nothing(read)
        wanted, hashes, copies = self._lookups.to_read(read.rows, read.slots)
        if not wanted.any():
            return ok, qualities
        slots = self._table.arena.slots
        requests = [
            ReadRequest(Location(segment, block), row.tobytes(), read.space.lora, slots[slot], num)
            for segment, block, num, row, slot in zip(
                copies.segment.tolist(),
                copies.block.tolist(),
                copies.num_blocks.tolist(),
                hashes,
                read.slots[wanted],
                strict=True,
            )
        ]
        started_s = self._table.now_s()
        results = self._disk.read(read.space.digest, requests)
        read.read_s = self._table.now_s() - started_s
        places = np.flatnonzero(wanted).tolist()
        for number, (index, result, request) in enumerate(
            zip(places, results, requests, strict=True)
        ):
            kind = result.value
            if result is VerifyResult.OK:
                started_s = self._table.now_s()
                quality, decoded_bytes = self._decoder.decode(request.out)
                if decoded_bytes:
                    read.decode_bytes += decoded_bytes
                    read.decode_s += self._table.now_s() - started_s
                if quality is not None:
                    ok[index], qualities[index] = True, quality
                    continue
                kind = "codec"
            self._table.counters.add(f"rejected_{kind}")
            self._table.events.pages("rejected", hashes[number : number + 1], kind=kind)
        return ok, qualities

    def _finish(self, read: _Read, ok: Mask, quality: Qualities) -> None:
        try:
            self._plans.finish_promotion(read.plan, read.rows, read.slots, ok, quality)
        finally:
            self._end(read)

    def _end(self, read: _Read) -> None:
        with self._lock:
            read.left[0] -= 1
            last = read.left[0] == 0
        if last:
            self._meter.plan_ended()
            self._plans.end_promotion()


def _nothing(read: _Read) -> tuple[Mask, Qualities]:
    """The result when none of the pages could be read."""
    return np.zeros(len(read.rows), np.bool_), np.zeros(len(read.rows), np.uint8)
