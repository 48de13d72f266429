"""Sends pages to a remote store when they are about to leave DRAM (policy `on_eviction`).

One thread keeps the least recent pages of DRAM sent: as many as the low-water mark, so that room is
made of pages that the store has. A page that leaves all the same is read back from disk and sent;
one that is nowhere then is dropped and counted. Evicting never waits for any of this.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import Location, ReadRequest, Tier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.record import RAW_CODEC, VerifyResult
from sglang_ext.tiers.remote.base import Outcome, RemoteKey
from sglang_ext.tiers.remote.items import PutItem
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.disk_coding import PageDecoder
from sglang_ext.tiers.store.remote.put_share import EVERY_PAGE, PutShare
from sglang_ext.tiers.store.remote.tenant_puts import TenantPuts, num_dropped
from sglang_ext.tiers.store.types import Hashes, KeySpace
from sglang_ext.tiers.transcoder import PageTranscoder

failures = FailureLog(logging.getLogger(__name__))

LOW_WATER_SHARE = 0.125
"""Share of DRAM that is kept free, or sent."""

_QUEUED = 256  # evictions; the pages of more are not sent
_BATCH_PAGES = 32
_DISK_BATCH_PAGES = 8
_POLL_S = 0.02
_LONGEST_PAUSE_S = 1.0  # of a thread that meets one error after another


class _Evicted(NamedTuple):
    number: int  # of the key space
    hashes: Hashes


class LeavingPages:
    """The thread that sends pages on their way out. Thread-safe.

    Args:
        books: the store's own books.
        remote: the shared store.
        send: uploads those of some pages that are in DRAM; called by the thread.
        disk: where a page may lie that has left DRAM; None without a disk tier.
        transcoder: decodes what lies there coded.
        space_of: finds a key space by its number; None where nothing is stored of it.
        rules: what a page must be; None takes any record.
        share: pages that are not in it are left to others.
    """

    def __init__(
        self,
        books: Books,
        remote: RemoteStore,
        send: Callable[[KeySpace, Hashes], None],
        disk: Tier | None,
        transcoder: PageTranscoder | None,
        space_of: Callable[[int], KeySpace | None],
        rules: PageRules | None = None,
        share: PutShare = EVERY_PAGE,
    ) -> None:
        self._table, self._lookups, self._book = books.table, books.lookups, books.remote
        self._remote = remote
        self._puts = TenantPuts(books.table, remote)
        self._send = send
        self._share = share
        self._disk = disk
        self._space_of = space_of
        num_slots = self._table.arena.num_slots
        self._low_water_pages = max(1, int(num_slots * LOW_WATER_SHARE))
        # Pages that are being sent are pinned: in a large batch they would make others leave.
        self._batch_pages = max(1, min(_BATCH_PAGES, self._low_water_pages // 4))
        slot_bytes = self._table.arena.slot_bytes
        self._decoder = PageDecoder(transcoder, slot_bytes, rules=rules)
        # Committed when pages are first read back.
        room = aligned_array(_DISK_BATCH_PAGES * slot_bytes if disk is not None else 0)
        self._room = room.reshape(-1, slot_bytes)
        self._evicted: queue.Queue[_Evicted] = queue.Queue(_QUEUED)
        self._closing = threading.Event()
        books.room.on_unsent = self._note_evicted
        self._thread = threading.Thread(target=self._run, name="hier-kv-remote-leave", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Has the thread end after the batch in its hands; what was not sent then stays unsent."""
        self._closing.set()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, as far as the time allows."""
        self.stop()
        self._thread.join(timeout_s)

    def _note_evicted(
        self, hashes: Hashes, numbers: npt.NDArray[np.uint32], on_disk: npt.NDArray[np.bool_]
    ) -> None:
        """Pages leave DRAM that were not sent. The table's lock is held."""
        if not self._share.is_all:
            mine = self._share.has(hashes)
            hashes, numbers, on_disk = hashes[mine], numbers[mine], on_disk[mine]
        num_lost = int((~on_disk).sum())
        for number in np.unique(numbers[on_disk]).tolist():
            mine = hashes[on_disk & (numbers == number)]
            try:
                self._evicted.put_nowait(_Evicted(number, mine))
            except queue.Full:
                num_lost += len(mine)
        self._drop(num_lost)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            try:
                has_sent = self._send_coldest() or self._send_evicted()
                pause_s = 0.0 if has_sent else _POLL_S
            except Exception:
                pause_s = min(max(_POLL_S, 2 * pause_s), _LONGEST_PAUSE_S)
                self._table.counters.add("remote_failures")
                failures.exception("hier-kv: pages that leave DRAM could not be uploaded")

    def _send_coldest(self) -> bool:
        """Sends pages before they leave; False when there is nothing to do."""
        if not self._remote.usable:
            return False
        taken = self._book.take_unsent(self._low_water_pages, self._batch_pages)
        if taken is None:
            return False
        number, hashes, slots = taken
        try:
            space = self._space_of(number)
            if space is not None:
                self._send(space, hashes)
        finally:
            # Also after a failure: pages that the store did not take are not offered again.
            self._book.end_sending(number, hashes, slots)
        return True

    def _send_evicted(self) -> bool:
        """Sends pages that have left DRAM, from disk."""
        evicted: _Evicted | None = None
        with contextlib.suppress(queue.Empty):
            evicted = self._evicted.get_nowait()
        if evicted is None:
            return False
        space = self._space_of(evicted.number)
        if space is None:  # nothing is stored of it any more
            self._drop(len(evicted.hashes))
            return True
        for first in range(0, len(evicted.hashes), _DISK_BATCH_PAGES):
            hashes = evicted.hashes[first : first + _DISK_BATCH_PAGES]
            num_settled = 0
            if self._remote.usable and not self._closing.is_set():
                num_settled = self._send_from_disk(space, hashes)
            self._drop(len(hashes) - num_settled)
        return True

    def _send_from_disk(self, space: KeySpace, hashes: Hashes) -> int:
        """Returns how many of some pages the store has now, or is not to have."""
        assert self._disk is not None
        hashes, copies = self._lookups.on_disk(space, hashes)
        requests = [
            ReadRequest(Location(segment, block), row.tobytes(), space.lora, room, num)
            for segment, block, num, row, room in zip(
                copies.segment.tolist(),
                copies.block.tolist(),
                copies.num_blocks.tolist(),
                hashes,
                self._room,
                strict=False,
            )
        ]
        items = [
            PutItem(RemoteKey(space.digest, request.page_hash, space.lora, RAW_CODEC), request.out)
            for result, request in zip(
                self._disk.read(space.digest, requests), requests, strict=True
            )
            if result is VerifyResult.OK and self._decoder.decode(request.out)[0] is not None
        ]
        outcomes = self._puts.put(space, items)
        num_kept = outcomes.count(Outcome.KEPT)
        num_new = outcomes.count(Outcome.OK)
        self._table.counters.add("remote_written_pages", num_new)
        self._table.counters.add("remote_duplicate_pages", num_kept)
        self._table.counters.add("remote_sent_from_disk_pages", num_new + num_kept)
        return len(outcomes) - num_dropped(outcomes)

    def _drop(self, num_pages: int) -> None:
        self._table.counters.add("remote_upload_dropped_pages", num_pages)
