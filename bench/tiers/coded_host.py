"""What placing a record in a full coded DRAM costs, by the size of that. For the `tiers` case.

    python -m bench.tiers.coded_host [--sizes 2000 8000 32000 128000]

All figures are processor time. Without a disk it is that of `MemoryTier.write` in the server's own
page store, which chooses what leaves, with the copy of a record of 4 KiB. In front of a disk it is
that of the question which records stay (`CopyKeeper.keep`), without any copy. Chats of 16 pages
leave, in random order of where they lie, and 64 pages come at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_ext.simulator.virtual_store import (
    StoreSizes,
    VirtualClock,
    VirtualExecutor,
    page_hashes,
    virtual_store,
)
from sglang_ext.tiers.coded_host import MemoryTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from sglang_ext.tiers.store.types import Hashes, KeySpace

SIZES = (2_000, 8_000, 32_000, 128_000)
_RECORD_BYTES = 4096
_CHAT_PAGES = 16
_CHATS_A_BATCH = 4
_MEASURED_CHATS = 256
_HOST_PAGES = 1024
_DIGEST = hashlib.sha256(b"bench").digest()


class _Timed:
    """A call, and the seconds of processor time and the records of its calls since `reset`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.reset()

    def reset(self) -> None:
        self.took_s, self.num_records = 0.0, 0

    def __call__(self, digest: bytes, records: Sequence[Any], **options: Any) -> Any:
        start_s = time.thread_time()
        result = self._call(digest, records, **options)
        self.took_s += time.thread_time() - start_s
        self.num_records += len(records)
        return result

    @property
    def us_a_record(self) -> float:
        return self.took_s / self.num_records * 1e6


def measure_placing(sizes: Sequence[int] = SIZES) -> dict[str, dict[str, float]]:
    """Microseconds a record in full coded DRAM, by set-up and by records that it has room for."""
    return {
        "coded DRAM alone": {f"{size}": alone_us(size) for size in sizes},
        "in front of a disk": {f"{size}": before_disk_us(size) for size in sizes},
    }


def alone_us(num_records: int, make: Callable[[int], Any] = MemoryTier) -> float:
    """Microseconds of a record that is written to a full `MemoryTier` of so many.

    Args:
        num_records: that it has room for.
        make: makes the tier, given its bytes.
    """
    tier = make(num_records * _RECORD_BYTES)
    arena = HostArena(_HOST_PAGES, _RECORD_BYTES)
    clock = VirtualClock()
    executor = VirtualExecutor(clock, {"spill": math.inf, "promote": math.inf})
    index = PageIndex(2 * (num_records + _HOST_PAGES))
    config = PageStoreConfig("write_through", placement=PolicyConfig())
    store = PageStore(arena, index, tier, config, clock=clock, executor=executor)
    store.connect(tier)
    store.open_namespace(_DIGEST, {})
    space, timed = store.space(_DIGEST), _Timed(tier.write)
    tier.write = timed

    def save(hashes: Hashes) -> None:
        ticket = store.begin_save(space, hashes, hashes[:0])
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            meta = RecordMeta(hashes[page].tobytes(), _DIGEST, b"", 0, 64, "pre")
            write_meta(arena.slots[slot], meta, _RECORD_BYTES - HEADER_BYTES)
        store.finish_save(ticket, ok=True)

    try:
        return _measure(num_records, store, space, save, clock, executor, timed)
    finally:
        store.close(timeout_s=0.0)
        arena.close()


def before_disk_us(num_records: int) -> float:
    """Microseconds of a record about which a full `CachedDiskTier` of so many is asked."""
    sizes = StoreSizes(_RECORD_BYTES, _HOST_PAGES, 2 * num_records, coded_pages=num_records)
    with virtual_store(sizes, PolicyConfig(), "write_through") as server:
        disk: Any = server.disk
        timed = _Timed(disk.copy_keeper.keep)
        disk.copy_keeper.keep = timed

        def save(hashes: Hashes) -> None:
            server.save(hashes, 0)

        return _measure(
            num_records, server.store, server.space, save, server.clock, server.executor, timed
        )


def _measure(
    num_records: int, store: PageStore, space: KeySpace, save: Callable[[Hashes], None],
    clock: VirtualClock, executor: VirtualExecutor, timed: _Timed,
) -> float:  # fmt: skip
    """Fills coded DRAM, has its chats used in random order, and then takes the time of more."""
    num_chats = -(-num_records // _CHAT_PAGES)
    for chat in range(num_chats):
        save(_chat(chat))
        if chat % _CHATS_A_BATCH == _CHATS_A_BATCH - 1:
            executor.run_due()
    executor.run_due()
    assert store.lookahead is not None
    for chat in np.random.default_rng(1).permutation(num_chats).tolist():
        clock.now_s += 1.0
        store.lookahead.used(space, _chat(chat), None)
    for chat in range(num_chats, num_chats + _MEASURED_CHATS):
        if chat == num_chats + _MEASURED_CHATS // 8:
            timed.reset()
        clock.now_s += 1.0
        save(_chat(chat))
        if chat % _CHATS_A_BATCH == _CHATS_A_BATCH - 1:
            executor.run_due()
    return timed.us_a_record


def _chat(number: int) -> Hashes:
    return page_hashes(number * _CHAT_PAGES + np.arange(_CHAT_PAGES))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers.coded_host")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    for name, by_size in measure_placing(parser.parse_args().sizes).items():
        for size, us in by_size.items():
            print(f"{name:20} {int(size):9,} records  {us:8.1f} us a record", flush=True)


if __name__ == "__main__":
    main()
