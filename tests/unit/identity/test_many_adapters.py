"""What is done to pages costs no more where pages of many adapters are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import OwnerCallbacks, RecoveredPages
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import KeySpace
from sglang_ext.tiers.store.types import ON_DISK, READY
from tests.unit.store.store_rig import DIGEST, NONE, OTHER, Make, Rig, on_disk_only, pages, rigs

ADAPTERS = 100


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each look-up was of."""
    counted: list[int] = []
    lookup, lookup_each = PageIndex.lookup, PageIndex.lookup_each

    def counting(index: PageIndex, hashes: np.ndarray, namespace: int) -> np.ndarray:
        counted.append(len(hashes))
        return lookup(index, hashes, namespace)

    def counting_each(index: PageIndex, hashes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        counted.append(len(hashes))
        return lookup_each(index, hashes, numbers)

    monkeypatch.setattr(PageIndex, "lookup", counting)
    monkeypatch.setattr(PageIndex, "lookup_each", counting_each)
    return counted


def spaces(rig: Rig) -> list[KeySpace]:
    return [rig.store.space(DIGEST, bytes([number]) * 32) for number in range(1, ADAPTERS + 1)]


def test_a_page_is_looked_for_in_its_own_key_space_alone(make: Make, looks: list[int]) -> None:
    rig = make(slots=16)
    first, *_, last = spaces(rig)
    on_disk_only(rig, pages("disk", 2))
    rig.save(pages("first", 2), space=first)
    rig.save(pages("last", 2), space=last)
    rig.settle()
    hashes = np.concatenate([pages(name, 2) for name in ("disk", "first", "last", "nowhere")])
    both = READY | ON_DISK
    stored = [ON_DISK, ON_DISK, both, both, both, both, 0, 0]
    homes = np.repeat([rig.space.number, first.number, last.number, last.number], 2)
    looks.clear()
    assert rig.store.tiers_of(hashes, homes).tolist() == stored
    assert sum(looks) == len(hashes)
    homes[5] = -1  # this one is looked for everywhere
    looks.clear()
    assert rig.store.tiers_of(hashes, homes).tolist() == stored
    assert sum(looks) == len(hashes) + rig.store.num_spaces
    assert rig.store.tiers_of(hashes).tolist() == stored


def test_of_another_epoch_nothing_is_said(make: Make) -> None:
    rig = make(slots=16)
    rig.save(pages("a", 2))
    homes = np.full(2, rig.space.number)
    assert (rig.store.tiers_of(pages("a", 2), homes) & READY).all()
    rig.store.end_epoch()
    other = rig.store.space(OTHER)
    assert not rig.store.tiers_of(pages("a", 2), homes).any()
    assert not rig.store.tiers_of(pages("a", 2), np.array([-1, other.number])).any()
    rig.store.space(DIGEST)
    assert (rig.store.tiers_of(pages("a", 2), homes) & READY).all()


def test_a_reclaimed_segment_is_looked_through_once(make: Make, looks: list[int]) -> None:
    rig = make(slots=16, lookahead=True)
    assert rig.store.lookahead is not None
    first, *_, last = spaces(rig)
    for name, space in (("base", rig.space), ("first", first), ("last", last)):
        rig.save(pages(name, 2), space=space)
    rig.settle()
    rig.store.lookahead.expect("r", last, pages("last", 1), 0)
    owner, index = OwnerCallbacks(), rig.books.table.index
    rig.store.connect(owner)
    hashes = np.concatenate([pages(name, 2) for name in ("base", "first", "last", "last")])
    names = [bytes(32), first.lora, last.lora, b"x" * 32]  # nobody has asked for the last one
    lora = np.frombuffer(b"".join(name * 2 for name in names), np.uint8).reshape(-1, 32)
    looks.clear()
    assert owner.is_hot(DIGEST, hashes, lora).tolist() == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sum(looks) == len(hashes)

    homes = np.repeat([rig.space.number, first.number, last.number], 2)
    rows = index.lookup_each(hashes[:6], homes)
    segment = int(index.segment[rows[0]])
    assert (index.segment[rows] == segment).all()
    moved = RecoveredPages(
        hashes=hashes, lora=lora, segment=np.full(8, segment + 100, np.uint32),
        block=np.arange(1, 9, dtype=np.uint32), num_blocks=np.full(8, 2, np.uint16),
        quality=np.zeros(8, np.uint8),
    )  # fmt: skip
    looks.clear()
    owner.on_moved(DIGEST, segment, moved)
    assert sum(looks) == len(hashes)
    assert index.block[rows].tolist() == [1, 2, 3, 4, 5, 6]
    rig.books.check()


def test_what_leaves_is_queued_once_by_key_space_and_root_first(make: Make) -> None:
    rig = make(slots=64, policy="write_back", index=1024)
    rig.io.open_gate.clear()
    some = spaces(rig)[:8]
    tickets = [rig.store.begin_save(space, pages(f"p{space.number}", 3), NONE) for space in some]
    for ticket in tickets:
        rig.store.finish_save(ticket, ok=True)
    rows = np.stack([ticket.rows for ticket in tickets])
    spills = rig.books.spills
    with rig.books.table.lock:
        spills.entries.clear()
        spills._num_in_entries = 0
        spills.queue_leaving(np.empty(0, np.int64))
        assert not spills.entries
        spills.queue_leaving(rows.T[::-1].ravel())  # mixed, and the deepest first
        queued = [(entry.space, entry.rows.tolist()) for entry in spills.entries]
    assert queued == [(space, mine.tolist()) for space, mine in zip(some, rows, strict=True)]
