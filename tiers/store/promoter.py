"""Threads that bring pages from disk to DRAM for requests that wait in the queue."""

from __future__ import annotations

import logging
import queue
import threading

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import Location, ReadRequest, Tier
from sglang_ext.tiers.quality import ANY, Qualities
from sglang_ext.tiers.record import VerifyResult
from sglang_ext.tiers.store.coding import PageDecoder
from sglang_ext.tiers.store.directory import Directory
from sglang_ext.tiers.store.types import Hashes, KeySpace, Plan, Rows, Slots
from sglang_ext.tiers.transcoder import PageTranscoder

logger = logging.getLogger(__name__)

_READ_BYTES = 8 << 20
_NUM_THREADS = 2


Mask = npt.NDArray[np.bool_]


class _Read:
    """One piece of a plan's reads; `last` ends the plan's part in what is in flight."""

    def __init__(self, plan: Plan, space: KeySpace, rows: Rows, slots: Slots, left: list[int]):
        self.plan = plan
        self.space = space
        self.rows = rows
        self.slots = slots
        self.left = left  # pieces of the plan that are not done, shared; guarded by the promoter


class Promoter:
    """Reads plans' pages, page order first, and verifies every byte before it is published.

    A coded record is decoded on the thread that read it, after its checksum, its key and its
    namespace were verified; it is read into its slot, so it needs no more memory than a raw one.

    The queue is bounded by the arena: a piece in it owns slots.
    """

    def __init__(
        self, directory: Directory, disk: Tier, transcoder: PageTranscoder | None = None
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._decoder = PageDecoder(transcoder, directory.arena.slot_bytes)
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._piece_pages = max(1, _READ_BYTES // directory.arena.slot_bytes)
        self._left_lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"hier-kv-promote-{index}", daemon=True)
            for index in range(_NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, space: KeySpace, hashes: Hashes, max_quality: int = ANY) -> Plan | None:
        """Begins to bring the leading stored pages of a prefix to DRAM.

        Args:
            space: where the pages belong.
            hashes: u8 `[N, 32]`.
            max_quality: no page from the first worse one on.

        Returns:
            A plan to poll, or None when no page is stored. Does not block.
        """
        plan, rows, slots = self._directory.begin_plan(space, hashes, max_quality)
        if plan is None or not len(rows):
            return plan
        starts = range(0, len(rows), self._piece_pages)
        left = [len(starts)]
        for start in starts:
            end = start + self._piece_pages
            self._queue.put(_Read(plan, space, rows[start:end], slots[start:end], left))
        return plan

    def close(self) -> None:
        """Ends the threads after the pieces in their hands; those still queued count as failed."""
        self._closing.set()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        while not self._queue.empty():
            read = self._queue.get()
            if read is not None:
                self._finish(read, *_nothing(read))

    def _run(self) -> None:
        while True:
            read = self._queue.get()
            if read is None:
                return
            ok, quality = _nothing(read)
            try:
                if not self._closing.is_set():
                    ok, quality = self._read(read)
            except Exception:
                self._directory.counters.add("promotion_failures")
                logger.exception("hier-kv: pages could not be read from disk; they are recomputed")
            self._finish(read, ok, quality)

    def _read(self, read: _Read) -> tuple[Mask, Qualities]:
        """Reads and decodes; returns which pages are there, and how good they are."""
        hashes, copies = self._directory.locations(read.rows)
        slots = self._directory.arena.slots
        requests = [
            ReadRequest(Location(segment, block), row.tobytes(), read.space.lora, slots[slot], num)
            for segment, block, num, row, slot in zip(
                copies.segment.tolist(),
                copies.block.tolist(),
                copies.num_blocks.tolist(),
                hashes,
                read.slots,
                strict=True,
            )
        ]
        results = self._disk.read(read.space.digest, requests)
        ok, qualities = _nothing(read)
        for index, (result, request) in enumerate(zip(results, requests, strict=True)):
            kind = result.value
            if result is VerifyResult.OK:
                quality = self._decoder.decode(request.out)
                if quality is not None:
                    ok[index], qualities[index] = True, quality
                    continue
                kind = "codec"
            self._directory.counters.add(f"rejected_{kind}")
            self._directory.events.pages("rejected", hashes[index : index + 1], kind=kind)
        return ok, qualities

    def _finish(self, read: _Read, ok: Mask, quality: Qualities) -> None:
        self._directory.finish_promotion(read.plan, read.rows, read.slots, ok, quality)
        with self._left_lock:
            read.left[0] -= 1
            last = read.left[0] == 0
        if last:
            self._directory.end_promotion()


def _nothing(read: _Read) -> tuple[Mask, Qualities]:
    """The result when none of the pages could be read."""
    return np.zeros(len(read.rows), np.bool_), np.zeros(len(read.rows), np.uint8)
