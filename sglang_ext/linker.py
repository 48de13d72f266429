"""The transport behind SGLang's radix tree: saves and loads pages on threads of its own.

SGLang calls every public method from the scheduler's thread; none of them copies KV or waits for a
copy, but `finish_layer_wise_loading` (which SGLang calls after the forward that used the load),
`restore_pages` and the quiescing ones. Jobs run in the order they were queued. Completed saves are
reported in that order too, as SGLang pairs them with its own list.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sglang_ext.copier import LoadPages, PageCopier, PageRun
from sglang_ext.layout import ROPE_NAMES
from sglang_ext.load_counter import LoadCounter
from sglang_ext.tiers.quality import ANY, Qualities, Quality
from sglang_ext.tiers.record import RecordMeta, write_meta
from sglang_ext.tiers.store import KeySpace, LoadTicket, PageStore, SaveTicket
from sglang_ext.truncation.extents import Composition

logger = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint8]

MAX_QUEUED_SAVES = 1024
_QUIESCE_TIMEOUT_S = 30.0
# Batches of loads whose duration is remembered; at most three are in flight.
_LOADS_REMEMBERED = 8
# SGLang leaves 15 s at shutdown; the page store needs most of it for the disk.
_CLOSE_SAVES_S = 3.0


@dataclass(frozen=True)
class Place:
    """Where on a radix path the pages of a transfer lie; set by the wrapper before the call.

    Attributes:
        space: namespace and adapter.
        position: index of the first token.
        ancestors: hashes of the pages before, u8 `[M, 32]`.
        quality: of the pages of a save, u8 `[N]`; None when all are exact.
        max_quality: the worst that may be loaded.
        composition: how the pages of a load are made of stored ones; None: they are stored.
        aliased: pages of a save that can be made of stored ones and are not stored again, bool
            `[N]`; None for none.
        take: hands over pages of a load that are pinned and verified; None to look them up.
    """

    space: KeySpace
    position: int
    ancestors: Hashes
    quality: Qualities | None = None
    max_quality: int = ANY
    composition: Composition | None = None
    aliased: npt.NDArray[np.bool_] | None = None
    take: Callable[[Hashes], LoadTicket | None] | None = None


@dataclass(frozen=True)
class _SaveJob:
    place: Place
    hashes: Hashes
    token_slots: torch.Tensor
    ready_events: list[Any]
    epoch: int
    dropped: bool = False  # ends as not stored, in its turn


@dataclass(frozen=True)
class _LoadJob:
    ticket: LoadTicket
    token_slots: torch.Tensor
    position: int
    composition: Composition | None = None


def hashes_from_hex(keys: list[str]) -> Hashes:
    """SGLang's page hashes as u8 `[N, 32]`."""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)


class HierKVLinker(UnifiedCacheLinker):
    """Connects SGLang's device pool with the page store.

    Attributes:
        store: DRAM and disk.
        place: see `Place`.
        on_load: called by the load thread with the pages of a batch and the seconds it took.
        accepts_all: a save is never refused: what is too much ends as not stored, in its turn, so
            that the ranks of a group agree on what they queued.
    """

    on_load: Callable[[int, float], None] | None = None

    def __init__(
        self,
        store: PageStore,
        copier: PageCopier,
        *,
        num_layers: int,
        page_size: int,
        kv_pool: Any,
        device: torch.device,
        forward_stream: Any,
    ) -> None:
        self.store = store
        self.pools = {PoolName.KV: kv_pool}
        self.forward_stream = forward_stream
        self.layer_done_counter = LoadCounter(num_layers)
        self.place: Place | None = None
        self.accepts_all = False
        self.copier = copier
        self._num_layers = num_layers
        self._page_size = page_size
        self._streams = _Streams(device)
        self._pending_loads: dict[str, _LoadJob] = {}
        self._saves: queue.SimpleQueue[_SaveJob | Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[int, list[_LoadJob]] | None] = queue.SimpleQueue()
        self._load_s: dict[int, float] = {}  # by batch; replaced, never changed, by the load thread
        self._completed: deque[bool] = deque()
        self._num_saves = 0  # queued or running; guarded by _saves_done
        self._saves_done = threading.Condition()
        self._closed = False
        # Device resets so far. A save that one overtook read rows that may have changed hands.
        self._epoch = 0  # guarded by _saves_done
        self._save_deadline_s = math.inf
        self._save_thread = threading.Thread(
            target=self._run_saves, name="hier-kv-save", daemon=True
        )
        self._load_thread = threading.Thread(
            target=self._run_loads, name="hier-kv-load", daemon=True
        )
        self._save_thread.start()
        self._load_thread.start()

    # ---- look-up and load ----

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every restorable prefix length of the tail, in pages: those ready in DRAM."""
        if self.place is None:
            return []
        place, hashes = self.place, hashes_from_hex(transfers[0].keys)
        return list(range(1, self.store.ready_prefix(place.space, hashes, place.max_quality) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues a load; False when a page left DRAM since the match, or proves to be damaged.

        The request is recomputed then; of a damaged page nothing is kept.
        """
        place, transfer = self.place, transfers[0]
        if place is None or self._closed:
            return False
        hashes = hashes_from_hex(transfer.keys)
        if place.composition is not None:
            hashes = place.composition.hashes
        ticket = self._pin(place, hashes) if place.take is None else place.take(hashes)
        if ticket is None:
            self.store.counters.add("load_vanished")
            return False
        self.store.events.pages("admitted", hashes, rid=rid, position=place.position)
        self._pending_loads[rid] = _LoadJob(
            ticket, transfer.device_indices, place.position, place.composition
        )
        return True

    def _pin(self, place: Place, hashes: Hashes) -> LoadTicket | None:
        ticket = self.store.pin_ready(place.space, hashes, place.max_quality)
        if ticket is None:
            return None
        position = place.position if place.composition is None else None
        damaged = self.find_damaged(ticket.slots, position)
        if not len(damaged):
            return ticket
        self.store.drop_damaged(ticket, damaged)
        self.store.release(ticket.slots)
        return None

    def find_damaged(
        self, slots: npt.NDArray[np.int32], position: int | None
    ) -> npt.NDArray[np.int64]:
        """Pages in DRAM that cannot be loaded at a position, or at any (None); logged.

        Returns:
            Indices into `slots`.
        """
        if position is None:
            damaged = self.copier.damaged(slots.astype(np.int64))
        else:
            damaged = self.copier.unusable(slots.astype(np.int64), position)
        if len(damaged):
            logger.warning("hier-kv: %d pages in DRAM are damaged and dropped", len(damaged))
        return damaged

    def queued_quality(self, rid: str) -> Qualities:
        """Quality of the pages of a request's queued load, u8 `[N]`."""
        job = self._pending_loads[rid]
        if job.composition is None:
            return job.ticket.quality
        return job.composition.worst_of(job.ticket.quality, int(Quality.APPROXIMATED))

    def start_layer_wise_loading(self) -> int:
        """Starts all queued loads as one batch; returns its index, -1 when there are none."""
        if not self._pending_loads:
            return -1
        jobs = list(self._pending_loads.values())
        self._pending_loads.clear()
        index = self.layer_done_counter.update_producer()
        self._streams.fence_loads(self.forward_stream)
        self._loads.put((index, jobs))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until a batch stopped writing to the device; True when every layer landed."""
        landed, overlap_s = self.layer_done_counter.finish(counter_index)
        if counter_index >= 0:
            self.store.events.note(
                "load_batch", landed=landed, overlap_ms=round(1e3 * overlap_s, 3)
            )
        return landed

    def load_s(self, index: int) -> float:
        """Seconds that a finished batch of loads took; inf where that is not known (yet)."""
        return self._load_s.get(index, math.inf)

    def restore_pages(
        self,
        space: KeySpace,
        hashes: Hashes,
        token_slots: torch.Tensor,
        position: int,
        *,
        max_quality: int,
    ) -> bool:
        """Overwrites pages on the device with what DRAM has of them; waits for the copy.

        Args:
            space: namespace and adapter.
            hashes: u8 `[N, 32]`.
            token_slots: `[N * P]`, rows of the device pool.
            position: index of the first token.
            max_quality: the worst that may be put there.

        Returns:
            Whether all of them were ready in DRAM and copied. On an error some layers may hold
            the stored KV and others the recomputed one; each is KV of the same tokens.
        """
        ticket = self.store.pin_ready(space, hashes, max_quality)
        return ticket is not None and self.restore_pinned(ticket, hashes, token_slots, position)

    def restore_pinned(
        self, ticket: LoadTicket, hashes: Hashes, token_slots: torch.Tensor, position: int
    ) -> bool:
        """As `restore_pages`, with pages that are pinned already; gives the pins back."""
        try:
            rows = token_slots.to(torch.int64).cpu().numpy()
            self._streams.fence_loads(self.forward_stream)
            with self._streams.loading():
                pages = self.copier.prepare_load(ticket.slots.astype(np.int64), rows, position)
                for layer in range(self._num_layers):
                    self.copier.load_layer(pages, layer)
            self._streams.synchronize()
        except Exception:
            self.store.counters.add("load_failures")
            logger.exception("hier-kv: stored pages could not be put in place of recomputed ones")
            return False
        finally:
            self.store.release(ticket.slots)
        self.store.counters.add("restored_pages", len(hashes))
        self.store.events.pages("restored", hashes)
        return True

    def overwrite_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies rows of the device pool over others, between the forwards.

        Ordered behind the forward that is running, which may write the source and read the target,
        and before the next one and any save that is offered from now on.

        Args:
            target: i64 `[N]`, rows.
            source: `[N]`, rows, none of them in `target`.
        """
        with self._streams.in_forward_order(self.forward_stream, target, source):
            rows = source.to(torch.int64)
            for buffer in (*self.copier.pool.k, *self.copier.pool.v):
                buffer[target] = buffer[rows]

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancels a load that has not started."""
        job = self._pending_loads.pop(rid, None)
        if job is None:
            return False
        self.store.release(job.ticket.slots)
        return True

    # ---- save ----

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queues a node's pages for saving; False when they may not or cannot be saved now."""
        place, transfer = self.place, transfers[0]
        if place is None or self._closed:
            return False
        dropped = self._num_saves >= MAX_QUEUED_SAVES  # only this thread adds to it
        if dropped:
            self.store.counters.add("save_dropped_pages", len(transfer.keys))
            self.store.counters.add("save_queue_full")
            if not self.accepts_all:
                return False
        job = _SaveJob(
            place,
            hashes_from_hex(transfer.keys),
            transfer.device_indices,
            self._streams.save_events(self),
            self._epoch,
            dropped,
        )
        with self._saves_done:
            self._num_saves += 1
        self._saves.put(job)
        return True

    def after_saves(self, note: Callable[[], None]) -> None:
        """Calls something short on the save thread, behind the saves queued so far.

        It is left out when that many are queued that a save would be dropped.
        """
        if not self._closed and self._saves.qsize() < MAX_QUEUED_SAVES:
            self._saves.put(note)

    def num_completed_offloads(self) -> int:
        """Number of finished saves not yet taken."""
        return len(self._completed)

    def completed_offloads(self, most: int) -> list[bool]:
        """Results of the oldest finished saves, which stay to be taken."""
        return [self._completed[index] for index in range(min(most, len(self._completed)))]

    def pop_completed_offload(self) -> bool:
        """Takes the oldest finished save; True when all its pages are stored."""
        return self._completed.popleft()

    # ---- lifecycle ----

    def quiesce(self) -> bool:
        """Waits until every queued save is done; False when it takes unreasonably long."""
        with self._saves_done:
            return self._saves_done.wait_for(lambda: self._num_saves == 0, _QUIESCE_TIMEOUT_S)

    def reset(self) -> None:
        """The device tier was dropped; the tiers below stay."""
        for rid in list(self._pending_loads):
            self.cancel_queued_load(rid)
        if not self.quiesce():
            self.store.counters.add("reset_overtook_saves")
            logger.warning("hier-kv: the device cache is reset under a save; its pages are dropped")
        with self._saves_done:
            self._epoch += 1
            self._completed.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Ends the threads, writes what time allows to disk and closes the store."""
        if self._closed:
            return
        self._closed = True
        for rid in list(self._pending_loads):
            self.cancel_queued_load(rid)
        self._save_deadline_s = time.monotonic() + _CLOSE_SAVES_S
        self._saves.put(None)
        self._loads.put(None)
        self._save_thread.join()
        self._load_thread.join()
        self.copier.close()
        self.store.close()

    # ---- threads ----

    def _run_saves(self) -> None:
        while True:
            job = self._saves.get()
            if job is None:
                return
            if not isinstance(job, _SaveJob):
                self._call(job)
                continue
            stored = False
            try:
                if job.dropped:
                    pass
                elif time.monotonic() < self._save_deadline_s:
                    stored = self._save(job)
                else:
                    self.store.counters.add("shutdown_lost_pages", len(job.hashes))
            except Exception:
                self.store.counters.add("save_failures")
                logger.exception("hier-kv: a node could not be saved; it stays on the device")
            with self._saves_done:
                if job.epoch == self._epoch:
                    self._completed.append(stored)
                self._num_saves -= 1
                self._saves_done.notify_all()

    def _call(self, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:
            self.store.counters.add("save_failures")
            logger.exception("hier-kv: what should follow a save failed")

    def _save(self, job: _SaveJob) -> bool:
        place, hashes, quality = job.place, job.hashes, job.place.quality
        offered = np.arange(len(hashes))
        if place.aliased is not None:
            offered = np.flatnonzero(~place.aliased)
            hashes, quality = hashes[offered], None if quality is None else quality[offered]
            self.store.counters.add("aliased_pages", int(place.aliased.sum()))
        ticket = self.store.begin_save(place.space, hashes, place.ancestors, quality)
        if not len(ticket.rows):
            self.store.finish_save(ticket, ok=True)
            return ticket.dropped == 0
        ok = False
        try:
            with self._streams.saving(job.ready_events):
                self._copy_out(job, ticket, offered[ticket.pages])
            ok = job.epoch == self._epoch
        finally:
            self.store.finish_save(ticket, ok=ok)
        return ok and ticket.dropped == 0

    def _copy_out(self, job: _SaveJob, ticket: SaveTicket, pages: npt.NDArray[np.int64]) -> None:
        """Copies runs of neighbouring new `pages` of a job; usually there is one run."""
        size, place = self._page_size, job.place
        token_slots = job.token_slots.cpu().numpy()
        started_s, page = time.monotonic(), 0
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        for run in np.split(np.arange(len(pages)), breaks):
            first = int(pages[run[0]])
            tokens = token_slots[first * size : (first + len(run)) * size]
            position = place.position + first * size
            slots = ticket.slots[run].astype(np.int64)
            saved = self.copier.save(tokens, position, slots)
            for offset, (slot, page_info) in enumerate(zip(slots.tolist(), saved, strict=True)):
                page = first + offset
                meta = RecordMeta(
                    page_hash=job.hashes[page].tobytes(),
                    namespace=place.space.digest,
                    lora=place.space.lora,
                    position=place.position + page * size,
                    num_tokens=size,
                    rope=ROPE_NAMES[page_info.rope_state],
                    quality=0 if place.quality is None else int(place.quality[page]),
                )
                write_meta(self.store.arena.slots[slot], meta, page_info.payload_bytes)
                self.store.counters.add("corrections", page_info.num_corrections)
                self.store.counters.add(f"saved_{meta.rope}_pages")
        self.store.counters.add("save_us", int(1e6 * (time.monotonic() - started_s)))

    def _run_loads(self) -> None:
        while True:
            batch = self._loads.get()
            if batch is None:
                return
            index, jobs = batch
            try:
                with self._streams.loading():
                    self._load(index, jobs)
            except BaseException as error:
                self.store.counters.add("load_failures")
                logger.exception("hier-kv: a load failed; its requests are aborted")
                try:
                    # What was queued still writes to rows that are given back once this is known.
                    self._streams.synchronize()
                except Exception:
                    logger.exception("hier-kv: the device failed")
                self.layer_done_counter.fail(index, error)  # without it the scheduler waits on
            finally:
                for job in jobs:
                    self.store.release(job.ticket.slots)

    def _load(self, index: int, jobs: list[_LoadJob]) -> None:
        started_s = time.monotonic()
        prepared = [pages for job in jobs for pages in self._prepare(job)]
        for layer in range(self._num_layers):
            for pages in prepared:
                self.copier.load_layer(pages, layer)
            self.layer_done_counter.complete(index, self._streams.record())
        self._streams.synchronize()
        seconds = time.monotonic() - started_s
        self.store.counters.add("load_us", int(1e6 * seconds))
        recent = list(self._load_s.items())[1 - _LOADS_REMEMBERED :]
        self._load_s = {**dict(recent), index: seconds}
        if self.on_load is not None:
            self.on_load(sum(len(job.ticket.slots) for job in jobs), seconds)

    def _prepare(self, job: _LoadJob) -> list[LoadPages]:
        slots, rows = job.ticket.slots.astype(np.int64), job.token_slots.cpu().numpy()
        if job.composition is None:
            return [self.copier.prepare_load(slots, rows, job.position)]
        runs = [
            PageRun(slots[run.pages], run.first_row, run.num_tokens) for run in job.composition.runs
        ]
        return self.copier.prepare_runs(runs, rows, job.position)


class _Streams:
    """CUDA streams and events of the copies; nothing on a CPU, where forwards are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._save: Any = _new_stream(device) if self._cuda else None
        self._load: Any = _new_stream(device) if self._cuda else None

    def save_events(self, linker: UnifiedCacheLinker) -> list[Any]:
        """Events after which the pages of a node are complete on the device."""
        return linker.record_offload_ready() if self._cuda else []

    def fence_loads(self, forward_stream: Any) -> None:
        """Orders the next loads after the forward in flight, which may still write freed rows."""
        if self._load is not None:
            self._load.wait_stream(torch.cuda.current_stream())
            if forward_stream is not None:
                self._load.wait_stream(forward_stream)

    def in_forward_order(self, forward_stream: Any, *inputs: torch.Tensor) -> Any:
        """Context whose work runs where the forwards do, behind the current stream's so far."""
        if not self._cuda:
            return _NULL
        stream = forward_stream or torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            tensor.record_stream(stream)
        return torch.cuda.stream(stream)

    def saving(self, events: list[Any]) -> Any:
        """Context in which a save's copies run."""
        if self._save is None:
            return _NULL
        for event in events:
            event.synchronize()
        return torch.cuda.stream(self._save)

    def loading(self) -> Any:
        """Context in which a batch's copies run."""
        return _NULL if self._load is None else torch.cuda.stream(self._load)

    def record(self) -> Any:
        """An event behind the copies queued so far; None on a CPU."""
        if self._load is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._load)
        return event

    def synchronize(self) -> None:
        """Waits until the load stream is empty, so that slots may be given back."""
        if self._load is not None:
            self._load.synchronize()


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Null:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NULL = _Null()
