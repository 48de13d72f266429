"""A page store over a small arena and a disk that the test holds, fails and slows."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig, Plan
from sglang_ext.tiers.store.books.books import Books

SLOT = 8192
DIGEST = hashlib.sha256(b"namespace").digest()
OTHER = hashlib.sha256(b"other").digest()
NONE = np.empty((0, 32), np.uint8)


class Gate(FileIO):
    """A disk whose reads and writes wait at a gate, or fail."""

    def __init__(self) -> None:
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.fail_reads = self.fail_writes = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.open_gate.wait(300)
        if self.fail_writes:
            raise OSError(errno.EIO, "injected")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.open_gate.wait(300)
        if self.fail_reads:
            raise OSError(errno.EIO, "injected")
        return super().preadv(fd, buffers, offset)


class Rig:
    """A store over a small arena and a disk, and the ways to use it."""

    def __init__(
        self, folder: Path, *, slots: int = 8, policy: str = "write_through", disk: bool = True,
        index: int = 256, max_bytes: int = 64 << 20, segment_bytes: int = 256 << 10,
        lookahead: bool = False, pin_share: float = 0.0, shares: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self.io = Gate()
        self.arena = HostArena(slots, SLOT)
        self.disk = None
        self.log = folder / "events.jsonl"
        if disk:
            config = DiskConfig(
                folder / "disk", max_bytes, 0, segment_bytes=segment_bytes, direct_io="off"
            )
            self.disk = DiskTier(config, io=self.io)
        placement = PolicyConfig(pin_share=pin_share, shares=shares) if lookahead else None
        store_config = PageStoreConfig(policy, str(self.log), placement)
        self.store = PageStore(self.arena, PageIndex(index), self.disk, store_config)
        if self.disk is not None:
            self.store.connect(self.disk)
        self.found = self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)

    @property
    def books(self) -> Books:
        return self.store._books

    def save(
        self, hashes: np.ndarray, ancestors: np.ndarray = NONE, space: KeySpace | None = None,
        *, ok: bool = True,
    ) -> int:  # fmt: skip
        """Saves pages; returns how many were new."""
        space = space or self.space
        ticket = self.store.begin_save(space, hashes, ancestors)
        for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            fill(self.arena.slots[slot], hashes[page].tobytes(), space)
        self.store.finish_save(ticket, ok=ok)
        return len(ticket.pages)

    def ready(self, hashes: np.ndarray, space: KeySpace | None = None) -> int:
        return self.store.ready_prefix(space or self.space, hashes)

    def on_disk(self, hashes: np.ndarray) -> int:
        """How many of the pages have an acknowledged copy on disk."""
        rows = self.books.table.index.lookup(hashes, self.space.number)
        return int((self.books.table.index.flags[rows[rows >= 0]] & 2 != 0).sum())

    def count(self, name: str) -> int:
        return self.store.counters.snapshot().get(name, 0)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline_s, self.store.stats()
            time.sleep(0.002)

    def wait(self, plan: Plan) -> None:
        self.until(lambda: plan.done)

    def settle(self) -> None:
        assert self.store.wait_idle(300)
        self.until(self._is_settled)
        self.store.check()

    def _is_settled(self) -> bool:
        with self.books.table.lock:  # without it a batch is seen neither in the queue nor pinned
            spills = self.books.spills
            is_written = not spills.entries and not spills.num_spilling  # which counts last
            return is_written and not self.arena._pins.any()

    def events(self, name: str) -> set[str]:
        text, _, _ = self.log.read_text().rpartition("\n")  # the last line may be half there
        lines = [json.loads(line) for line in text.splitlines()]
        return {page for line in lines if line["e"] == name for page in line["pages"]}


def fill(slot: np.ndarray, page_hash: bytes, space: KeySpace) -> None:
    num_bytes = SLOT - 512
    write_meta(slot, RecordMeta(page_hash, space.digest, space.lora, 0, 64, "pre"), num_bytes)
    content = hashlib.shake_128(page_hash + space.digest + space.lora).digest(num_bytes)
    slot[512:] = np.frombuffer(content, np.uint8)


def check_content(rig: Rig, hashes: np.ndarray, space: KeySpace | None = None) -> None:
    space = space or rig.space
    ticket = rig.store.pin_ready(space, hashes)
    assert ticket is not None
    for row, slot in zip(hashes, ticket.slots.tolist(), strict=True):
        wanted = hashlib.shake_128(row.tobytes() + space.digest + space.lora).digest(SLOT - 512)
        assert rig.arena.slots[slot][512:].tobytes() == wanted
    rig.store.release(ticket.slots)


def pages(name: str, count: int) -> np.ndarray:
    rows = [hashlib.sha256(f"{name}{n}".encode()).digest() for n in range(count)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


def rigs(folder: Path) -> Iterator[Callable[..., Rig]]:
    """What makes rigs in a folder; closes them all in the end. For a fixture."""
    made: list[Rig] = []

    def build(**settings: Any) -> Rig:
        made.append(Rig(folder, **settings))
        return made[-1]

    yield build
    for rig in made:
        rig.io.open_gate.set()
        rig.store.close(5)


Make = Callable[..., Rig]


def on_disk_only(rig: Rig, hashes: np.ndarray) -> None:
    rig.save(hashes)
    rig.settle()
    rig.save(pages("filler", rig.arena.num_slots))
    rig.settle()
    assert rig.ready(hashes) == 0
