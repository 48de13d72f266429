"""SGLang's KV events, with those of the tiers below the device: for routers that know who has what.

SGLang tells of pages on the device (medium `GPU`). Here pages are followed on: `CPU_PINNED` is
DRAM, `DISK` the disk. A router that reads a page's tokens and its parent from an event can find it
without asking, so only pages whose tokens are known are told of: those that this process had on the
device. What a store that servers share has is not told: it drops pages and tells nobody.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from sglang_ext.device.transfers import Hashes
from sglang_ext.tiers.store.gate import Gate
from sglang_ext.tiers.store.types import ON_DISK, READY, StoreCounters

# Pages told of in one go, on the scheduler's thread: each takes some microseconds.
_PAGES_A_TURN = 2048
# Pages that moved and were not looked at yet. With more, all that were told of are looked at.
_MAX_MOVED = 1 << 17
# Pages in the tiers that are told of; more stay untold, and are counted.
_MAX_TOLD = 1 << 20


class FollowedStore(Protocol):
    """What is asked of the page store."""

    counters: StoreCounters
    gate: Gate

    def follow(self, on_moved: Callable[[Hashes], None]) -> None:
        """Has somebody told of pages that move."""

    def tiers_of(self, hashes: Hashes) -> npt.NDArray[np.uint8]:
        """Where pages are now."""


@dataclass(slots=True, eq=False)
class _Page:
    """What an event says of a page.

    Attributes:
        block: its hash in events.
        parent: that of the page before it; None for a prompt's first.
        tokens: its tokens.
        told: bits of the tiers that it is said to be in.
        again: it is to be told of once more.
    """

    block: int
    parent: int | None
    tokens: array[int]
    cache_salt: str | None
    lora_name: str | None
    told: int = 0
    again: bool = False


class _Moved(NamedTuple):
    """Pages that may have moved.

    Attributes:
        hashes: u8 `[N, 32]`.
        heard: the store told of them.
        gone: they are in no tier, whatever the store says.
    """

    hashes: Hashes
    heard: bool = False
    gone: bool = False


class TierEventRecorder(KVCacheEventRecorder):
    """Takes the place of SGLang's recorder in a radix tree. Scheduler's thread, but for `_hear`.

    What moved is heard as it moves; where it is now is asked of the store when events are taken, so
    no order of threads makes an event wrong. At the end of an epoch, when weights or adapters
    change, all that the tiers were said to have is taken back, and told again as it is seen again.

    Args:
        device: SGLang's recorder, which told of nothing yet.
        store: DRAM and disk.
        records_on_disk: whether records lie on disk; False: in DRAM, coded.
        max_seen_pages: pages of no tier whose tokens are remembered: as many as the device has.
    """

    def __init__(
        self,
        device: KVCacheEventRecorder,
        store: FollowedStore,
        *,
        records_on_disk: bool,
        max_seen_pages: int,
    ) -> None:
        super().__init__(
            enabled=device.enabled,
            page_size=device.page_size,
            dynamo_format=device.dynamo_format,
            lora_names=device.lora_names,
        )
        disk = StorageMedium.DISK if records_on_disk else StorageMedium.CPU
        self._media = {READY: StorageMedium.CPU, ON_DISK: disk}
        self._store = store
        self._epoch = store.gate.epoch
        self._max_seen_pages = max_seen_pages
        # By hash in the store. Told pages are in the tiers; of the others the oldest are forgotten.
        self._told: dict[bytes, _Page] = {}
        self._seen: dict[bytes, _Page] = {}
        self._moved: deque[_Moved] = deque()  # guarded by _lock, as is the next
        self._num_moved = 0  # pages in it that were heard of
        self._lock = threading.Lock()
        self._queue = device.take()
        if self.enabled:
            store.follow(self._hear)

    # ---- what happens ----

    def record_store(self, node: Any, medium: Any = None, *, session_id: str | None = None) -> None:
        """Tells of a node's pages on the device, and remembers what is in them."""
        if not self.enabled:
            return
        queue, self._queue = self._queue, []
        super().record_store(node, medium, session_id=session_id)
        fresh, self._queue = self._queue, queue
        if not node.key.is_bigram:
            self._remember(node.hash_value, fresh)
        for event in fresh:
            self.enqueue(event)

    def record_all_cleared(self) -> None:
        """The device was emptied, and a reader forgets all media: what tiers have is told anew."""
        super().record_all_cleared()
        if self.enabled:
            for page in self._told.values():
                page.told = 0
            self._look_at(list(self._told))

    def take(self) -> list[Any]:
        """All events since the last call; of what moved between the tiers a bounded part."""
        if self.enabled:
            self._follow()
        return list(super().take())

    def _hear(self, hashes: Hashes) -> None:
        """Pages moved; called by any thread, under the store's lock."""
        with self._lock:
            self._num_moved += len(hashes)
            if self._num_moved <= _MAX_MOVED:
                self._moved.append(_Moved(hashes, heard=True))

    # ---- what is said of it ----

    def _remember(self, hashes: Sequence[str], events: Iterable[BlockStored]) -> None:
        """What is in a node's pages. Those that a tier has are told of next, once more, too.

        A reader may not have heard of them, or not known where to put them.
        """
        names = iter(hashes)
        keys = []
        for event in events:
            parent, size = event.parent_block_hash, event.block_size
            for index, block in enumerate(event.block_hashes):
                key = bytes.fromhex(next(names))
                tokens = array("q", event.token_ids[index * size : (index + 1) * size])
                page = _Page(block, parent, tokens, event.cache_salt, event.lora_name)
                parent = block
                keys.append(key)
                if key in self._told:
                    self._told[key].again = True
                else:
                    self._seen.pop(key, None)  # the latest last
                    self._seen[key] = page
        while len(self._seen) > self._max_seen_pages:
            del self._seen[next(iter(self._seen))]
        self._look_at(keys)

    def _follow(self) -> None:
        """Tells of pages that moved."""
        if self._epoch is not self._store.gate.epoch:
            self._epoch = self._store.gate.epoch
            self._look_at(list(self._told), gone=True)
        with self._lock:
            overrun = self._num_moved > _MAX_MOVED
        if overrun:
            self._store.counters.add("kv_events_overrun")
            with self._lock:
                self._moved = deque(each for each in self._moved if not each.heard)
                self._num_moved = 0
            self._look_at([*self._told, *self._seen])
        num_pages = 0
        while num_pages < _PAGES_A_TURN:
            with self._lock:
                if not self._moved:
                    return
                moved = self._moved.popleft()
                self._num_moved -= len(moved.hashes) if moved.heard else 0
            num_pages += len(moved.hashes)
            tiers = np.zeros(len(moved.hashes), np.uint8)
            if not moved.gone:
                tiers = self._store.tiers_of(moved.hashes)
            self._say(moved.hashes, tiers)

    def _look_at(self, keys: list[bytes], *, gone: bool = False) -> None:
        """Has pages looked at, turn by turn; or said to be gone, before anything else is."""
        with self._lock:
            for first in range(0, len(keys), _PAGES_A_TURN):
                rows = np.frombuffer(b"".join(keys[first : first + _PAGES_A_TURN]), np.uint8)
                moved = _Moved(rows.reshape(-1, 32), gone=gone)
                (self._moved.appendleft if gone else self._moved.append)(moved)

    def _say(self, hashes: Hashes, tiers: npt.NDArray[np.uint8]) -> None:
        """Says where pages are, as far as that is news."""
        stored: list[tuple[_Page, StorageMedium]] = []
        removed: dict[StorageMedium, list[int]] = {}
        for row, bits in zip(hashes, tiers.tolist(), strict=True):
            key = row.tobytes()
            page = self._told.get(key) or self._seen.get(key)
            if page is None:
                continue
            before, after = self._media_of(page.told), self._media_of(bits)
            if bits and key not in self._told and len(self._told) >= _MAX_TOLD:
                self._store.counters.add("kv_events_untold_pages")
                continue
            known = set() if page.again else before
            page.told, page.again = bits, False
            source, target = (self._seen, self._told) if bits else (self._told, self._seen)
            target[key] = source.pop(key, page)
            stored += ((page, medium) for medium in after - known)
            for medium in before - after:
                removed.setdefault(medium, []).append(page.block)
        for medium, blocks in removed.items():
            self.enqueue(BlockRemoved(block_hashes=blocks, medium=medium))
        for medium in dict.fromkeys(self._media.values()):
            for page in _parents_first([page for page, where in stored if where is medium]):
                self._say_stored(page, medium)

    def _say_stored(self, page: _Page, medium: StorageMedium) -> None:
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

    def _media_of(self, bits: int) -> set[StorageMedium]:
        return {medium for bit, medium in self._media.items() if bits & bit}


def _parents_first(pages: list[_Page]) -> Iterator[_Page]:
    """A reader can place a page only behind one that it knows."""
    waiting = {page.block: page for page in pages}
    for page in pages:
        chain: list[_Page] = []
        above: _Page | None = page
        while above is not None and waiting.pop(above.block, None) is not None:
            chain.append(above)
            above = None if above.parent is None else waiting.get(above.parent)
        yield from reversed(chain)
