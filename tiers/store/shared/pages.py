"""Pages between DRAM and a remote store: uploads after a save, fetches for waiting requests.

One thread uploads, one asks what the store has (`remote_lookup.py`), one fetches for plans; the
scheduler's thread never waits for them. What is fetched enters DRAM as a save does: slots are
taken, filled, verified, published; then the plan pins them. Here pages travel raw; with a codec for
the store, questions, fetches and uploads are handed to a `CodedRemote`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.page_rules import AnyPage, PageRules
from sglang_ext.tiers.records.record import HEADER_BYTES, RAW_CODEC, RecordError, parse_header
from sglang_ext.tiers.remote.base import Outcome, RemoteKey
from sglang_ext.tiers.remote.items import GetRequest, PutItem
from sglang_ext.tiers.remote.store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.movers.read_meter import ReadMeter
from sglang_ext.tiers.store.shared.coding import CodedRemote, Lookup, OpenCoded
from sglang_ext.tiers.store.shared.fetch_queue import FetchQueue
from sglang_ext.tiers.store.shared.remote_lookup import RemoteLookup, RemoteLookupThread
from sglang_ext.tiers.store.types import Hashes, KeySpace, Plan

logger = logging.getLogger(__name__)

REMOTE_POLICIES = ("all", "second_hit", "on_eviction")

_UPLOAD_QUEUE = 1024  # runs of pages; more are not uploaded, and counted
_FETCH_QUEUE = 256  # requests; more are not looked up
_UPLOAD_PAGES = 32  # pinned at once
_LOOKUP_PAGES = 64  # asked for at once
_FETCH_PAGES, _FETCH_BYTES = 16, 32 << 20  # published together, at most
_UPLOADED_PAGES = 65536  # remembered as uploaded


class _Upload(NamedTuple):
    space: KeySpace
    hashes: Hashes
    is_new: bool  # saved just now, so perhaps better than what was uploaded under the same key


class RemotePages:
    """What a page store does with a store that other servers share. Thread-safe."""

    def __init__(
        self,
        books: Books,
        remote: RemoteStore,
        policy: str,
        meter: ReadMeter | None = None,
        decoded: DecodedPages | None = None,
        open_coded: OpenCoded | None = None,
        rules: PageRules | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            books: the store's own books.
            remote: the shared store; closed by `close`.
            policy: which pages are uploaded: `all` that are saved, those used a `second_hit`, or
                those that leave DRAM (`on_eviction`; see `leaving_pages`).
            meter: measures what is fetched.
            decoded: told of pages that come from the store as less than exact.
            open_coded: moves pages coded; None moves them as they are.
            rules: what a page must be; None takes any record.

        Raises:
            TierConfigError: no policy has this name.
        """
        if policy not in REMOTE_POLICIES:
            raise TierConfigError(
                f"the remote policy must be one of {', '.join(REMOTE_POLICIES)}, got {policy!r}"
            )
        self.policy = policy
        self._table, self._saves = books.table, books.saves
        self._loads, self._book = books.loads, books.remote
        self._remote = remote
        self._decoded = decoded or DecodedPages()
        self._rules = rules or AnyPage()
        self._coded: CodedRemote | None = None
        if open_coded is not None:
            self._coded = open_coded(books, remote, self._decoded, self._rules)
        self._uploads: queue.Queue[_Upload | None] = queue.Queue(_UPLOAD_QUEUE)
        self._lookups: FetchQueue[Lookup] = FetchQueue(_FETCH_QUEUE)
        self._meter = meter or ReadMeter()
        slot_bytes = self._table.arena.slot_bytes
        self._fetch_pages = max(1, min(_FETCH_PAGES, _FETCH_BYTES // slot_bytes))
        # Keys uploaded lately, by namespace number and page hash; the upload thread's own.
        self._uploaded: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"hier-kv-remote-{name}", daemon=True)
            for name, target in (("upload", self._run_uploads), ("fetch", self._run_lookups))
        ]
        for thread in self._threads:
            thread.start()
        self._lookup_thread = RemoteLookupThread(self._sizes, self._table.counters)

    def saved(self, space: KeySpace, hashes: Hashes) -> None:
        """Pages were published in DRAM. Does not block."""
        if self.policy == "all":
            self._offer(_Upload(space, hashes.copy(), is_new=True))

    def loaded(self, space: KeySpace, hashes: Hashes) -> None:
        """Pages were used by a request. Does not block."""
        if self.policy == "second_hit":
            self._offer(_Upload(space, hashes.copy(), is_new=False))

    def send(self, space: KeySpace, hashes: Hashes) -> None:
        """Uploads those of some pages that are in DRAM. Blocks; `on_eviction`'s thread calls it."""
        self._upload(space, hashes)

    def blame(self, space: KeySpace, page_hash: bytes) -> None:
        """A page that may have come from the store cannot be used. Does not block."""
        self._remote.reject(_key(space, page_hash), "unusable")
        if self._coded is not None:
            self._coded.blame(space, page_hash)

    def ask(self, remote_lookup: RemoteLookup) -> bool:
        """Asks the store for pages; False when it will not be asked. Does not block."""
        return self._remote.usable and self._lookup_thread.ask(remote_lookup)

    @property
    def stalled_s(self) -> float:
        """For how long the store has not answered what it was asked last."""
        return self._lookup_thread.stalled_s

    def extend(
        self,
        plan: Plan | None,
        space: KeySpace,
        hashes: Hashes,
        max_quality: int,
        sizes: npt.NDArray[np.int64],
        priority: int = 0,
        arrived_s: float | None = None,
    ) -> Plan | None:
        """Lets a request's plan also bring what the remote store has, as far as there is room.

        Does not block.

        Args:
            plan: for what DRAM and disk have; None when they have nothing.
            space: where the pages belong.
            hashes: u8 `[N, 32]`, of the whole prefix.
            max_quality: no page worse than this.
            sizes: i64 `[N]`, bytes of those that the remote store was found to have; 0: none.
            priority: see `Plan`.
            arrived_s: when the request came, on the clock of `time.monotonic`; None for now.

        Returns:
            The plan, or a new one; None when nothing is stored.
        """
        num_known = 0 if plan is None else plan.num_stored
        end = num_known + num_leading(sizes[num_known:])
        if end == num_known or not self._remote.usable:
            return plan
        wanted = plan or Plan(np.empty(0, np.int64), remaining=0)
        wanted.priority = priority
        if wanted.short:  # what is here already comes first
            wanted.num_stored = end
            return wanted
        end = num_known + self._book.reserve(wanted, end - num_known)
        if end == num_known:
            return wanted
        num_bytes = int(sizes[num_known:end].sum())
        asked_s = time.monotonic() if arrived_s is None else arrived_s
        job = Lookup(
            wanted, space, hashes[:end], num_known, max_quality, num_bytes, len(hashes), asked_s
        )
        self._meter.queued(num_bytes)
        if not self._lookups.offer(job):
            self._count("remote_lookups_dropped")
            self._give_up(job)
        return wanted

    def stop(self) -> None:
        """Has the threads end after the batches in their hands. Does not block."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # the thread sees that it is closing
            self._uploads.put_nowait(None)
        for job in self._lookups.close():
            self._give_up(job)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the threads, and the store."""
        self.stop()
        self._lookup_thread.close(timeout_s)
        for thread in self._threads:
            thread.join(timeout=timeout_s + 10.0)
        if self._coded is not None:
            self._coded.close()
        self._remote.close()

    def stats(self) -> dict[str, int]:
        """What the remote store counts, and how much waits."""
        stats = self._remote.stats()
        stats["upload_queue"] = self._uploads.qsize()
        stats["lookup_queue"] = self._lookup_thread.num_waiting
        stats["fetch_queue"] = len(self._lookups)
        return stats

    # ---- uploads ----

    def _offer(self, upload: _Upload) -> None:
        if not len(upload.hashes) or self._closing.is_set():
            return
        try:
            self._uploads.put_nowait(upload)
        except queue.Full:
            self._count("remote_upload_dropped_pages", len(upload.hashes))

    def _run_uploads(self) -> None:
        while not self._closing.is_set():
            upload = self._uploads.get()
            if upload is None:
                return
            try:
                hashes = upload.hashes if upload.is_new else self._unknown(upload)
                for first in range(0, len(hashes), _UPLOAD_PAGES):
                    if not self._closing.is_set():
                        self._upload(upload.space, hashes[first : first + _UPLOAD_PAGES])
            except Exception:
                self._count("remote_failures")
                logger.exception("hier-kv: pages could not be uploaded")

    def _unknown(self, upload: _Upload) -> Hashes:
        """Pages that were not uploaded lately: the store is not asked again at each use."""
        number = upload.space.number
        new = [(number, row.tobytes()) not in self._uploaded for row in upload.hashes]
        return upload.hashes[np.array(new, np.bool_)]

    def _upload(self, space: KeySpace, hashes: Hashes) -> None:
        if not self._remote.usable:
            self._count("remote_upload_dropped_pages", len(hashes))
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
        self._count("remote_written_pages", outcomes.count(Outcome.OK))
        self._count("remote_duplicate_pages", outcomes.count(Outcome.KEPT))
        num_failed = len(outcomes) - outcomes.count(Outcome.OK) - outcomes.count(Outcome.KEPT)
        self._count("remote_upload_dropped_pages", num_failed)

    def _upload_raw(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, list[Outcome]]:
        hashes, slots = self._loads.pin_present(space, hashes)
        try:
            arena = self._table.arena.slots
            items = [
                PutItem(_key(space, row.tobytes()), arena[slot])
                for row, slot in zip(hashes, slots.tolist(), strict=True)
            ]
            return hashes, self._remote.put(items)
        finally:
            self._loads.release(slots)

    # ---- look-ups ----

    def _run_lookups(self) -> None:
        while (lookup := self._lookups.take()) is not None:
            if lookup.plan.cancelled:
                self._give_up(lookup)
                continue
            done = partial(self._fetched, lookup, time.monotonic())
            self._meter.began(lookup.num_bytes)
            if self._coded is not None:
                self._coded.fetch(lookup, done)
                continue
            try:
                self._look_up(lookup)
            except Exception:
                self._count("remote_failures")
                logger.exception("hier-kv: pages could not be fetched; they are computed again")
            finally:
                done()

    def _fetched(self, lookup: Lookup, began_s: float) -> None:
        """Nothing more is fetched for a plan."""
        plan = lookup.plan
        whole = plan.num_remote == len(lookup.hashes) - lookup.num_known
        try:
            self._meter.ended(lookup.num_bytes, read_s=time.monotonic() - began_s, whole=whole)
            self._meter.plan_ended()
        finally:
            self._book.end_fetch(plan)

    def _give_up(self, lookup: Lookup) -> None:
        """Nothing is fetched for a plan after all."""
        self._meter.queued(-lookup.num_bytes)
        self._book.end_fetch(lookup.plan)

    def _look_up(self, lookup: Lookup) -> None:
        """Brings the pages of a prefix that the remote store has, up to the first it lacks."""
        at = lookup.num_known
        # Another request may have brought them meanwhile.
        at += self._adopt(lookup, lookup.hashes[at:])
        lookup.plan.first_remote = at
        while at < len(lookup.hashes):
            end = min(at + _LOOKUP_PAGES, len(lookup.hashes))
            quality = self._stored(lookup, at, end)
            for first in range(at, at + len(quality), self._fetch_pages):
                if lookup.plan.cancelled or self._closing.is_set():
                    return
                last = min(first + self._fetch_pages, at + len(quality))
                if not self._fetch(lookup, first, last, quality[first - at : last - at]):
                    return
            if len(quality) < end - at:
                return
            at = end

    def _stored(self, lookup: Lookup, first: int, last: int) -> list[int]:
        """Qualities of the leading pages of [first, last) that the remote store has."""
        heads = self._heads(lookup.space, lookup.hashes[first:last], lookup.max_quality)
        return [quality for quality, _ in heads]

    def _sizes(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[int]:
        """Bytes of the leading pages that the remote store has; see `FindSizes`."""
        if self._coded is not None:
            return self._coded.sizes(space, hashes, max_quality)
        return [num_bytes for _, num_bytes in self._heads(space, hashes, max_quality)]

    def _heads(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[tuple[int, int]]:
        """(quality, bytes) of the leading pages that the remote store has and are good enough."""
        found: list[tuple[int, int]] = []
        keys = [_key(space, row.tobytes()) for row in hashes]
        for key, head in zip(keys, self._remote.head(keys), strict=True):
            if head.meta is None or head.meta.quality > max_quality:
                break
            if not self._rules.admits_header(head.meta, head.num_bytes - HEADER_BYTES):
                self._remote.reject(key, "unsound")
                break
            found.append((head.meta.quality, head.num_bytes))
        return found

    def _fetch(self, lookup: Lookup, first: int, last: int, quality: Sequence[int]) -> bool:
        """Reads pages [first, last) into DRAM; returns whether all are there now."""
        hashes = lookup.hashes[first:last]
        ticket = self._saves.begin(
            lookup.space, hashes, lookup.hashes[:first], np.array(quality, np.uint8)
        )
        ok = False
        try:
            requests = [
                GetRequest(_key(lookup.space, row.tobytes()), self._table.arena.slots[slot])
                for row, slot in zip(ticket.hashes, ticket.slots.tolist(), strict=True)
            ]
            timeout_s = self._remote.transfer_timeout_s(sum(each.out.size for each in requests))
            results = self._remote.get(requests, timeout_s=timeout_s)
            # Every page is looked at, so that all bad ones are known and left out from now on.
            sound = [
                result.outcome is Outcome.OK and self._is_page(request, expected)
                for result, request, expected in zip(
                    results, requests, ticket.quality.tolist(), strict=True
                )
            ]
            ok = all(sound)
        finally:
            self._saves.finish(ticket, ok=ok)
        self._count("remote_promoted_pages" if ok else "remote_failed_pages", len(ticket.slots))
        # What another request is saving now is not to be had yet: the plan is made again.
        complete = ok and not ticket.dropped and self._adopt(lookup, hashes) == len(hashes)
        lookup.plan.lacked_room |= ok and not complete
        if complete:
            lookup.plan.num_remote = last - lookup.plan.first_remote
        return complete

    # ---- private ----

    def _adopt(self, lookup: Lookup, hashes: Hashes) -> int:
        return self._book.adopt(lookup.plan, lookup.space, hashes, lookup.max_quality)

    def _is_page(self, request: GetRequest, quality: int) -> bool:
        """Whether a verified record is a page, as good as its header said when found."""
        try:
            meta, _ = parse_header(request.out)
        except RecordError:
            return False
        self._decoded.note(meta)
        if not self._rules.admits_page(request.out):
            self._remote.reject(request.key, "unsound")
            return False
        return meta.quality == quality

    def _count(self, name: str, amount: int = 1) -> None:
        self._table.counters.add(name, amount)


def num_leading(sizes: npt.NDArray[np.int64]) -> int:
    """How many leading pages have a size."""
    return len(sizes) if sizes.all() else int(np.argmin(sizes > 0))


def _key(space: KeySpace, page_hash: bytes) -> RemoteKey:
    return RemoteKey(space.digest, page_hash, space.lora, RAW_CODEC)
