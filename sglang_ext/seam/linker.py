"""The transport behind SGLang's radix tree: saves and loads pages on threads of its own.

SGLang calls every public method from the scheduler's thread; none of them waits for the device but
`wait_for_forward`, which a hook of decode servers calls. On a CPU, which does the work itself,
`finish_layer_wise_loading` (which SGLang calls after the forward that used the load) waits for the
last copy, and `restore_pages` copies. The quiescing ones wait for the save thread, 30 s at most: a
flush or new weights must find no save under way, and where SGLang lacks the room of a state, one
that is being saved has to make it.

Jobs run in the order they were queued. Completed saves are reported in that order too, as SGLang
pairs them with its own list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.load_pages import LoadPages
from sglang_ext.device.load_path import LoadParts, LoadPath
from sglang_ext.device.load_thread import LoadThread
from sglang_ext.device.ports import DevicePort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.save_path import SaveParts, SavePath
from sglang_ext.device.save_thread import SaveThread
from sglang_ext.device.states.snapshots import Snapshots
from sglang_ext.device.states.state_path import StateLoadPath, StateSavePath
from sglang_ext.device.transfers import (
    Hashes,
    LoadJob,
    Place,
    StateSlot,
    WindowRows,
    hashes_from_hex,
)
from sglang_ext.device.windows.window_layers import WindowLayers
from sglang_ext.tiers.records.quality import Qualities, Quality
from sglang_ext.tiers.store import KeySpace, LoadTicket, PageStore

logger = logging.getLogger(__name__)

_QUIESCE_TIMEOUT_S = 30.0
# On a GPU, bytes of the ring buffer for loads; saves get half of this. At 128 KB of K and V a token
# and layer group it holds some layers of some hundred pages, so that the link is never idle.
RING_BYTES = 128 << 20


class HierKVLinker(UnifiedCacheLinker):
    """Connects SGLang's device pool with the page store.

    It has many methods because SGLang calls that many of a linker's.

    Attributes:
        store: DRAM and disk.
        loads: the thread that copies to the device.
        windows: the window layers of a hybrid model; None of a model without.
        snapshots: the states of a hybrid model; None of a model without.
        state_layers: by which numbers the forward waits for the layers of pages and of states.
        accepts_all: a save is never refused: what is too much ends as not stored, in its turn, so
            that the ranks of a group agree on what they queued.
    """

    def __init__(
        self,
        store: PageStore,
        copier: PageCopier,
        *,
        num_layers: int,
        page_size: int,
        kv_pool: Any,
        port: DevicePort,
        forward_stream: Any,
        ring_bytes: int = RING_BYTES,
        windows: WindowLayers | None = None,
        accepts_all: bool = False,
        on_load: Callable[[int, float], None] | None = None,
        snapshots: Snapshots | None = None,
        state_layers: Sequence[Sequence[int]] = (),
    ) -> None:
        self.store = store
        self.pools = {PoolName.KV: kv_pool}
        self.windows = windows
        self.snapshots = snapshots
        copiers, model_layers = [copier], [tuple(range(num_layers))]
        if windows is not None:
            self.pools[PoolName.SWA] = kv_pool
            copiers += windows.copiers
            model_layers = windows.model_layers
        self.layer_done_counter = LoadCounter(num_layers)
        self._place: Place | None = None
        self.accepts_all = accepts_all
        self.copier = copier
        self._port = port
        self._copiers = copiers
        num_bytes = ring_bytes // len(copiers)
        self._streams = streams = Streams(port, forward_stream)
        loads: list[Any] = [LoadPath(port, each, streams, num_bytes) for each in copiers]
        saves: list[Any] = [SavePath(port, each, streams, num_bytes // 2) for each in copiers]
        if snapshots is not None:
            self.pools[PoolName.MAMBA] = kv_pool
            ways = (port, snapshots, store.arena.slots, streams)
            loads.append(StateLoadPath(*ways))
            saves.append(StateSavePath(*ways))
            model_layers = list(map(tuple, state_layers))
        self._load_path = LoadParts(loads, model_layers)
        self._save_path = SaveParts(saves)
        self._pending_loads: dict[str, LoadJob] = {}
        self._restoring: Any = None  # an event behind all pages that were put in place of others
        self._closed = False
        self._saves = SaveThread(store, self._save_path, page_size)
        self.loads = LoadThread(
            store,
            copiers,
            self._load_path,
            port,
            self.layer_done_counter,
            on_load,
            has_states=snapshots is not None,
        )

    def take_streams(self, avoid: Sequence[Any]) -> None:
        """Takes the device's streams that loads and saves run on; before the first of them.

        Args:
            avoid: SGLang's, or None, which must be none of these, beside the one for forwards.

        Raises:
            RuntimeError: the device has not so many.
        """
        self._streams.take(*avoid)

    @property
    def device_rows(self) -> list[torch.Tensor]:
        """The rows of which pages and states are made, of all layers: windows and drafts, too."""
        pages = [rows for each in self._copiers for rows in (*each.pool.k, *each.pool.v)]
        states = () if self.snapshots is None else self.snapshots.pool.tensors
        return [*pages, *(layer for tensor in states for layer in tensor)]

    @property
    def copiers(self) -> Sequence[PageCopier]:
        """Of the full layers, then of each group of window layers."""
        return self._copiers

    @property
    def movable(self) -> bool:
        """Whether K of every layer can be loaded at another position than it was saved at."""
        return all(copier.movable for copier in self._copiers)

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has window layers in a pool of their own, or states."""
        return self.windows is not None or self.snapshots is not None

    @contextmanager
    def placed(self, place: Place) -> Iterator[None]:
        """Sets where the pages of SGLang's look-ups, loads and saves inside the context belong.

        SGLang's calls name only pages and rows. Outside of it nothing is found, loaded or saved.
        """
        self._place = place
        try:
            yield
        finally:
            self._place = None

    # ---- look-up and load ----

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every restorable prefix length of the tail, in pages: those ready in DRAM."""
        if self._place is None:
            return []
        place, hashes = self._place, hashes_from_hex(transfers[0].keys)
        return list(range(1, self.store.ready_prefix(place.space, hashes, place.max_quality) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues a load; False when a page left DRAM since the match, or proves to be damaged.

        The request is recomputed then; of a damaged page nothing is kept.
        """
        place, transfer = self._place, transfers[0]
        if place is None or self._closed:
            return False
        hashes = hashes_from_hex(transfer.keys)
        if place.composition is not None:
            hashes = place.composition.hashes
        windows = None
        if self.windows is not None:
            windows, wanted = self._window_rows(transfers[1], place, hashes)
            hashes = np.concatenate([hashes, wanted])
        state = None
        if self.snapshots is not None:
            state = self._state_slot(transfers[1])
            hashes = np.concatenate([hashes, self.snapshots.entries(hashes[-1])])
        if place.take is None:
            ticket = self._pin(place, hashes, windows)
        else:
            ticket = place.take(hashes)
        pages = None if ticket is None else self.store.gate.load(ticket, place.space)
        if pages is None:
            self.store.counters.add("load_vanished")
            return False
        self.store.events.pages("admitted", hashes, rid=rid, position=place.position)
        self._pending_loads[rid] = LoadJob(
            pages, transfer.device_indices, place.position, place.composition, windows, state
        )
        return True

    def _state_slot(self, transfer: Any) -> StateSlot:
        """The slot that SGLang took for a request's state."""
        assert self.snapshots is not None
        assert transfer.name == PoolName.MAMBA
        return StateSlot(self.snapshots.num_parts, transfer.device_indices)

    def _window_rows(
        self, transfer: Any, place: Place, hashes: Hashes
    ) -> tuple[WindowRows, Hashes]:
        """Rows that SGLang took for the window layers, of the last pages of a load; their keys."""
        assert self.windows is not None
        made = None if place.composition is None else self.windows.window_in(place.composition)
        if made is not None:
            first, stored = made.start, made.hashes
        else:
            window = self.windows.window_of(len(hashes))
            first = place.position + window.start * self.windows.page_size
            stored = hashes[window]
        rows = WindowRows(len(stored), transfer.device_indices, first, made)
        return rows, self.windows.entries(stored)

    def _pin(self, place: Place, hashes: Hashes, windows: WindowRows | None) -> LoadTicket | None:
        ticket = self.store.pin_ready(place.space, hashes, place.max_quality)
        if ticket is None:
            return None
        position = place.position if place.composition is None else None
        if self.snapshots is not None:
            damaged = self._damaged_with_state(ticket, place.position, self.snapshots.num_parts)
        elif windows is None:
            damaged = self.find_damaged(ticket.slots, position)
        else:
            damaged = self._damaged_parts(ticket, position, windows)
        if not len(damaged):
            return ticket
        self.store.drop_damaged(ticket, damaged)
        self.store.end_load(ticket)
        return None

    def find_damaged(
        self, slots: npt.NDArray[np.int32], position: int | None, part: int = 0
    ) -> npt.NDArray[np.int64]:
        """Pages in DRAM that cannot be loaded at a position, or at any (None); logged.

        Args:
            slots: i32 `[n]`, of pages of one part.
            position: of the first one's first token.
            part: 0 for the full layers, 1 and on for groups of window layers.

        Returns:
            Indices into `slots`.
        """
        copier = self._copiers[part]
        if position is None:
            damaged = copier.damaged(slots.astype(np.int64))
        else:
            damaged = copier.unusable(slots.astype(np.int64), position)
        if len(damaged):
            logger.warning("hier-kv: %d pages in DRAM are damaged and dropped", len(damaged))
        return damaged

    def _damaged_parts(
        self, ticket: LoadTicket, position: int | None, windows: WindowRows
    ) -> npt.NDArray[np.int64]:
        """As `find_damaged`, of the full layers' pages and of each group of window layers."""
        num_groups = len(self._copiers) - 1
        num_full = len(ticket.slots) - num_groups * windows.num_pages
        found = [self.find_damaged(ticket.slots[:num_full], position)]
        of_window = None if position is None else windows.position
        for group in range(num_groups):
            first = num_full + group * windows.num_pages
            slots = ticket.slots[first : first + windows.num_pages]
            found.append(first + self.find_damaged(slots, of_window, part=group + 1))
        return np.concatenate(found)

    def _damaged_with_state(
        self, ticket: LoadTicket, position: int, num_parts: int
    ) -> npt.NDArray[np.int64]:
        """As `find_damaged`, of pages and the parts of the state behind the last of them."""
        num_pages = len(ticket.slots) - num_parts
        last = position + (num_pages - 1) * self.copier.page_size
        found = [self.find_damaged(ticket.slots[:num_pages], position)]
        found += [
            at + self.find_damaged(ticket.slots[at : at + 1], last)
            for at in range(num_pages, len(ticket.slots))
        ]
        return np.concatenate(found)

    def queued_quality(self, rid: str) -> Qualities:
        """Quality of the pages of a request's queued load, u8 `[N]`."""
        job, num_groups = self._pending_loads[rid], len(self._copiers) - 1
        stored = job.ticket.quality[: len(job.slots_of(0, num_groups))]
        made = job.composition
        quality = stored if made is None else made.worst_of(stored, int(Quality.APPROXIMATED))
        windows = job.windows
        if windows is None:
            return quality
        of_groups = job.ticket.quality[len(stored) :].reshape(num_groups, windows.num_pages)
        of_window, made = of_groups.max(axis=0), windows.composition
        if made is not None:
            of_window = made.worst_of(of_window)
        quality = quality.copy()
        last = quality[len(quality) - len(of_window) :]
        np.maximum(last, of_window, out=last)
        return quality

    def start_layer_wise_loading(self) -> int:
        """Starts all queued loads as one batch; returns its index, -1 when there are none."""
        if not self._pending_loads:
            return -1
        jobs = list(self._pending_loads.values())
        self._pending_loads.clear()
        index = self.layer_done_counter.update_producer()
        if all(self.store.gate.is_live(job.pages) for job in jobs):
            self.loads.start(index, jobs, self._load_path.fence())
        else:
            self._refuse(index, jobs)
        return index

    def _refuse(self, index: int, jobs: list[LoadJob]) -> None:
        """Fails a batch of which a load was overtaken by a change of weights or adapters."""
        logger.warning("hier-kv: loads were queued before the weights changed; they are given up")
        for job in jobs:
            self.store.end_load(job.ticket)
        self.layer_done_counter.fail(index, RuntimeError("the weights changed before the load"))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Ends a batch; True if it landed. Work launched from now on runs after its last write.

        On a CPU it waits until the batch is copied. On a device with streams it is queued and can
        no longer fail, and the forwards to come are ordered behind its last write.
        """
        landed, overlap_s, last = self.layer_done_counter.finish(counter_index)
        if last is not None:
            self._load_path.before_forwards(last)
        if counter_index >= 0:
            self.store.events.note(
                "load_batch", landed=landed, overlap_ms=round(1e3 * overlap_s, 3)
            )
        return landed

    def restore_pages(
        self,
        ticket: LoadTicket,
        space: KeySpace,
        hashes: Hashes,
        token_slots: torch.Tensor,
        position: int,
        window_slots: torch.Tensor | None = None,
    ) -> bool:
        """Overwrites pages on the device with what DRAM has of them.

        The copy is ordered behind the forward in flight and before what is launched from now on; on
        a CPU it is done.

        Args:
            ticket: the pages, pinned; the pins are given back.
            space: namespace and adapter.
            hashes: u8 `[N, 32]`.
            token_slots: `[N * P]`, rows of the device pool.
            position: index of the first token.
            window_slots: `[N * P]`, rows of the window layers' pool, whose pages follow in the
                ticket, group by group; None of a model without.

        Returns:
            Whether they were copied. They are not where DRAM could not be page-locked, as the
            scheduler's thread would have to wait for each copy: what was computed stays. On an
            error some layers may hold the stored KV and others the recomputed one; each is KV of
            the same tokens.
        """
        if self._port.copies_wait:
            self.store.end_load(ticket)
            self.store.counters.add("unrestored_pages", len(hashes))
            return False
        if self.store.gate.load(ticket, space) is None:
            return False
        parts = np.split(ticket.slots.astype(np.int64), len(self._copiers))
        rows = [token_slots]
        if window_slots is not None:
            rows += [window_slots] * (len(self._copiers) - 1)

        def prepare(part: int, rows: Any) -> list[LoadPages]:
            return [self._copiers[part].prepare_load(parts[part], rows, position)]

        try:
            loads = [[(rows[part], partial(prepare, part))] for part in range(len(parts))]
            if self.snapshots is not None:
                loads.append([])
            landing = self._load_path.queue(
                loads,
                self._load_path.fence(),
                lambda event: None,
            )
        except Exception:
            self.store.counters.add("load_failures")
            logger.exception("hier-kv: stored pages could not be put in place of recomputed ones")
            self._end_restore(ticket, rows, self._load_path.behind_queued())
            return False
        self._end_restore(ticket, rows, landing.last)
        self.store.counters.add("restored_pages", len(hashes))
        self.store.events.pages("restored", hashes)
        return True

    def _end_restore(self, ticket: LoadTicket, rows: list[torch.Tensor], last: Any) -> None:
        """Lets what follows wait for an event; only then pins and `rows` are given up."""
        if last is None:
            self.store.end_load(ticket)
            return
        self._restoring = last
        self._load_path.before_forwards(last)
        self._port.when_done(last, partial(self._release, ticket, rows))

    def restoring(self) -> Any:
        """An event behind all that `restore_pages` queued; None where it has happened.

        For whoever reads rows past the device's streams, as a transfer to another server does.
        """
        if self._restoring is not None and self._port.is_done(self._restoring):
            self._restoring = None
        return self._restoring

    def _release(self, ticket: LoadTicket, rows: list[torch.Tensor]) -> None:
        """The device is done with pages and rows; the caller kept `rows` alive until now."""
        self.store.end_load(ticket)

    def in_forward_order(self) -> AbstractContextManager[None]:
        """Context whose work runs where the forwards do, behind the current stream's so far."""
        return self._load_path.in_forward_order()

    def wait_for_forward(self) -> None:
        """See `Streams.wait_for_forward`."""
        self._streams.wait_for_forward()

    def overwrite_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies rows of the device pool over others, between the forwards.

        Ordered behind the forward that is running, which may write the source and read the target,
        and before the next one and any save that is offered from now on.

        Args:
            target: i64 `[N]`, rows.
            source: `[N]`, rows, none of them in `target`.
        """
        with self._load_path.in_forward_order(target, source):
            rows = source.to(torch.int64)
            for buffer in (*self.copier.pool.k, *self.copier.pool.v):
                buffer[target] = buffer[rows]

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancels a load that has not started."""
        job = self._pending_loads.pop(rid, None)
        if job is None:
            return False
        self.store.end_load(job.ticket)
        return True

    # ---- save ----

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queues a node's pages for saving; False when they may not or cannot be saved now."""
        place, transfer = self._place, transfers[0]
        if place is None or self._closed:
            return False
        return self._saves.offer(
            place,
            hashes_from_hex(transfer.keys),
            transfer.device_indices,
            self._save_path.ready_events,
            accepts_all=self.accepts_all,
        )

    def offload_windows(self, place: Place, hashes: Hashes, token_slots: torch.Tensor) -> bool:
        """Queues the window layers of some pages for saving; False when it is refused.

        Args:
            place: where the pages lie; their full layers' parts are the last of `ancestors`.
            hashes: u8 `[N, 32]`, the pages' own.
            token_slots: i64 `[N * P]`, rows of the window layers' pool.
        """
        if self._closed or self.windows is None:
            return False
        num_groups, quality, aliased = self.windows.num_groups, place.quality, place.aliased
        place = replace(
            place,
            quality=None if quality is None else np.tile(quality, num_groups),
            aliased=None if aliased is None else np.tile(aliased, num_groups),
        )
        return self._saves.offer(
            place,
            self.windows.entries(hashes),
            token_slots,
            self._save_path.ready_events,
            accepts_all=self.accepts_all,
            is_of_windows=True,
        )

    def offload_state(self, place: Place, page_hash: Hashes, slot: torch.Tensor) -> bool:
        """Queues a state for saving; False when it is refused.

        Args:
            place: of the page that the state is behind, which is the last of `ancestors`.
            page_hash: u8 `[1, 32]`, that page's own.
            slot: `[1]`, in the pool of states.
        """
        if self._closed or self.snapshots is None:
            return False
        return self._saves.offer(
            place,
            self.snapshots.entries(page_hash),
            slot,
            self._save_path.ready_events,
            accepts_all=self.accepts_all,
            is_of_state=True,
        )

    def after_saves(self, note: Callable[[], None]) -> None:
        """Calls something short on the save thread; see `SaveThread.after_saves`."""
        if not self._closed:
            self._saves.after_saves(note)

    def numbers_of_saves(self) -> tuple[int, int]:
        """See `SaveThread.numbers`."""
        return self._saves.numbers()

    def num_completed_offloads(self) -> int:
        """Number of finished saves not yet taken."""
        return self._saves.num_completed

    def completed_offloads(self, most: int) -> list[bool]:
        """Results of the oldest finished saves, which stay to be taken."""
        return self._saves.completed(most)

    def pop_completed_offload(self) -> bool:
        """Takes the oldest finished save; True when all its pages are stored."""
        return self._saves.pop_completed()

    # ---- lifecycle ----

    def quiesce(self) -> bool:
        """Waits until every queued save is done; False when it takes unreasonably long."""
        return self._saves.wait_idle(_QUIESCE_TIMEOUT_S)

    def reset(self) -> None:
        """The device tier was dropped; the tiers below stay."""
        for rid in list(self._pending_loads):
            self.cancel_queued_load(rid)
        if not self.quiesce():
            self.store.counters.add("reset_overtook_saves")
            logger.warning("hier-kv: the device cache is reset under a save; its pages are dropped")
        self._saves.device_was_reset()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Ends the threads, writes what time allows to disk and closes the store."""
        if self._closed:
            return
        self._closed = True
        for rid in list(self._pending_loads):
            self.cancel_queued_load(rid)
        self._saves.close()
        self.loads.close()
        self._port.close()
        for copier in self._copiers:
            copier.close()
        self.store.close()
