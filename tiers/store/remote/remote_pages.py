"""Pages between DRAM and a remote store: fetches for waiting requests, and all that goes with it.

One thread uploads (`upload_queue.py`), one asks what the store has (`remote_lookup.py`), one
fetches for plans; the scheduler's thread never waits for them. What is fetched enters DRAM as a
save does: slots are taken, filled, verified, published; then the plan pins them. Here pages travel
raw; with a codec for the store, questions, fetches and uploads are handed to a `CodedRemote`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.records.page_rules import AnyPage, PageRules
from sglang_ext.tiers.records.record import RecordError, parse_header
from sglang_ext.tiers.remote.base import Outcome
from sglang_ext.tiers.remote.items import GetRequest, OnKnown
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.movers.transfer_meter import TransferMeter
from sglang_ext.tiers.store.remote.coded_remote import CodedRemote, Lookup, OpenCoded
from sglang_ext.tiers.store.remote.fetch_queue import FetchQueue
from sglang_ext.tiers.store.remote.put_share import EVERY_PAGE, PutShare
from sglang_ext.tiers.store.remote.remote_heads import RemoteHeads
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup, RemoteLookupThread
from sglang_ext.tiers.store.remote.upload_queue import RemoteUploads, remote_key
from sglang_ext.tiers.store.types import Hashes, KeySpace, Plan

failures = FailureLog(logging.getLogger(__name__))

REMOTE_POLICIES = ("all", "second_hit", "on_eviction")

_FETCH_QUEUE = 256  # requests; more are not looked up
_LOOKUP_PAGES = 64  # asked for at once
_FETCH_PAGES, _FETCH_BYTES = 16, 32 << 20  # published together, at most


class RemotePages:
    """What a page store does with a store that other servers share. Thread-safe.

    Attributes:
        uploads: what goes there.
    """

    def __init__(
        self,
        books: Books,
        remote: RemoteStore,
        policy: str,
        meter: TransferMeter | None = None,
        decoded: DecodedPages | None = None,
        open_coded: OpenCoded | None = None,
        rules: PageRules | None = None,
        share: PutShare = EVERY_PAGE,
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
            share: which pages are uploaded from here.

        Raises:
            TierConfigError: no policy has this name.
        """
        if policy not in REMOTE_POLICIES:
            raise TierConfigError(
                f"the remote policy must be one of {', '.join(REMOTE_POLICIES)}, got {policy!r}"
            )
        self._table, self._saves = books.table, books.saves
        self._book = books.remote
        self._remote = remote
        self._decoded = decoded or DecodedPages()
        self._rules = rules or AnyPage()
        self._heads = RemoteHeads(remote, self._rules)
        self._coded: CodedRemote | None = None
        if open_coded is not None:
            self._coded = open_coded(books, remote, self._decoded, self._rules)
        self.uploads = RemoteUploads(books.table, books.loads, remote, policy, self._coded, share)
        self._lookups: FetchQueue[Lookup] = FetchQueue(_FETCH_QUEUE)
        self._meter = meter or TransferMeter()
        slot_bytes = self._table.arena.slot_bytes
        self._fetch_pages = max(1, min(_FETCH_PAGES, _FETCH_BYTES // slot_bytes))
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run_lookups, name="hier-kv-remote-fetch", daemon=True
        )
        self._thread.start()
        self._lookup_thread = RemoteLookupThread(
            self._sizes,
            self._heads.first if self._coded is None else self._coded.first,
            self._table.counters,
        )

    def blame(self, space: KeySpace, page_hash: bytes) -> None:
        """A page that may have come from the store cannot be used. Does not block."""
        self._remote.reject(remote_key(space, page_hash), "unusable")
        if self._coded is not None:
            self._coded.blame(space, page_hash)

    def watch(self, on_known: OnKnown) -> None:
        """Has somebody told what calls find out; see `RemoteStore.watch`."""
        self._remote.watch(on_known)

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
        self.uploads.stop()
        for job in self._lookups.close():
            self._give_up(job)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the threads, and the store."""
        self.stop()
        self._lookup_thread.close(timeout_s)
        self.uploads.join(timeout_s + 10.0)
        self._thread.join(timeout=timeout_s + 10.0)
        if self._coded is not None:
            self._coded.close()
        self._remote.close()

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes in the store of each tenant with a share, by name; empty where it does not say."""
        return {
            f"quota_{f'tenant_{number}' if number else 'others'}_remote_bytes": num_bytes
            for number, num_bytes in enumerate(self._remote.used_by_tenant())
        }

    def stats(self) -> dict[str, int]:
        """What the remote store counts, and how much waits."""
        stats = self._remote.stats()
        stats["upload_queue"] = self.uploads.num_open
        stats["lookup_queue"] = self._lookup_thread.num_waiting
        stats["fetch_queue"] = len(self._lookups)
        return stats

    # ---- look-ups ----

    def _run_lookups(self) -> None:
        while (lookup := self._lookups.take()) is not None:
            try:
                self._serve(lookup)
            except Exception:
                self._count("remote_failures")
                failures.exception("hier-kv: pages could not be fetched; they are computed again")

    def _serve(self, lookup: Lookup) -> None:
        """Brings what was asked for, or has it brought; the plan ends whatever is raised."""
        if lookup.plan.cancelled:
            self._give_up(lookup)
            return
        done = partial(self._fetched, lookup, time.monotonic())
        self._meter.began(lookup.num_bytes)
        if self._coded is not None:
            try:
                self._coded.fetch(lookup, done)
            except BaseException:
                done()
                raise
            return
        try:
            self._look_up(lookup)
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
            heads = self._heads.leading(lookup.space, lookup.hashes[at:end], lookup.max_quality)
            quality = [each for each, _ in heads]  # of the leading ones that the store has
            for first in range(at, at + len(quality), self._fetch_pages):
                if lookup.plan.cancelled or self._closing.is_set():
                    return
                last = min(first + self._fetch_pages, at + len(quality))
                if not self._fetch(lookup, first, last, quality[first - at : last - at]):
                    return
            if len(quality) < end - at:
                return
            at = end

    def _sizes(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[int]:
        """Bytes of the leading pages that the remote store has; see `FindSizes`."""
        if self._coded is not None:
            return self._coded.sizes(space, hashes, max_quality)
        return [num_bytes for _, num_bytes in self._heads.leading(space, hashes, max_quality)]

    def _fetch(self, lookup: Lookup, first: int, last: int, quality: Sequence[int]) -> bool:
        """Reads pages [first, last) into DRAM; returns whether all are there now."""
        hashes = lookup.hashes[first:last]
        ticket = self._saves.begin(
            lookup.space, hashes, lookup.hashes[:first], np.array(quality, np.uint8)
        )
        ok = False
        try:
            requests = [
                GetRequest(remote_key(lookup.space, row.tobytes()), self._table.arena.slots[slot])
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
