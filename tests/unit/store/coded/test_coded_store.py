"""The page store with a transcoder: coded on the way to disk, decoded on the way back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    parse_header,
    read_meta,
    write_meta,
)
from sglang_ext.tiers.transcoder import PageTranscoder, coded_record, raw_header
from tests.unit.store.coded.coded_world import (
    DIGEST,
    PAYLOAD,
    SLOT,
    Rig,
    Zstd,
    content,
    lossy,
    pages,
)

Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Rig] = []

    def build(transcoder: PageTranscoder | None = None, **settings: Any) -> Rig:
        for rig in made:
            rig.store.close(5)
        made.append(Rig(tmp_path, transcoder, **settings))
        return made[-1]

    yield build
    for rig in made:
        rig.store.close(5)


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct_io", "below"), [("auto", "disk"), ("off", "disk"), ("auto", "host"), ("auto", "both")]
)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pages_come_back_as_they_were(make: Make, direct_io: str, below: str, policy: str) -> None:
    rig = make(Zstd(), policy=policy, direct_io=direct_io, below=below, slots=16)
    a = pages("a", 6)
    rig.save(a)
    rig.push_out("b")
    rig.push_out("c")
    assert rig.store.locate_prefix(rig.space, a).disk == 6
    assert rig.bring_back(a) == 6
    assert rig.is_exact(a)
    assert rig.index.num_blocks[rig.rows(a)].max() < SLOT // 4096 * 0.6
    assert rig.count("coded_pages") >= 6
    assert rig.count("encode_failures") == 0
    assert not rig.index.quality[rig.rows(a)].any()


def test_coded_pages_are_found_by_the_next_process(make: Make) -> None:
    a = pages("a", 8)
    rig = make(Zstd())
    rig.save(a)
    rig.settle()
    lengths = rig.index.num_blocks[rig.rows(a)]
    rig = make(Zstd(), slots=16)
    assert rig.found == 8
    assert (rig.index.num_blocks[rig.rows(a)] == lengths).all()
    assert rig.bring_back(a) == 8
    assert rig.is_exact(a)


def test_a_page_that_does_not_shrink_is_stored_raw(make: Make) -> None:
    noise, a = pages("n", 3, noise=True), pages("a", 3)
    rig = make(Zstd())
    rig.save(noise)
    rig.save(a)
    rig.push_out()
    assert (rig.index.num_blocks[rig.rows(noise)] == SLOT // 4096).all()
    assert rig.count("uncoded_pages") == 3
    assert rig.bring_back(noise) == 3
    assert rig.bring_back(a) == 3
    assert rig.is_exact(noise)
    assert rig.is_exact(a)


def test_the_disk_holds_more_pages(make: Make) -> None:
    held = {}
    for name, transcoder in (("coded", Zstd()), ("raw", None)):
        rig = make(transcoder, max_bytes=16 << 20)
        rig.store.clear()
        for number in range(0, 800, 8):
            rig.save(pages(f"a{number}-", 8))
            rig.settle()
        on_disk = rig.index.flags[rig.index.rows()] & 2 != 0
        held[name] = int(on_disk.sum())
        assert rig.disk.stats().used_bytes <= 16 << 20
    assert held["raw"] <= (16 << 20) // SLOT
    assert held["coded"] > 1.6 * held["raw"]


def test_work_is_done_on_the_stores_threads_and_without_its_lock(make: Make) -> None:
    seen: list[tuple[str, str, bool]] = []

    class Watching(Zstd):
        def encode(self, slot: ByteArray) -> ByteArray | None:
            self.note("encode")
            return super().encode(slot)

        def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
            self.note("decode")
            return super().decode(record, out_slot)

        def note(self, what: str) -> None:
            lock = rig.store._books.table.lock
            free = lock.acquire(timeout=60)
            if free:
                lock.release()
            seen.append((what, threading.current_thread().name.rpartition("-")[0], free))

    rig = make(Watching())
    a = pages("a", 4)
    rig.save(a)
    rig.push_out()
    assert rig.bring_back(a) == 4
    assert set(seen) == {("encode", "hier-kv", True), ("decode", "hier-kv-promote", True)}


def test_a_store_under_load_never_gives_wrong_bytes(make: Make) -> None:
    rig = make(Zstd(), slots=24)
    names = [pages(f"p{n}-", 4) for n in range(40)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        deadline_s = time.monotonic() + 300
        for number in itertools.count():
            if number >= 100 and rig.count("promoted_pages") > 20:
                return
            assert time.monotonic() < deadline_s
            hashes = names[int(rng.integers(len(names)))]
            rig.save(hashes)
            plan = rig.store.plan(rig.space, hashes)
            while plan is not None and not plan.done:
                time.sleep(0.0005)
            ticket = rig.store.pin_ready(rig.space, hashes)
            if ticket is not None:
                for slot, row in zip(ticket.slots.tolist(), hashes, strict=True):
                    data = rig.arena.slots[slot][HEADER_BYTES:][:PAYLOAD]
                    if not (data == content(row.tobytes())).all():
                        wrong.append(row.tobytes().hex())
                rig.store.release(ticket.slots)
            if plan is not None:
                rig.store.cancel_plan(plan)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.settle()
    assert not wrong
    assert rig.count("promoted_pages") > 20
    assert not [name for name in rig.store.stats() if name.startswith("rejected")]


# ---- switching codecs ----------------------------------------------------------------------------


def test_without_its_codec_a_coded_page_is_a_miss(make: Make) -> None:
    a, noise = pages("a", 3), pages("n", 3, noise=True)
    rig = make(Zstd())
    rig.save(a)
    rig.save(noise)
    rig = make(None)
    assert rig.found == 6
    assert rig.bring_back(noise) == 3
    assert rig.is_exact(noise)
    assert rig.bring_back(a) == 0
    assert rig.count("rejected_codec") == 3
    assert rig.save(a) == 3, "it can be saved again"
    rig.push_out()
    assert rig.bring_back(a) == 3
    assert rig.is_exact(a)
    rig = make(Zstd())
    assert rig.bring_back(a) == 3
    assert rig.is_exact(a)


def test_a_transcoder_that_only_decodes_reads_what_is_there(make: Make) -> None:
    a, b = pages("a", 3), pages("b", 3)
    make(Zstd()).save(a)
    rig = make(Zstd(encodes=False))
    rig.save(b)
    rig.push_out()
    assert rig.bring_back(a) == 3
    assert rig.is_exact(a)
    assert (rig.index.num_blocks[rig.rows(b)] == SLOT // 4096).all()
    assert rig.count("coded_pages") == 0


# ---- transcoders that misbehave ------------------------------------------------------------------


def other_page(meta: RecordMeta) -> RecordMeta:
    return RecordMeta(bytes(32), meta.namespace, b"", meta.position, meta.num_tokens, "pre")


ENCODERS: dict[str, Callable[[ByteArray, ByteArray], Any]] = {
    "another page": lambda slot, record: coded_record(
        other_page(read_meta(slot)), record[HEADER_BYTES:], codec="zstd"
    ),
    "no record": lambda slot, record: record[7:],
    "raw": lambda slot, record: slot,
    "not bytes": lambda slot, record: record.view(np.int8),
    "no array": lambda slot, record: record.tobytes(),
    "an error": lambda slot, record: 1 // 0,
}


@pytest.mark.parametrize("fault", sorted(ENCODERS))
def test_a_failing_encoder_costs_size_only(
    make: Make, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Zstd):
        def encode(self, slot: ByteArray) -> ByteArray | None:
            record = super().encode(slot)
            assert record is not None
            found: ByteArray | None = ENCODERS[fault](slot, record)
            return found

    rig = make(Faulty())
    a = pages("a", 4)
    rig.save(a)
    rig.settle()
    assert rig.count("encode_failures") == 4
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1, "said once"
    rig.push_out()
    assert rig.bring_back(a) == 4
    assert rig.is_exact(a)


def test_a_page_never_gets_better_by_being_coded(make: Make) -> None:
    class Flattering(Zstd):
        def encode(self, slot: ByteArray) -> ByteArray | None:
            meta = read_meta(slot)
            exact = RecordMeta(
                meta.page_hash, DIGEST, b"", meta.position, meta.num_tokens, meta.rope
            )
            return coded_record(exact, slot[HEADER_BYTES:][:100], codec="zstd")

    rig = make(Flattering())
    rig.save(pages("a", 2), quality=1)
    rig.settle()
    assert rig.count("encode_failures") == 2


def decode_nothing(record: ByteArray, out_slot: ByteArray) -> bool:
    return True


def decode_another_page(record: ByteArray, out_slot: ByteArray) -> bool:
    write_meta(out_slot, other_page(read_meta(record)), PAYLOAD)
    return True


def decode_still_coded(record: ByteArray, out_slot: ByteArray) -> bool:
    out_slot[: record.size] = record
    return True


def decode_flattering(record: ByteArray, out_slot: ByteArray) -> bool:
    meta = raw_header(read_meta(record))
    exact = RecordMeta(meta.page_hash, DIGEST, b"", meta.position, meta.num_tokens, meta.rope)
    write_meta(out_slot, exact, PAYLOAD)
    return True


def decode_with_an_error(record: ByteArray, out_slot: ByteArray) -> bool:
    raise IndexError("a decoder's bug")


@pytest.mark.parametrize(
    "decode",
    [
        lambda record, out_slot: False,
        decode_nothing,
        decode_another_page,
        decode_still_coded,
        decode_flattering,
        decode_with_an_error,
    ],
)
def test_what_cannot_be_decoded_is_a_miss(
    make: Make, decode: Callable[[ByteArray, ByteArray], bool]
) -> None:
    class Faulty(Zstd):
        def decode(self, record: ByteArray, out_slot: ByteArray) -> bool:
            return decode(record, out_slot)

    rig = make(Faulty(quality=1))
    a = pages("a", 3)
    rig.save(a)
    rig.push_out()
    assert rig.bring_back(a) == 0
    assert rig.count("rejected_codec") == 3
    assert (rig.rows(a) == -1).all(), "forgotten, so that it can be saved again"
    assert rig.arena.num_free == 3
    assert rig.save(a) == 3


# ---- quality -------------------------------------------------------------------------------------


def test_a_lossy_copy_on_disk_leaves_the_page_in_dram_exact(make: Make) -> None:
    rig = make(Zstd(quality=1))
    a = pages("a", 4)
    rig.save(a)
    rig.settle()
    assert not rig.index.quality[rig.rows(a)].any()
    assert (rig.index.disk_quality[rig.rows(a)] == 1).all()
    assert rig.store.ready_prefix(rig.space, a, 0) == 4
    assert rig.is_exact(a)
    rig.push_out()
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    assert rig.store.locate_prefix(rig.space, a, 0).disk == 0, "no exact copy is left"
    assert rig.bring_back(a) == 4
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    assert rig.store.ready_prefix(rig.space, a, 0) == 0
    for data, row in zip(rig.payloads(a), a, strict=True):
        np.testing.assert_array_equal(data, lossy(content(row.tobytes())))


def test_quality_outlives_a_restart(make: Make) -> None:
    a, noise = pages("a", 3), pages("n", 3, noise=True)
    rig = make(Zstd(quality=1))
    rig.save(a)
    rig.settle()
    rig = make(Zstd())
    rig.save(noise)
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    rig.push_out()
    assert rig.bring_back(a) == 3
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    assert not rig.index.quality[rig.rows(noise)].any()


@pytest.mark.parametrize("transcoder", [Zstd(), None])
def test_an_exact_codec_keeps_a_lossy_page_lossy(
    make: Make, transcoder: PageTranscoder | None
) -> None:
    rig = make(transcoder)
    a = pages("a", 3)
    rig.save(a, quality=1)
    rig.settle()
    assert (rig.index.disk_quality[rig.rows(a)] == 1).all()
    rig = make(transcoder)
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    assert rig.bring_back(a) == 3
    assert (rig.index.quality[rig.rows(a)] == 1).all()
    assert rig.is_exact(a)


def test_an_exact_page_in_the_place_of_a_lossy_one_is_what_counts(make: Make) -> None:
    rig = make(Zstd())
    a = pages("a", 3)
    rig.save(a, quality=1)
    rig.settle()
    assert rig.save(a) == 3
    rig.settle()
    assert not rig.index.disk_quality[rig.rows(a)].any()
    rig = make(Zstd())
    assert not rig.index.quality[rig.rows(a)].any(), "of two records the better one"
    assert rig.bring_back(a) == 3


# ---- damage --------------------------------------------------------------------------------------


class Damaged:
    """Coded pages on disk, and a store that looks for them."""

    def __init__(self, make: Make) -> None:
        self.hashes = pages("a", 12)
        make(Zstd(), slots=16).save(self.hashes)
        self.transcoder = Zstd()
        self.rig = make(self.transcoder, slots=16)
        assert self.rig.found == 12
        self.places = [self.rig.record(page) for page in self.hashes]
        self.good = [self.load(n) for n in range(12)]

    def load(self, number: int) -> bytes:
        path, offset, length = self.places[number]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def save(self, number: int, data: bytes) -> None:
        path, offset, length = self.places[number]
        assert len(data) <= length
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def misses(self) -> dict[str, int]:
        """Reads every page; returns what was rejected. None may be right by accident."""
        for page in self.hashes:
            assert self.rig.bring_back(page[None]) == 0
        stats = self.rig.store.stats()
        return {name: count for name, count in stats.items() if name.startswith("rejected")}


def test_flipped_bits_are_found_before_anything_is_decoded(make: Make) -> None:
    damaged = Damaged(make)
    rng = np.random.default_rng(1)
    for number, good in enumerate(damaged.good):
        _, num_bytes = parse_header(np.frombuffer(good, np.uint8))
        data = bytearray(good)
        data[16 + int(rng.integers(HEADER_BYTES - 16 + num_bytes))] ^= 1 << int(rng.integers(8))
        damaged.save(number, bytes(data))
    assert sum(damaged.misses().values()) == 12
    assert damaged.transcoder.num_decoded == 0


def test_torn_and_swapped_records_are_misses(make: Make) -> None:
    damaged = Damaged(make)
    for number, good in enumerate(damaged.good):
        other = damaged.good[(number + 1) % 12]
        if number % 3 == 0:
            damaged.save(number, good[: len(good) // 2].ljust(len(good), b"\0"))
        elif number % 3 == 1:
            damaged.save(number, good[:4096] + other[4096 : len(good)])
        else:
            other = min((g for g in damaged.good if g is not good), key=len)
            damaged.save(number, other[: len(good)])
    rejected = damaged.misses()
    assert sum(rejected.values()) == 12
    assert rejected["rejected_foreign"] >= 2
    assert damaged.transcoder.num_decoded == 0


def test_an_intact_record_of_nonsense_is_a_miss(make: Make) -> None:
    """Right checksum, right key, and a payload that no encoder made."""
    damaged = Damaged(make)
    rng = np.random.default_rng(2)
    for number, good in enumerate(damaged.good):
        data = np.frombuffer(bytearray(good), np.uint8)
        meta, num_bytes = parse_header(data)
        if number % 3 == 0:  # cut
            write_meta(data, meta, int(rng.integers(num_bytes)))
        elif number % 3 == 1:
            data[HEADER_BYTES + int(rng.integers(18)) :][:4] ^= 0xFF
        else:
            data[HEADER_BYTES : HEADER_BYTES + num_bytes] = rng.integers(0, 256, num_bytes)
        seal(data)
        damaged.save(number, data.tobytes())
    rejected = damaged.misses()
    assert rejected == {"rejected_codec": 12}


def test_a_codec_of_another_release_is_a_miss(make: Make) -> None:
    damaged = Damaged(make)
    for number, good in enumerate(damaged.good):
        data = np.frombuffer(bytearray(good), np.uint8)
        meta, num_bytes = parse_header(data)
        later = coded_record(meta, data[HEADER_BYTES:][:num_bytes], codec="later", level=9)
        seal(later)
        damaged.save(number, later.tobytes())
    assert damaged.misses() == {"rejected_codec": 12}
