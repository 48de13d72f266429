"""From DRAM to disk: writes queued pages in large batches; with write-back also the coldest."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np

from sglang_ext.tiers.base import BLOCK_BYTES, NO_SEGMENT, Location, Tier
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.disk_coding import DiskRecord, KeepRaw, PageEncoder
from sglang_ext.tiers.store.executor import Executor, Job, Work
from sglang_ext.tiers.store.movers.namespaces import Namespaces
from sglang_ext.tiers.store.movers.piece_size import PieceSize
from sglang_ext.tiers.store.movers.transfer_meter import TransferMeter
from sglang_ext.tiers.store.openings import Opening
from sglang_ext.tiers.store.types import DiskCopies, SpillEntry
from sglang_ext.tiers.transcoder import PageTranscoder

logger = logging.getLogger(__name__)

BATCH_S = 0.05
"""What a batch should take: its pages cannot leave DRAM until all of it is written."""

MIN_BATCH_BYTES, MAX_BATCH_BYTES = 32 << 20, 128 << 20

_BATCH_SHARE = 1 / 16  # of the arena: no more, unless it is the least
_CLEANING_POLL_S = 0.1  # where nothing wakes the thread: the queue may have changed


class Spiller(Work):
    """Drains the spill queue into the disk tier.

    With the write-back policy it also cleans the coldest pages whenever the pages that could leave
    DRAM at once fall below the low-water mark, so that room is made before it is needed.

    With a transcoder pages are coded here, on this thread, between being taken from the queue and
    being written: pinned, and with no lock held that another thread of the server could want.
    """

    def __init__(
        self,
        books: Books,
        disk: Tier,
        *,
        low_water_pages: int,
        executor: Executor,
        transcoder: PageTranscoder | None = None,
        keep_raw: KeepRaw | None = None,
        decoded: DecodedPages | None = None,
        meter: TransferMeter | None = None,
        namespaces: Namespaces | None = None,
    ) -> None:
        self._namespaces = namespaces
        self._table, self._spills = books.table, books.spills
        self._room, self._policy, self._clearing = books.room, books.writing, books.clearing
        self._disk = disk
        self._low_water_pages = low_water_pages
        self._meter = meter or TransferMeter()
        most_bytes = int(self._table.arena.nbytes * _BATCH_SHARE)
        self._encoder: PageEncoder | None = None  # guarded by _writing
        if transcoder is not None and transcoder.encodes:
            most_bytes = MIN_BATCH_BYTES  # coded records need memory of their own
            self._encoder = PageEncoder(
                transcoder,
                self._table.arena.slot_bytes,
                max(1, MIN_BATCH_BYTES // self._table.arena.slot_bytes),
                self._table.counters,
                keep_raw,
                decoded,
            )
        # Noted under _writing.
        self._batch = PieceSize(BATCH_S, MIN_BATCH_BYTES, min(most_bytes, MAX_BATCH_BYTES))
        self._stop = False  # guarded by the table's lock
        # Held from when a batch, or what is to be cleared, is taken until that is done.
        self._writing = threading.Lock()
        self._executor = executor
        executor.start("spill", self, 1)

    def flush(self, deadline_s: float) -> int:
        """Writes everything that is not on disk yet until a deadline; returns pages left in DRAM.

        Args:
            deadline_s: time, on the store's clock, at which to give up.
        """
        if self._table.now_s() < deadline_s:  # else its thread would write what is lost
            self._spills.queue_all()
        while self._table.now_s() < deadline_s:
            # Asked again when the queue was empty: the thread may have taken the last of it.
            if not self._writing.acquire(timeout=max(0.0, deadline_s - self._table.now_s())):
                break  # a write hangs
            job = self._take_batch()
            if job is not None:
                job.run()
            elif not self._spills.queue_all():
                break
        return self._spills.num_unwritten()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is written to the disk meanwhile, nor is anything else done to it."""
        with self._writing:
            yield

    def close(self) -> None:
        """Ends the work after the batch that is being written."""
        with self._table.lock:
            self._stop = True
            self._spills.ready.notify_all()
        self._executor.join(self)
        while self._spills.pending_clears():  # forgotten pages must not come back with a restart
            self._writing.acquire()
            job = self._take_batch()
            if job is not None:
                job.run()

    def wait(self) -> bool:
        """See `Work.wait`; returns now and then with write-back, for pages to be cleaned."""
        with self._table.lock:
            opening_s = self._spills.openings.wait_s(self._table.now_s())
            self._spills.ready.wait_for(
                lambda: self._stop or self._spills.has_work or self._room.should_look,
                _CLEANING_POLL_S if self._policy.back else opening_s,
            )
            return not self._stop

    def take(self) -> Job | None:
        """See `Work.take`. Until it has run, no other batch can be taken."""
        if self._policy.back:
            self._room.queue_leaving(self._low_water_pages)
        self._writing.acquire()
        return self._take_batch()

    def _batch_pages(self) -> int:
        return max(1, self._batch.num_bytes // self._table.arena.slot_bytes)

    def _take_batch(self) -> Job | None:
        """What to do next; `_writing` is held, until it is done, or given back for None."""
        job = None
        try:
            digests = self._spills.pending_clears()
            if digests:
                job = Job(0, partial(self._run_clear, digests))
            elif (opening := self._spills.take_opening()) is not None:
                job = Job(0, partial(self._run_opening, opening))
            elif (entry := self._spills.take(self._batch_pages())) is not None:
                num_bytes = len(entry.rows) * self._table.arena.slot_bytes
                self._meter.queued(num_bytes)
                self._meter.began(num_bytes)
                job = Job(num_bytes, partial(self._run, entry))
        finally:
            if job is None:
                self._writing.release()
        return job

    def _run_clear(self, digests: list[bytes]) -> None:
        """Deletes what the disk has of namespaces, after what was being written of them."""
        try:
            self._clearing.finish()
            for digest in digests:
                self._disk.clear(digest)
            num_left = self._disk.num_undeleted
            if num_left:
                self._table.counters.add("clear_failures")
                logger.warning(
                    "hier-kv: %d files of pages that were cleared could not be deleted from disk, "
                    "which is tried again; a start before that finds these pages", num_left,
                )  # fmt: skip
        except Exception:
            self._table.counters.add("clear_failures")
            logger.exception("hier-kv: pages that were cleared could not all be deleted from disk")
        finally:
            self._spills.end_clears(digests)
            self._writing.release()

    def _run_opening(self, opening: Opening) -> None:
        """Opens a namespace on the disk, after what was being written of others."""
        try:
            if self._namespaces is not None:
                self._namespaces.try_to_open(opening)
        finally:
            self._writing.release()

    def _run(self, entry: SpillEntry) -> None:
        whole = False
        try:
            whole = self._write(entry)
        except Exception:
            self._table.counters.add("spill_failures")
            logger.exception("hier-kv: a batch of pages could not be written to disk")
        finally:
            self._meter.ended(len(entry.rows) * self._table.arena.slot_bytes, whole=whole)
            self._meter.plan_ended()
            self._writing.release()

    def _write(self, entry: SpillEntry) -> bool:
        """Writes a batch; whether all of it is on disk."""
        arena = self._table.arena.slots
        slots = [arena[slot] for slot in entry.slots]
        records = [DiskRecord(slot, Quality.EXACT) for slot in slots]
        locations: list[Location | None] = [None] * len(records)
        try:
            if self._encoder is not None:
                records = self._encoder.encode(slots)
            started_s = self._table.now_s()
            locations = self._disk.write(entry.space.digest, [r.data for r in records])
            if None not in locations:
                num_bytes = sum(record.data.size for record in records)
                self._batch.note(num_bytes, self._table.now_s() - started_s)
        finally:
            self._finish(entry, records, locations)
        return None not in locations

    def _finish(
        self, entry: SpillEntry, records: list[DiskRecord], locations: list[Location | None]
    ) -> None:
        stored = np.array([location is not None for location in locations], np.bool_)
        placed = [location or Location(NO_SEGMENT, 0) for location in locations]
        copies = DiskCopies(
            segment=np.array([location.segment for location in placed], np.uint32),
            block=np.array([location.block for location in placed], np.uint32),
            num_blocks=np.array([r.data.size // BLOCK_BYTES for r in records], np.uint16),
            quality=np.array([record.quality for record in records], np.uint8),
        )
        self._spills.finish(entry, stored, copies)
