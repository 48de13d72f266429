"""SGLang's KV events, with those of the tiers below the device: for routers that know who has what.

SGLang tells of pages on the device (medium `GPU`). Here pages are followed on: `CPU_PINNED` is
DRAM, `DISK` the disk, `EXTERNAL` a store that servers share. A router that reads a page's tokens
and its parent from an event can find it without asking, so only pages whose tokens are known are
told of: those that this process had on the device. A shared store drops pages and tells nobody: of
it is told what this process last found out (`Sightings`).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from sglang_ext.device.transfers import Hashes
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.remote.items import OnKnown
from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.remote.sightings import Sightings
from sglang_ext.tiers.store.types import ON_DISK, READY, OnMoved, StoreCounters

# Pages told of in one go, on the scheduler's thread: each takes some ten microseconds. As many as
# make a tenth of the time since the last turn, so that short steps stay short; at least so many as
# a step computes, in DRAM and on disk.
_PAGES_A_TURN, _LEAST_A_TURN, _PAGES_A_S = 2048, 256, 8192
# Steps from a page to the one before it, on the way to what of its path is to be told first.
_STEPS_A_TURN = 4 * _PAGES_A_TURN
# Times that pages whose key space is not known are looked for in one, under the store's lock.
_LOOKS_A_TURN = 1 << 15
# Pages that moved since events were taken. With more, all that are known are looked at.
_MAX_MOVED = 1 << 17
# Pages in the tiers that are told of, about 700 bytes each; more stay untold, and are counted.
_MAX_TOLD = 1 << 19
# Those of them that a shared store has. Of more, the ones that were used longest ago are taken back
# unasked: nobody says when they go, and what this server has itself must find room.
_MAX_SHARED = 1 << 18
_SHARED = 64  # beside READY and ON_DISK in `_Page.told`


def record_medium(config: HierKVConfig) -> StorageMedium:
    """What is told of pages that lie in records: on disk, or coded in DRAM."""
    is_disk = bool(config.disk_dir) and config.kv_events_disk == "disk"
    return StorageMedium.DISK if is_disk else StorageMedium.CPU


class FollowedStore(Protocol):
    """What is asked of the page store."""

    counters: StoreCounters
    gate: Gate

    def follow(self, on_moved: OnMoved, on_known: OnKnown) -> None:
        """Has somebody told of pages that move, and what is found out of the shared store."""

    @property
    def num_spaces(self) -> int:
        """Key spaces that a page whose own is not known may be looked for in."""

    def is_open(self, number: int) -> bool:
        """Whether pages of a key space may be used now."""

    def tiers_of(self, hashes: Hashes, homes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Where pages are now, given the numbers of their key spaces, -1 where that is unknown."""

    def open_spaces(self) -> set[tuple[bytes, bytes]]:
        """Namespace and adapter of what may be used now."""


@dataclass(slots=True, eq=False)
class _Page:
    """What an event says of a page.

    Attributes:
        block: its hash in events.
        parent: that of the page before it; None for a prompt's first.
        before: hash in the store of the page before it.
        tokens: its tokens.
        home: number of its key space; -1 where that is not known.
        told: bits of the tiers that it is said to be in.
        again: it is to be told of once more.
    """

    block: int
    parent: int | None
    before: bytes | None
    tokens: array[int]
    cache_salt: str | None
    lora_name: str | None
    home: int = -1
    told: int = 0
    again: bool = False


class _Turns:
    """How many pages each turn may look at, by the time since the one before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()

    def begin(self) -> int:
        """A turn begins; returns its pages."""
        now_s = self._clock()
        passed_s, self._last_s = now_s - self._last_s, now_s
        return min(_PAGES_A_TURN, max(_LEAST_A_TURN, int(_PAGES_A_S * passed_s)))


class TierEventRecorder(KVCacheEventRecorder):
    """Takes the place of SGLang's recorder in a radix tree. Scheduler's thread, but for `_hear`.

    What moved is heard as it moves; where it is now is asked of the store when events are taken, so
    no order of threads makes an event wrong. At the end of an epoch, when weights or adapters
    change, all that the tiers were said to have is taken back, and told again as it is seen again.

    Args:
        device: SGLang's recorder, which told of nothing yet.
        store: DRAM and disk.
        record_medium: what is told of pages that lie in records.
        max_seen_pages: pages of no tier whose tokens are remembered, at least what the device has.
        home_now: number of the key space of what enters the device's tree now; -1 where that is
            not known.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: KVCacheEventRecorder,
        store: FollowedStore,
        *,
        record_medium: StorageMedium,
        max_seen_pages: int,
        home_now: Callable[[], int] = lambda: -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            enabled=device.enabled,
            page_size=device.page_size,
            dynamo_format=device.dynamo_format,
            lora_names=device.lora_names,
        )
        self._media = {
            READY: StorageMedium.CPU,
            ON_DISK: record_medium,
            _SHARED: StorageMedium.EXTERNAL,
        }
        self._store = store
        self._epoch = store.gate.epoch
        self._max_seen_pages = max_seen_pages
        self._home_now = home_now
        self._turns = _Turns(clock)
        # By hash in the store. Told pages are in the tiers; of the others the oldest are forgotten.
        self._told: dict[bytes, _Page] = {}
        self._seen: OrderedDict[bytes, _Page] = OrderedDict()
        # Of these, in order: those to look at, and those that are to be taken back before.
        self._pending: OrderedDict[bytes, None] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._shared: OrderedDict[bytes, None] = OrderedDict()  # in the store, by their last use
        self._sightings = Sightings()
        # Guarded by _lock, as is the next.
        self._moved: deque[tuple[Hashes, npt.NDArray[np.uint32]]] = deque()
        self._num_moved = 0  # pages in it, and those that it had no room for
        self._lock = threading.Lock()
        self._queue = device.take()
        if self.enabled:
            store.follow(self._hear, self._sightings.hear)

    # ---- what happens ----

    def record_store(self, node: Any, medium: Any = None, *, session_id: str | None = None) -> None:
        """Tells of a node's pages on the device, and remembers what is in them."""
        if not self.enabled:
            return
        queue, self._queue = self._queue, []
        super().record_store(node, medium, session_id=session_id)
        fresh, self._queue = self._queue, queue
        if not node.key.is_bigram:
            self._remember(node.hash_value, node.parent.hash_value or [], fresh)
        for event in fresh:
            self.enqueue(event)

    def record_all_cleared(self) -> None:
        """The device was emptied, and a reader forgets all media: what tiers have is told anew."""
        super().record_all_cleared()
        if self.enabled:
            for page in self._told.values():
                page.told = 0
            self._pending.update(dict.fromkeys(self._told))

    def take(self) -> list[Any]:
        """All events since the last call; of what moved between the tiers a bounded part."""
        if self.enabled:
            self._follow()
        return list(super().take())

    def _hear(self, hashes: Hashes, numbers: npt.NDArray[np.uint32]) -> None:
        """Pages moved; called by any thread, under the store's lock."""
        with self._lock:
            self._num_moved += len(hashes)
            if self._num_moved <= _MAX_MOVED:
                self._moved.append((hashes, numbers))

    # ---- what is said of it ----

    def _remember(
        self, hashes: Sequence[str], above: Sequence[str], events: Iterable[BlockStored]
    ) -> None:
        """What is in a node's pages. Those that a tier has are told of next, once more, too.

        A reader may not have heard of them, or not known where to put them.

        Args:
            hashes: of the node's pages, in the store.
            above: of those of the node above it.
            events: what SGLang's recorder says of them.
        """
        names, before = iter(hashes), bytes.fromhex(above[-1]) if above else None
        home = self._home_now()
        for event in events:
            parent, size = event.parent_block_hash, event.block_size
            for index, block in enumerate(event.block_hashes):
                key = bytes.fromhex(next(names))
                self._pending[key] = None
                if key in self._told:
                    page = self._told[key]
                    page.again, page.home = True, page.home if home < 0 else home
                else:
                    tokens = _packed(event.token_ids[index * size : (index + 1) * size])
                    self._seen[key] = _Page(
                        block, parent, before, tokens, event.cache_salt, event.lora_name, home
                    )
                    self._seen.move_to_end(key)
                parent, before = block, key
        while len(self._seen) > self._max_seen_pages:
            self._shared.pop(self._seen.popitem(last=False)[0], None)

    def _follow(self) -> None:
        """Tells of pages that moved."""
        if self._epoch is not self._store.gate.epoch:
            self._epoch = self._store.gate.epoch
            self._gone.update(dict.fromkeys(self._told))
            self._lose_shared(len(self._shared))
        self._take_moved()
        self._take_sightings()
        num_left = self._turns.begin()
        gone = _first(self._gone, num_left)
        if gone:
            self._say(gone, [0] * len(gone))
            num_left -= len(gone)
        keys, homes = self._with_homes(self._take_pending(num_left))
        if keys:
            rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
            tiers = self._store.tiers_of(rows, np.array(homes, np.int64)).tolist()
            shared = [_SHARED if key in self._shared else 0 for key in keys]
            self._say(keys, [here | there for here, there in zip(tiers, shared, strict=True)])

    def _take_pending(self, num: int) -> list[bytes]:
        """The next pages to look at: of what no reader knows always a path's first pages first.

        A reader can place a page only behind one that it knows, and what is told in one turn it
        knows in the next. Pages that are passed on the way up go to the front of what is pending,
        in their order, so that a path that one turn does not get to the top of is gone on with.
        """
        keys: list[bytes] = []
        steps_left = _STEPS_A_TURN
        while self._pending and len(keys) < num and steps_left > 0:
            path: list[bytes] = []
            key: bytes | None = next(iter(self._pending))
            while key is not None and steps_left > 0:
                steps_left -= 1
                del self._pending[key]
                path.append(key)
                key = self._unknown_before(key)
            path.reverse()
            num_told = num - len(keys) if key is None else 0
            keys += path[:num_told]
            _put_first(self._pending, path[num_told:])
        return keys

    def _with_homes(self, keys: list[bytes]) -> tuple[list[bytes], list[int]]:
        """The first of some pages that are known, and their key spaces; the others wait on.

        A page whose key space is not known may have to be looked for in each, and there is one for
        every adapter: of such pages a turn looks for few.
        """
        most = max(1, _LOOKS_A_TURN // max(1, self._store.num_spaces))
        known: list[bytes] = []
        homes: list[int] = []
        for place, key in enumerate(keys):
            page = self._told.get(key) or self._seen.get(key)
            if page is None:
                continue
            if page.home < 0:
                if not most:
                    _put_first(self._pending, keys[place:])
                    break
                most -= 1
            known.append(key)
            homes.append(page.home)
        return known, homes

    def _unknown_before(self, key: bytes) -> bytes | None:
        """The page before one, if it is pending and a reader may not know it."""
        page = self._told.get(key) or self._seen.get(key)
        if page is None or page.before is None or page.before not in self._pending:
            return None
        before = self._told.get(page.before) or self._seen.get(page.before)
        return page.before if before is not None and (before.again or not before.told) else None

    def _take_moved(self) -> None:
        """Pages that moved and that one can tell of are looked at next."""
        with self._lock:
            moved, num_moved = self._moved, self._num_moved
            self._moved, self._num_moved = deque(), 0
        if num_moved > _MAX_MOVED:
            self._store.counters.add("kv_events_overrun")
            self._pending.update(dict.fromkeys(self._told))
            self._pending.update(dict.fromkeys(self._seen))
            return
        for hashes, numbers in moved:
            for row, number in zip(hashes, numbers.tolist(), strict=True):
                key = row.tobytes()
                page = self._told.get(key) or self._seen.get(key)
                if page is None:
                    continue
                self._pending[key] = None
                if page.home == number or not self._store.is_open(number):
                    continue  # in one that is closed by now it says nothing of where the page is
                if page.home < 0 or not self._store.is_open(page.home):
                    page.home = number

    def _take_sightings(self) -> None:
        """What was found out of the shared store is told next; of other weights it says nothing."""
        sightings = self._sightings.take()
        if sightings is None:
            self._store.counters.add("kv_events_overrun")
            self._lose_shared(len(self._shared))
            return
        spaces = self._store.open_spaces() if sightings else set()
        for namespace, lora, key, is_there in sightings:
            if (namespace, lora) not in spaces or (key not in self._told and key not in self._seen):
                continue
            if is_there != (key in self._shared):
                self._pending[key] = None
            if is_there:
                self._shared[key] = None
                self._shared.move_to_end(key)
            else:
                self._shared.pop(key, None)
        self._lose_shared(len(self._shared) - _MAX_SHARED)

    def _lose_shared(self, num: int) -> None:
        """The first of the pages in the shared store are said to be there no more."""
        self._pending.update(dict.fromkeys(_first(self._shared, max(0, num))))

    def _say(self, keys: list[bytes], tiers: list[int]) -> None:
        """Says where pages are, as far as that is news."""
        stored: dict[_Page, list[StorageMedium]] = {}
        again: dict[StorageMedium, list[int]] = {}
        gone: dict[StorageMedium, list[int]] = {}
        for key, bits in zip(keys, tiers, strict=True):
            page = self._told.get(key) or self._seen.get(key)
            if page is None:
                continue
            if page.told == bits and not page.again and (key in self._told) == bool(bits):
                continue  # no news
            before, after = self._media_of(page.told), self._media_of(bits)
            if bits and key not in self._told and len(self._told) >= _MAX_TOLD:
                self._store.counters.add("kv_events_untold_pages")
                continue
            is_again, page.told, page.again = page.again, bits, False
            source, target = (self._seen, self._told) if bits else (self._told, self._seen)
            target[key] = source.pop(key, page)
            for medium in before:
                if medium not in after:
                    gone.setdefault(medium, []).append(page.block)
                elif is_again:
                    again.setdefault(medium, []).append(page.block)
            news = [medium for medium in after if is_again or medium not in before]
            if news:
                stored[page] = news
        # What is told again is taken back before: some readers count copies, and would keep one
        # that is not there. What is gone comes last: what moved is always somewhere.
        self._say_removed(again)
        self._say_stored(stored)
        self._say_removed(gone)

    def _say_removed(self, blocks: dict[StorageMedium, list[int]]) -> None:
        for medium, each in blocks.items():
            self.enqueue(BlockRemoved(block_hashes=each, medium=medium))

    def _say_stored(self, media: dict[_Page, list[StorageMedium]]) -> None:
        """Says where pages are besides: first of each one medium, so that all have their places.

        A reader can place a page only behind one that is somewhere, in whichever medium; pages come
        in the order of their paths. Then the other media one by one, which SGLang's recorder makes
        few events of.
        """
        for page, (first, *_) in media.items():
            self._say_page(page, first)
        for medium in dict.fromkeys(self._media.values()):
            for page, (_, *others) in media.items():
                if medium in others:
                    self._say_page(page, medium)

    def _say_page(self, page: _Page, medium: StorageMedium) -> None:
        self.enqueue(
            BlockStored(
                block_hashes=[page.block],
                parent_block_hash=page.parent,
                token_ids=page.tokens.tolist(),
                block_size=len(page.tokens),
                lora_id=None,
                medium=medium,
                cache_salt=page.cache_salt,
                lora_name=page.lora_name,
            )
        )

    def _media_of(self, bits: int) -> list[StorageMedium]:
        """Each once, in the order of the tiers."""
        return list(dict.fromkeys(medium for bit, medium in self._media.items() if bits & bit))


def _first(keys: OrderedDict[bytes, None], num: int) -> list[bytes]:
    """Takes out the first ones."""
    return [keys.popitem(last=False)[0] for _ in range(min(num, len(keys)))]


def _put_first(pending: OrderedDict[bytes, None], keys: Sequence[bytes]) -> None:
    """These pages are the next to look at, in their order."""
    for key in reversed(keys):
        pending[key] = None
        pending.move_to_end(key, last=False)


def _packed(tokens: list[int]) -> array[int]:
    """Tokens in few bytes; those that stand for images may be of 64 bits."""
    try:
        return array("i", tokens)
    except OverflowError:
        return array("q", tokens)
