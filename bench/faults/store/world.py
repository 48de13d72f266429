"""A page store whose pages tell from their key whether they are right, and a client of it."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.faults.store.audit import Log
from bench.faults.tally import Tally, check
from sglang_ext.tiers.base import Tier
from sglang_ext.tiers.coded_host import MemoryTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, RecordMeta, write_meta
from sglang_ext.tiers.store import PageStore, PageStoreConfig

SLOT_BYTES = 16384
NAMESPACE = hashlib.sha256(b"bench.faults.store.storm").digest()
_PAYLOAD_BYTES = SLOT_BYTES - HEADER_BYTES - 700
_NUM_SLOTS = 48
_RUN_PAGES = 6
ROOMY_BYTES, FULL_BYTES = 256 << 20, 2 << 20
"""A disk with room for all that a round writes, and one that is soon full."""
_NONE = np.empty((0, 32), np.uint8)
_PATIENCE_S = 300.0  # for a state that comes soon, on any machine


def page_hash(number: int) -> bytes:
    """Key of a page."""
    return hashlib.sha256(b"storm %d" % number).digest()


def payload(page: bytes) -> ByteArray:
    """What a page holds."""
    return np.frombuffer(hashlib.shake_128(page).digest(_PAYLOAD_BYTES), np.uint8)


def open_disk(
    folder: Path, io: FileIO, *, fsync: str = "none", max_bytes: int = ROOMY_BYTES
) -> DiskTier:
    """A disk tier of small segments; if not told otherwise with room for all of a round."""
    config = DiskConfig(
        folder,
        max_bytes=max_bytes,
        min_free_bytes=0,
        segment_bytes=256 << 10,
        direct_io="off",
        fsync=fsync,  # type: ignore[arg-type]
    )
    return DiskTier(config, io=io)


class Client:
    """Saves runs of pages, asks for them again, and checks every byte that it is given.

    Args:
        tier: below DRAM; closed with the store.
        events: the store's log.
        first: number of the first page to save.
        seed: of what it does.
        tally: where wrong pages and failed calls are counted.
        write_policy: of the store; one that writes back looks ahead.
    """

    def __init__(
        self, tier: Tier, events: Path, first: int, seed: int, tally: Tally,
        write_policy: str = "write_through",
    ) -> None:  # fmt: skip
        self.tally = tally
        self.store = PageStore(
            HostArena(_NUM_SLOTS, SLOT_BYTES),
            PageIndex(8192),
            tier,
            PageStoreConfig(
                write_policy,
                str(events),
                None if write_policy == "write_through" else PolicyConfig(),
            ),
        )
        if isinstance(tier, DiskTier | MemoryTier):
            self.store.connect(tier)
        self.num_found = self.store.open_namespace(NAMESPACE, {})
        self._space = self.store.space(NAMESPACE)
        self._random = random.Random(seed)
        self._runs: list[range] = []
        self.next_page = first

    def act(self) -> None:
        """Saves a run, or asks for one, waits or changes its mind; anything raised is a failure."""
        action = self._random.random()
        try:
            if action < 0.5 or not self._runs:
                self.save()
            elif action < 0.6:
                self._ask_and_leave(self._random.choice(self._runs))
            else:
                self.ask(self._random.choice(self._runs))
        except Exception as error:
            self.tally.failed_requests += 1
            print(f"a call of the store raised {error!r}")

    def save(self) -> range:
        """Saves a run of new pages; some may find no room."""
        run = range(self.next_page, self.next_page + self._random.randint(1, _RUN_PAGES))
        self.next_page = run.stop
        hashes = _hashes(run)
        ticket = self.store.begin_save(self._space, hashes, _NONE)
        for page, slot_number in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            slot = self.store.arena.slots[slot_number]
            digest = hashes[page].tobytes()
            write_meta(slot, RecordMeta(digest, NAMESPACE, b"", 0, 64, "pre"), _PAYLOAD_BYTES)
            slot[HEADER_BYTES : HEADER_BYTES + _PAYLOAD_BYTES] = payload(digest)
        self.store.finish_save(ticket, ok=True)
        self._runs.append(run)
        return run

    def ask(self, run: range) -> int:
        """Brings a run to DRAM and checks it; returns how many pages were there."""
        hashes = _hashes(run)
        plan = self.store.plan(self._space, hashes)
        if plan is not None:
            wait_until(lambda: plan.done, "a plan did not end")
        ticket = self.store.pin_leading(self._space, hashes)
        for row, slot_number in zip(hashes, ticket.slots.tolist(), strict=False):
            slot = self.store.arena.slots[slot_number]
            found = slot[HEADER_BYTES : HEADER_BYTES + _PAYLOAD_BYTES]
            self.tally.wrong_tokens += not np.array_equal(found, payload(row.tobytes()))
        self.store.release(ticket.slots)
        if plan is not None:
            self.store.cancel_plan(plan)
        return len(ticket.slots)

    def _ask_and_leave(self, run: range) -> None:
        plan = self.store.plan(self._space, _hashes(run))
        if plan is not None:
            self.store.cancel_plan(plan)

    def spoil_free_slots(self) -> int:
        """Fills one free slot of DRAM with garbage that nobody may ever see; returns how many."""
        slots = self.store.arena.alloc(1)
        for slot in slots.tolist():
            self.store.arena.slots[slot][:] = self._random.randrange(256)
        self.store.arena.free(slots)
        return len(slots)

    def close(self) -> None:
        """Waits until nothing is under way, checks the books and closes the store."""
        check(self.store.wait_idle(_PATIENCE_S), "the store did not come to rest")
        self.store.check()
        self.store.close()


def wait_until(is_so: Callable[[], object], message: str) -> None:
    """Waits for a state.

    Raises:
        FaultCheckError: it does not come.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        check(time.monotonic() < deadline_s, message)
        time.sleep(0.001)


def acknowledged(events: Path) -> set[str]:
    """Pages that are on disk as a store's log says. A last line may be cut short."""
    log = Log()
    log.follow(events)
    return log.acknowledged


def count_lost(folder: Path, wanted: set[str], tally: Tally, last_page: int) -> int:
    """Opens a folder on a sound disk and asks for pages; returns how many are not there.

    Args:
        folder: of the disk tier.
        wanted: keys of pages.
        tally: where wrong pages are counted.
        last_page: no page has a larger number.
    """
    client = Client(open_disk(folder, FileIO()), folder / "again.jsonl", 0, 0, tally)
    numbers = [n for n in range(last_page + 1) if page_hash(n).hex() in wanted]
    check(len(numbers) == len(wanted), "the log names pages that nobody saved")
    lost = sum(client.ask(range(number, number + 1)) == 0 for number in numbers)
    client.close()
    return lost


def _hashes(run: range) -> ByteArray:
    return np.frombuffer(b"".join(page_hash(n) for n in run), np.uint8).reshape(-1, 32)
