"""The thread that copies nodes from the device pool to DRAM, in the order they were offered.

A request's insert into SGLang's tree offers them: `seam/cache.py` (`checkpoint`), then
`seam/wrapper.py` (`_offload_node`), then `seam/linker.py` (`offload`). What leaves the device later
was saved before; its eviction saves nothing. `PageStore.finish_save` then queues the pages for the
disk, where `tiers/store/movers/spiller.py` writes them.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.layout import ROPE_NAMES
from sglang_ext.device.save_path import SaveParts, SaveRun
from sglang_ext.device.transfers import Hashes, Place, SaveJob
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, SaveTicket
from sglang_ext.tiers.store.worker_failures import note_failure

failures = FailureLog(logging.getLogger(__name__))

MAX_QUEUED_SAVES = 1024
# SGLang leaves 15 s at shutdown; the page store needs most of it for the disk.
_CLOSE_SAVES_S = 3.0


class SaveThread:
    """A bounded queue of saves and the thread that does them.

    One thread offers and takes results, the scheduler's. Results come in the order of the offers.
    """

    def __init__(self, store: PageStore, parts: SaveParts, page_size: int) -> None:
        self._store = store
        self._parts = parts  # the full layers, then each group of window layers
        self._page_size = page_size
        self._jobs: queue.SimpleQueue[SaveJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._completed: deque[bool] = deque()
        self._num_saves = 0  # queued or running; guarded by _done, as are the next two
        self._num_notes = 0  # alike, of what is called behind saves
        self._num_ended = 0  # of both since the start, however they ended
        self._done = threading.Condition()
        # Device resets so far. A save that one overtook read rows that may have changed hands.
        self._num_resets = 0  # guarded by _done
        self._deadline_s = math.inf
        self._has_entered = False  # the thread's own
        self._thread = threading.Thread(target=self._run, name="hier-kv-save", daemon=True)
        self._thread.start()

    def offer(
        self,
        place: Place,
        hashes: Hashes,
        token_slots: torch.Tensor,
        ready_events: Callable[[], list[Any]],
        *,
        accepts_all: bool,
        is_of_windows: bool = False,
        is_of_state: bool = False,
    ) -> bool:
        """Queues a save; False when it is refused because the queue is full.

        Args:
            place: where the pages belong.
            hashes: u8 `[N, 32]`.
            token_slots: `[N * P]`, rows of the device pool.
            ready_events: makes the CUDA events after which these are complete.
            accepts_all: queue the save even when the queue is full; it then ends as not stored. Its
                node stays locked on the device until then, so they are no more than the device has
                nodes.
            is_of_windows: see `SaveJob`.
            is_of_state: see `SaveJob`.
        """
        dropped = self._num_saves >= MAX_QUEUED_SAVES  # only this thread adds to it
        if dropped:
            self._store.counters.add("save_dropped_pages", len(hashes))
            self._store.counters.add("save_queue_full")
            if not accepts_all:
                return False
        job = SaveJob(
            place,
            hashes,
            token_slots,
            ready_events(),
            self._num_resets,
            dropped,
            is_of_windows,
            is_of_state,
        )
        with self._done:
            self._num_saves += 1
        self._jobs.put(job)
        return True

    def after_saves(self, note: Callable[[], None]) -> None:
        """Calls something short after the saves queued so far.

        Not called when the queue is so long that a save would be dropped, too.
        """
        if self._jobs.qsize() < MAX_QUEUED_SAVES:
            with self._done:
                self._num_notes += 1
            self._jobs.put(note)

    def numbers(self) -> tuple[int, int]:
        """How many saves are queued or running, and how many ended since the start, at one moment.

        Both numbers count the notes of `after_saves`, too. Saves and notes end in the order in
        which they were offered. So when this returns (n, m), all that is queued now has ended as
        soon as the second number is n + m, whatever is offered meanwhile.
        """
        with self._done:
            return self._num_saves + self._num_notes, self._num_ended

    @property
    def num_completed(self) -> int:
        """Number of finished saves not yet taken."""
        return len(self._completed)

    def completed(self, most: int) -> list[bool]:
        """Results of the oldest finished saves, which stay to be taken."""
        return [self._completed[index] for index in range(min(most, len(self._completed)))]

    def pop_completed(self) -> bool:
        """Takes the oldest finished save; True when all its pages are stored."""
        return self._completed.popleft()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every queued save is done; False when it takes longer."""
        with self._done:
            return self._done.wait_for(lambda: self._num_saves == 0, timeout_s)

    def device_was_reset(self) -> None:
        """Has saves under way end unpublished, and drops the results that were not taken."""
        with self._done:
            self._num_resets += 1
            self._completed.clear()

    def close(self) -> None:
        """Ends the thread; saves that cannot be done within a few seconds are lost and counted."""
        self._deadline_s = time.monotonic() + _CLOSE_SAVES_S
        self._jobs.put(None)
        self._thread.join()

    # ---- the thread ----

    def _enter(self) -> None:
        """Has the thread use the device, if it does not yet."""
        if not self._has_entered:
            self._parts.enter_thread()
            self._has_entered = True

    def _run(self) -> None:
        self._call(self._enter)
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if not isinstance(job, SaveJob):
                self._call(job)
                with self._done:
                    self._num_notes -= 1
                    self._num_ended += 1
                continue
            stored = self.save(job)
            with self._done:
                if job.num_resets == self._num_resets:
                    self._completed.append(stored)
                self._num_saves -= 1
                self._num_ended += 1
                self._done.notify_all()

    def save(self, job: SaveJob) -> bool:
        """Does a save; True when all its pages are stored. One thread at a time."""
        try:
            if job.dropped:
                return False
            if time.monotonic() < self._deadline_s:
                self._enter()
                return self._save(job)
            self._store.counters.add("shutdown_lost_pages", len(job.hashes))
        except torch.OutOfMemoryError:
            self._store.counters.add("save_no_device_memory")
        except BaseException:  # whatever it is: its node would stay locked on the device
            self._store.counters.add("save_failures")
            failures.exception("hier-kv: a node could not be saved; it stays on the device")
        return False

    def _call(self, note: Callable[[], None]) -> None:
        try:
            note()
        except BaseException:
            note_failure(self._store.counters, failures, "what should go with a save failed")

    def _save(self, job: SaveJob) -> bool:
        place, hashes, quality = job.place, job.hashes, job.place.quality
        offered = np.arange(len(hashes))
        if place.aliased is not None:
            offered = np.flatnonzero(~place.aliased)
            hashes, quality = hashes[offered], None if quality is None else quality[offered]
            self._store.counters.add("aliased_pages", int(place.aliased.sum()))
        ticket = self._store.begin_save(place.space, hashes, place.ancestors, quality)
        if not len(ticket.rows):
            self._store.finish_save(ticket, ok=True)
            return ticket.dropped == 0
        ok = False
        try:
            with self._parts.saving(job.ready_events):
                ok = self._copy_out(job, ticket, offered[ticket.pages])
            ok = ok and job.num_resets == self._num_resets
        finally:
            self._store.finish_save(ticket, ok=ok)
        if ok and job.is_of_state:
            self._store.counters.add("saved_states")
        return ok and ticket.dropped == 0

    def _copy_out(self, job: SaveJob, ticket: SaveTicket, pages: npt.NDArray[np.int64]) -> bool:
        """Copies new `pages` of a job, part by part; the parts are those of `SaveParts`.

        Returns:
            False, with nothing copied, where the job names rows of the padding page, or the padding
            slot of a state. SGLang names these for tokens that have no window rows and for nodes
            that have no state; every request writes to them.
        """
        if job.is_of_state:
            if self._parts[1].has_rows_below(1, job.token_slots):
                self._store.counters.add("save_unplaced_pages", len(pages))
                return False
            self._copy_part(job, self._parts[1], pages, ticket.slots)
            return True
        if job.is_of_windows and self._parts[0].has_rows_below(self._page_size, job.token_slots):
            self._store.counters.add("save_unplaced_pages", len(pages))
            return False
        # The hashes of a window job are of one group's pages, then of the next group's.
        num_pages = len(job.token_slots) // self._page_size
        part = pages // num_pages + 1 if job.is_of_windows else np.zeros_like(pages)
        for number in np.unique(part).tolist():
            mine = np.flatnonzero(part == number)
            self._copy_part(job, self._parts[number], pages[mine], ticket.slots[mine])
        return True

    def _copy_part(
        self,
        job: SaveJob,
        path: Any,
        pages: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int32],
    ) -> None:
        """Copies `pages`, indices into a job's hashes, of one part, to slots with headers."""
        size, place = self._page_size, job.place
        page_slots = slots.astype(np.int64)
        if job.is_of_state:  # its pages are the state's own parts, all of one position
            sources, firsts = pages, np.zeros_like(pages)
        else:
            firsts = size * (pages % (len(job.token_slots) // size))  # a page's first token
            sources = firsts
        runs = [
            SaveRun(int(sources[run[0]]), place.position + int(firsts[run[0]]), page_slots[run])
            for run in _runs(pages)
        ]
        saved = path.save(job.token_slots, runs)
        for page, first, slot, info in zip(
            pages.tolist(), firsts.tolist(), slots.tolist(), saved, strict=True
        ):
            meta = RecordMeta(
                page_hash=job.hashes[page].tobytes(),
                namespace=place.space.digest,
                lora=place.space.lora,
                position=place.position + first,
                num_tokens=size,
                rope=ROPE_NAMES[info.rope_state],
                quality=0 if place.quality is None else int(place.quality[page]),
            )
            write_meta(self._store.arena.slots[slot], meta, info.payload_bytes)
            self._store.counters.add("corrections", info.num_corrections)
            self._store.counters.add(f"saved_{meta.rope}_pages")
        self._store.counters.time("save", path.busy_s)


def _runs(pages: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Splits indices of `pages` into runs of consecutive pages."""
    return np.split(np.arange(len(pages)), np.flatnonzero(np.diff(pages) != 1) + 1)
