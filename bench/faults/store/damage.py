"""Damaged records under the page store itself, without a server: many, in seconds."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import numpy as np

from bench.faults.records import DAMAGES, Spot, find_records
from bench.faults.tally import Tallies, check
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig

NUM_PAGES = 64
NUM_DAMAGED = 42
_SLOT_BYTES = 24576
_PATIENCE_S = 300.0  # for a state that comes soon, on any machine
_PAYLOAD_BYTES = _SLOT_BYTES - HEADER_BYTES - 1000
_NAMESPACE = hashlib.sha256(b"bench.faults").digest()
_PAGES = [hashlib.sha256(b"page %d" % number).digest() for number in range(NUM_PAGES)]


def damage_store(folder: Path, num_rounds: int, tallies: Tallies) -> None:
    """Damages `NUM_DAMAGED` of `NUM_PAGES` pages a round; asks the store for all of them.

    Args:
        folder: for the disk tier.
        num_rounds: rounds; the damage of one is undone before the next.
        tallies: where results go; a wrong page counts as wrong tokens.

    Raises:
        FaultCheckError: a damaged record was not counted, once and under its kind.
    """
    store, disk = _open(folder)
    _fill(store)
    store.close()
    spots = find_records(folder)
    check(len(spots) == NUM_PAGES, f"expected {NUM_PAGES} pages on disk, found {len(spots)}")
    files = {path: path.read_bytes() for path in {spot.path for spot in spots.values()}}
    rng = random.Random(11)
    for number in range(num_rounds):
        store, disk = _open(folder)
        damaged = _damage(spots, rng, cut=number % 3 == 2)
        _ask_for_all(store, disk, damaged, tallies)
        store.close()
        for path, content in files.items():
            path.write_bytes(content)


def _open(folder: Path) -> tuple[PageStore, DiskTier]:
    # Buffered: the damage is done through the page cache.
    config = DiskConfig(
        folder, max_bytes=64 << 20, min_free_bytes=0, segment_bytes=512 << 10, direct_io="off"
    )
    disk = DiskTier(config)
    store = PageStore(
        HostArena(2 * NUM_PAGES, _SLOT_BYTES), PageIndex(1024), disk, PageStoreConfig()
    )
    store.connect(disk)
    store.open_namespace(_NAMESPACE, {})
    return store, disk


def _fill(store: PageStore) -> None:
    space = store.space(_NAMESPACE)
    none = np.empty((0, 32), np.uint8)
    for page in _PAGES:
        ticket = store.begin_save(space, _hashes(page), none)
        slot = store.arena.slots[int(ticket.slots[0])]
        write_meta(slot, RecordMeta(page, _NAMESPACE, b"", 0, 64, "pre"), _PAYLOAD_BYTES)
        slot[HEADER_BYTES : HEADER_BYTES + _PAYLOAD_BYTES] = _payload(page)
        store.finish_save(ticket, ok=True)


def _damage(spots: dict[str, Spot], rng: random.Random, *, cut: bool) -> dict[str, str]:
    """Damages pages and returns the kind for each; with `cut`, ends one file early too."""
    pages = rng.sample(sorted(spots), NUM_DAMAGED)
    good = {page: spot.load() for page, spot in spots.items()}
    damaged: dict[str, str] = {}
    for number, page in enumerate(pages):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        other = good[rng.choice([each for each in spots if each != page])]
        spots[page].store(DAMAGES[kind](good[page], other, rng))
        damaged[page] = kind
    if cut:
        whole = sorted(set(spots) - set(pages), key=lambda page: (-len(_behind(spots, page)), page))
        at = rng.choice(whole[:8])
        spots[at].cut()
        damaged.update(dict.fromkeys(_behind(spots, at), "truncated_file"))
    return damaged


def _behind(spots: dict[str, Spot], page: str) -> list[str]:
    """The pages from one on to the end of its file; the store's threads decide how many."""
    at = spots[page]
    return [p for p, s in spots.items() if s.path == at.path and s.offset >= at.offset]


def _ask_for_all(
    store: PageStore, disk: DiskTier, damaged: dict[str, str], tallies: Tallies
) -> None:
    space = store.space(_NAMESPACE)
    for page in _PAGES:
        kind = damaged.get(page.hex())
        tally = tallies[f"store_{kind or 'undamaged_neighbour'}"]
        tally.injected += kind is not None
        try:
            plan = store.plan(space, _hashes(page))
            deadline = time.monotonic() + _PATIENCE_S
            while plan is not None and not plan.done and time.monotonic() < deadline:
                time.sleep(0.0005)
            ticket = store.pin_ready(space, _hashes(page))
        except Exception:
            tally.failed_requests += 1
            continue
        if ticket is None:
            tally.lost_acknowledged_pages += kind is None
            continue
        slot = store.arena.slots[int(ticket.slots[0])]
        found = slot[HEADER_BYTES : HEADER_BYTES + _PAYLOAD_BYTES]
        tally.wrong_tokens += not np.array_equal(found, _payload(page))
        store.release(ticket.slots)
        check(kind is None, f"a page with {kind} was served")
        if plan is not None:
            store.cancel_plan(plan)
    check(store.wait_idle(_PATIENCE_S), "the store did not come to rest")
    store.check()
    _check_counts(store.stats(), disk.stats().errors, len(damaged))


def _check_counts(stats: dict[str, int], errors: dict[str, int], num_damaged: int) -> None:
    rejected = {name: n for name, n in stats.items() if name.startswith("rejected_")}
    check(sum(rejected.values()) == num_damaged, f"{num_damaged} damaged, counted {rejected}")
    by_disk = {f"rejected_{kind}": n for kind, n in errors.items()}
    check(by_disk == rejected, f"the store counted {rejected}, its disk tier {errors}")


def _hashes(page: bytes) -> ByteArray:
    return np.frombuffer(page, np.uint8).reshape(1, 32)


def _payload(page: bytes) -> ByteArray:
    return np.frombuffer(hashlib.shake_128(page).digest(_PAYLOAD_BYTES), np.uint8)
