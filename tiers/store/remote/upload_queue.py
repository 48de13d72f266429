"""Uploads: pages of DRAM that a remote store is to have, one thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.records.record import RAW_CODEC
from sglang_ext.tiers.remote.base import Outcome, RemoteKey
from sglang_ext.tiers.remote.items import PutItem
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.loads import Loads
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.remote.coded_remote import CodedRemote
from sglang_ext.tiers.store.remote.put_share import PutShare
from sglang_ext.tiers.store.remote.tenant_puts import TenantPuts, num_dropped
from sglang_ext.tiers.store.types import Hashes, KeySpace

logger = logging.getLogger(__name__)

_UPLOAD_QUEUE = 1024  # runs of pages; more are not uploaded, and counted
_MOST_BEFORE_OVER = _UPLOAD_QUEUE // 2  # the rest is for uploads alone
_UPLOAD_PAGES = 32  # pinned at once
_UPLOADED_PAGES = 65536  # remembered as uploaded


class _Upload(NamedTuple):
    space: KeySpace
    hashes: Hashes
    is_new: bool  # saved just now, so perhaps better than what was uploaded under the same key
    is_over: bool = False  # nothing is uploaded: what is there is the first to go


class RemoteUploads:
    """The queue of pages to upload, and the thread that does it. Thread-safe.

    Args:
        table: the store's pages.
        loads: pins them.
        remote: the shared store.
        policy: `all`, `second_hit` or `on_eviction`.
        coded: stores pages coded; None stores them as they are.
        share: which pages are put at all; the others are left to who has them in its share.
    """

    def __init__(
        self,
        table: PageTable,
        loads: Loads,
        remote: RemoteStore,
        policy: str,
        coded: CodedRemote | None,
        share: PutShare,
    ) -> None:
        self._table, self._loads, self._share = table, loads, share
        self._remote, self._policy, self._coded = remote, policy, coded
        self._levels = [RAW_CODEC] if coded is None else [RAW_CODEC, coded.level]
        self._puts = TenantPuts(table, remote)
        self._queue: queue.Queue[_Upload | None] = queue.Queue(_UPLOAD_QUEUE)
        # Keys uploaded lately, by namespace number and page hash; the upload thread's own.
        self._uploaded: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hier-kv-remote-upload", daemon=True)
        self._thread.start()

    def saved(self, space: KeySpace, hashes: Hashes) -> None:
        """Pages were published in DRAM. Does not block."""
        if self._policy == "all":
            self._offer(_Upload(space, hashes.copy(), is_new=True))

    def loaded(self, space: KeySpace, hashes: Hashes) -> None:
        """Pages were used by a request. Does not block."""
        if self._policy == "second_hit":
            self._offer(_Upload(space, hashes.copy(), is_new=False))

    def over(self, space: KeySpace, hashes: Hashes) -> None:
        """Nobody is to want some pages again; what was uploaded goes first. Does not block.

        Behind the uploads that wait. With too many of these it is left out: what is there stays
        for as long as other pages do, and no page that was saved loses its place by it.
        """
        if not self._remote.takes_ends or self._closing.is_set():
            return
        if self._queue.qsize() < _MOST_BEFORE_OVER:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(_Upload(space, hashes, is_new=False, is_over=True))

    def send(self, space: KeySpace, hashes: Hashes) -> None:
        """Uploads those of some pages that are in DRAM. Blocks; `on_eviction`'s thread calls it."""
        mine = self._mine(space, hashes)
        if len(mine):
            self._upload(space, mine)

    @property
    def num_open(self) -> int:
        """Runs of pages that wait for the thread, or are in its hands."""
        return self._queue.unfinished_tasks

    def stop(self) -> None:
        """Has the thread end after the batch in its hands. Does not block."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # the thread sees that it is closing
            self._queue.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        self._thread.join(timeout=timeout_s)

    def _mine(self, space: KeySpace, hashes: Hashes) -> Hashes:
        """Those pages that are this process's to put; asks the store's client about each."""
        if self._share.is_all:
            return hashes
        # Whose share a damaged value is in may not know of it, and would see it as being there.
        is_mine = self._share.has(hashes)
        if self._remote.has_rejected:
            is_mine |= self._are_rejected(space, hashes)
        mine = hashes[is_mine]
        self._table.counters.add("remote_left_pages", len(hashes) - len(mine))
        return mine

    def _are_rejected(self, space: KeySpace, hashes: Hashes) -> npt.NDArray[np.bool_]:
        keys = self._keys(space, hashes)
        rejected = np.array(self._remote.rejected(keys), np.bool_).reshape(-1, len(self._levels))
        by_page: npt.NDArray[np.bool_] = np.logical_or.reduce(rejected, axis=1)
        return by_page

    def _keys(self, space: KeySpace, hashes: Hashes) -> list[RemoteKey]:
        """All names that each page may have in the store, page after page."""
        return [
            RemoteKey(space.digest, row.tobytes(), space.lora, level)
            for row in hashes
            for level in self._levels
        ]

    def _offer(self, upload: _Upload) -> None:
        if not len(upload.hashes) or self._closing.is_set():
            return
        try:
            self._queue.put_nowait(upload)
        except queue.Full:
            self._table.counters.add("remote_upload_dropped_pages", len(upload.hashes))

    def _run(self) -> None:
        while not self._closing.is_set():
            upload = self._queue.get()
            if upload is None:
                return
            try:
                self._serve(upload)
            except Exception:
                self._table.counters.add("remote_failures")
                logger.exception("hier-kv: pages could not be uploaded")
            finally:
                self._queue.task_done()

    def _serve(self, upload: _Upload) -> None:
        hashes = upload.hashes
        if not upload.is_over:
            hashes = self._mine(upload.space, hashes)
            if not upload.is_new:
                hashes = self._unknown(upload.space, hashes)
        step = self._let_go if upload.is_over else self._upload
        for first in range(0, len(hashes), _UPLOAD_PAGES):
            if not self._closing.is_set():
                step(upload.space, hashes[first : first + _UPLOAD_PAGES])

    def _still_over(self, space: KeySpace, hashes: Hashes) -> Hashes:
        """Those of this process's share that nobody used since, as far as is known here."""
        hashes = hashes[self._share.has(hashes)]
        with self._table.lock:
            rows = self._table.index.lookup(hashes, space.number)
            over = rows < 0
            over[~over] = self._table.order.are_over(rows[~over])
        return hashes[over]

    def _let_go(self, space: KeySpace, hashes: Hashes) -> None:
        if not self._remote.usable:
            return
        hashes = self._still_over(space, hashes)
        if self._remote.let_go(self._keys(space, hashes), self._table.arena.slot_bytes):
            self._table.counters.add("remote_let_go_pages", len(hashes))

    def _unknown(self, space: KeySpace, hashes: Hashes) -> Hashes:
        """Pages that were not uploaded lately: the store is not asked again at each use."""
        new = [(space.number, row.tobytes()) not in self._uploaded for row in hashes]
        return hashes[np.array(new, np.bool_)]

    def _upload(self, space: KeySpace, hashes: Hashes) -> None:
        if not self._remote.usable:
            self._table.counters.add("remote_upload_dropped_pages", len(hashes))
            return
        if self._coded is None:
            hashes, outcomes = self._upload_raw(space, hashes)
        else:
            hashes, outcomes = self._coded.upload(space, hashes)
        for row, outcome in zip(hashes, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.KEPT):
                self._uploaded[space.number, row.tobytes()] = None
        while len(self._uploaded) > _UPLOADED_PAGES:
            self._uploaded.popitem(last=False)
        self._table.counters.add("remote_written_pages", outcomes.count(Outcome.OK))
        self._table.counters.add("remote_duplicate_pages", outcomes.count(Outcome.KEPT))
        self._table.counters.add("remote_upload_dropped_pages", num_dropped(outcomes))

    def _upload_raw(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, list[Outcome]]:
        hashes, slots = self._loads.pin_present(space, hashes)
        try:
            arena = self._table.arena.slots
            items = [
                PutItem(remote_key(space, row.tobytes()), arena[slot])
                for row, slot in zip(hashes, slots.tolist(), strict=True)
            ]
            return hashes, self._puts.put(space, items)
        finally:
            self._loads.release(slots)


def remote_key(space: KeySpace, page_hash: bytes) -> RemoteKey:
    """The name of a page that is stored as it is."""
    return RemoteKey(space.digest, page_hash, space.lora, RAW_CODEC)
