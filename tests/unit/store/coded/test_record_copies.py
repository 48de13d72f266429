"""What leaves coded DRAM: by what the queue needs, in front of a disk and without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, ReadRequest, RecordCopy
from sglang_ext.tiers.coded_host import CachedDiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, VerifyResult
from sglang_ext.tiers.store.clearing import Cleared
from tests.unit.store.coded.coded_world import DIGEST, PAYLOAD, SLOT, Rig, Zstd, content, pages

RECORD = 33 << 10  # a coded page is a little shorter


class Make(Protocol):
    def __call__(self, below: str, num_records: int, policy: str = ...) -> Rig: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Rig] = []

    def rig(below: str, num_records: int, policy: str = "write_through") -> Rig:
        made.append(
            Rig(
                tmp_path / str(len(made)), Zstd(), slots=8, policy=policy, below=below,
                memory_bytes=num_records * RECORD, lookahead=True,
            )
        )  # fmt: skip
        return made[-1]

    yield rig
    for each in made:
        each.store.close(5)


def save(rig: Rig, hashes: ByteArray) -> None:
    """Saves pages, eight at a time, each a path of its own, and has them written."""
    for page in range(len(hashes)):
        rig.save(hashes[page : page + 1])
        rig.settle()


def expect(rig: Rig, request: str, hashes: ByteArray) -> None:
    assert rig.store.lookahead is not None
    rig.store.lookahead.expect(request, rig.space, hashes, 0)


def in_coded(rig: Rig, hashes: ByteArray) -> list[bool]:
    """Which pages have a record in coded DRAM."""
    rows = rig.rows(hashes)
    if not isinstance(rig.disk, CachedDiskTier):
        return [bool(rig.index.flags[row] & 2) if row >= 0 else False for row in rows.tolist()]
    copies = rig.store._books.table.copies
    assert copies is not None
    places = [Location(int(rig.index.segment[row]), int(rig.index.block[row])) for row in rows]
    there = [place in rig.disk._copies for place in places]
    assert there == copies.has(rows).tolist()
    return there


@pytest.mark.parametrize("below", ["both", "host"])
def test_what_the_queue_needs_stays_and_younger_pages_leave(make: Make, below: str) -> None:
    rig = make(below, 16)
    wanted, younger = pages("wanted", 4), pages("younger", 40)
    save(rig, wanted)
    save(rig, younger[:8])  # DRAM has room for eight: what is wanted lies coded alone
    expect(rig, "waits", wanted)
    save(rig, younger[8:])
    assert in_coded(rig, wanted) == [True] * 4
    assert sum(in_coded(rig, younger[8:])) >= 8
    assert not any(in_coded(rig, younger[:8]))
    assert rig.bring_back(wanted) == 4
    assert rig.is_exact(wanted)
    assert rig.count("coded_evicted_wanted_pages") == 0
    if below == "both":
        assert (rig.disk.num_hits, rig.disk.stats().records_read) == (4, 0)


@pytest.mark.parametrize("below", ["both", "host"])
def test_what_nobody_waits_for_any_more_leaves(make: Make, below: str) -> None:
    rig = make(below, 16)
    wanted, younger = pages("wanted", 4), pages("younger", 40)
    save(rig, wanted)
    save(rig, younger[:8])
    expect(rig, "waits", wanted)
    save(rig, younger[8:24])
    assert rig.store.lookahead is not None
    rig.store.lookahead.leave("waits")
    save(rig, younger[24:])
    assert not any(in_coded(rig, wanted))


def test_of_what_is_needed_the_last_of_the_queue_leaves(make: Make) -> None:
    rig = make("both", 16)
    first, last = pages("first", 4), pages("last", 4)
    save(rig, last)
    save(rig, first)
    save(rig, pages("push", 8))
    assert all(in_coded(rig, np.concatenate([first, last])))
    expect(rig, "first", first)
    expect(rig, "last", last)
    copies = rig.store._books.table.copies
    assert copies is not None
    with rig.store._books.table.lock:  # as if less room were left, step by step
        for num_left in range(15, 0, -1):
            copies._max_bytes = num_left * RECORD
            copies.make_room(0.0)
            of_first, of_last = (int(copies.has(rig.rows(each)).sum()) for each in (first, last))
            assert (of_first, of_last) == (min(4, num_left), max(0, min(4, num_left - 4)))


def test_a_record_whose_page_has_a_slot_is_not_needed(make: Make) -> None:
    """Requests wait for all; those whose pages lie in DRAM get them from there."""
    rig = make("both", 12)
    coded_only, both = pages("coded", 4), pages("both", 4)
    save(rig, coded_only)
    save(rig, pages("push", 4))
    save(rig, both)  # the first four leave DRAM
    expect(rig, "first", both)
    expect(rig, "second", coded_only)
    for number in range(6):  # the needed ones stay in DRAM, the others of DRAM change
        save(rig, pages(f"new{number}", 4))
    assert rig.store.ready_prefix(rig.space, both) == 4
    assert in_coded(rig, coded_only) == [True] * 4
    assert not any(in_coded(rig, both))


def test_the_place_of_a_page_that_left_is_another_pages(make: Make) -> None:
    """What was read before a page left the disk does not come to memory after that."""
    rig = make("both", 16)
    chain = pages("a", 2)
    save(rig, chain)
    (row, _) = rig.rows(chain)
    place = Location(int(rig.index.segment[row]), int(rig.index.block[row]))
    offer = RecordCopy(place, chain[0].tobytes(), b"", 1000)
    keeper, table = rig.disk.copy_keeper, rig.store._books.table
    assert keeper.keep(DIGEST, [offer], written=False) == ([True], [place])
    with table.lock:
        table.take_off_disk(np.array([row]))
    assert keeper.keep(DIGEST, [offer], written=False) == ([False], [place])
    assert keeper.keep(DIGEST, [offer], written=True) == ([False], [])
    elsewhere = offer._replace(location=Location(place.segment, place.block + 1))
    unknown = offer._replace(page_hash=bytes(32)), offer._replace(lora=bytes(range(32)))
    assert keeper.keep(DIGEST, [elsewhere, *unknown], written=False) == ([False] * 3, [])


def test_cleared_pages_give_their_room_back(make: Make) -> None:
    rig = make("both", 16)
    save(rig, pages("a", 12))
    rig.store.clear()
    rig.until(lambda: not rig.store._books.spills.pending_clears())
    assert rig.disk.memory_stats()["records"] == 0
    save(rig, pages("b", 4))
    assert in_coded(rig, pages("b", 4)) == [True] * 4
    assert rig.disk.memory_stats()["records"] == 4


def test_a_write_that_ends_in_nothing_leaves_no_record(make: Make) -> None:
    """Pages that were cleared while they were written."""
    rig = make("both", 16)
    write = rig.disk._disk.write
    written: list[list[Location | None]] = []

    def cleared(digest: bytes, slots: list[ByteArray]) -> list[Location | None]:
        written.append(write(digest, slots))
        rig.store._books.clearing.begin(lambda: Cleared([rig.space.number], [], ()))
        return written[-1]

    rig.disk._disk.write = cleared
    rig.save(pages("a", 2))
    rig.until(lambda: bool(written))
    rig.settle()
    assert rig.disk.memory_stats()["used_bytes"] == 0


def test_an_owner_that_fails_costs_a_copy_and_no_page(make: Make) -> None:
    rig = make("both", 16)
    rig.disk.copy_keeper = None

    class Failing:
        def keep(self, *_: object, **__: object) -> None:
            raise RuntimeError("injected")

    rig.disk.copy_keeper = Failing()
    chain = pages("a", 4)
    save(rig, chain)
    assert rig.disk.memory_stats()["records"] == 0
    save(rig, pages("push", 8))
    assert rig.bring_back(chain) == 4
    assert rig.is_exact(chain)


def test_readers_beside_a_writer_get_right_pages_and_the_books_balance(make: Make) -> None:
    rig = make("both", 6)
    chain, stop = pages("a", 120), threading.Event()
    save(rig, chain[:8])
    wrong: list[str] = []
    num_read = [0]

    def read(seed: int) -> None:
        rng, out, raw = np.random.default_rng(seed), aligned_array(SLOT), aligned_array(SLOT)
        while not stop.is_set():
            page = chain[rng.integers(len(chain))]
            with rig.store._books.table.lock:
                (row,) = rig.rows(page[None])
                place = Location(int(rig.index.segment[row]), int(rig.index.block[row]))
            request = ReadRequest(place, page.tobytes(), b"", out)
            if rig.disk.read(DIGEST, [request]) != [VerifyResult.OK]:
                continue  # not on disk yet
            num_read[0] += 1
            is_there = rig.store._transcoder is not None and Zstd().decode(out, raw)
            payload = raw[HEADER_BYTES : HEADER_BYTES + PAYLOAD]
            if not is_there or not (payload == content(page.tobytes())).all():
                wrong.append(page.tobytes().hex())

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for first in range(8, 120, 8):
        expect(rig, "waits", chain[first - 8 : first - 4])
        save(rig, chain[first : first + 8])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert num_read[0]
    rig.settle()
    save(rig, pages("last", 1))  # what left meanwhile is told of
    copies = rig.store._books.table.copies
    assert copies is not None
    rows = np.flatnonzero(copies.has(np.arange(rig.index.capacity)))
    places = zip(rig.index.segment[rows].tolist(), rig.index.block[rows].tolist(), strict=True)
    assert set(rig.disk._copies) == {Location(*place) for place in places}
    assert rig.disk.memory_stats()["used_bytes"] <= 6 * RECORD
