from __future__ import annotations

import dataclasses
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiers.records.checks import (
    RecordKey,
    Sealed,
    seal,
    seal_records,
    verify,
    verify_records,
)
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    RecordError,
    RecordMeta,
    VerifyResult,
    read_meta,
    write_meta,
)

digests = st.binary(min_size=32, max_size=32)
metas = st.builds(
    RecordMeta,
    page_hash=digests,
    namespace=digests,
    lora=st.one_of(st.just(b""), digests),
    position=st.integers(0, 2**63 - 1),
    num_tokens=st.integers(0, 2**32 - 1),
    rope=st.sampled_from(["pre", "bound", "delta"]),
    codec=st.text(st.characters(codec="ascii"), min_size=1, max_size=32),
    level=st.integers(0, 255),
    quality=st.integers(0, 255),
    profile=st.binary(max_size=64),
)
META = RecordMeta(b"k" * 32, b"n" * 32, b"l" * 32, 128, 64, "pre")


def sealed(meta: RecordMeta = META, payload_bytes: int = 3000, size: int = 4096) -> Any:
    slot = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    write_meta(slot, meta, payload_bytes)
    seal(slot)
    return slot


def check(slot: Any, meta: RecordMeta = META) -> VerifyResult:
    return verify(slot, meta.page_hash, meta.namespace, meta.lora)


@given(meta=metas, payload_bytes=st.integers(0, 3584))
def test_what_is_written_is_read(meta: RecordMeta, payload_bytes: int) -> None:
    slot = sealed(meta, payload_bytes)
    assert read_meta(slot) == meta
    assert check(slot, meta) is VerifyResult.OK


@given(where=st.integers(0, HEADER_BYTES + 3000 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(where: int, bit: int) -> None:
    slot = sealed()
    slot[where] ^= 1 << bit
    assert check(slot) is not VerifyResult.OK


def test_padding_is_not_part_of_the_record() -> None:
    slot = sealed()
    slot[HEADER_BYTES + 3000 :] ^= 0xFF
    assert check(slot) is VerifyResult.OK


@given(junk=st.binary(max_size=600))
def test_junk_is_never_an_exception(junk: bytes) -> None:
    slot = np.frombuffer(junk, np.uint8)
    assert check(slot) is not VerifyResult.OK
    with pytest.raises(RecordError):
        read_meta(slot)


@given(junk=st.binary(max_size=484))
def test_a_forged_map_under_a_right_checksum_is_refused(junk: bytes) -> None:
    slot = sealed()
    slot[24:HEADER_BYTES] = 0
    slot[24:28] = np.frombuffer(struct.pack("<I", len(junk)), np.uint8)
    slot[28 : 28 + len(junk)] = np.frombuffer(junk, np.uint8)
    seal(slot)
    assert check(slot) is VerifyResult.BAD_HEADER


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", b"short"),
        ("k", "k" * 32),
        ("n", b"n" * 33),
        ("l", b"l" * 16),
        ("p", -1),
        ("p", 1.5),
        ("p", True),
        ("c", ""),
        ("c", b"raw"),
        ("v", 256),
        ("r", "post"),
        ("r", ["pre"]),
        ("q", -1),
        ("t", 2**32),
        ("h", b"h" * 65),
        ("extra", 1),
    ],
)
def test_a_field_of_a_wrong_kind_is_a_bad_header(field: str, value: object) -> None:
    slot = sealed()
    (map_bytes,) = struct.unpack_from("<I", slot.tobytes(), 24)
    fields = msgpack.unpackb(slot[28 : 28 + map_bytes].tobytes())
    packed = msgpack.packb(fields | {field: value})
    header = struct.pack("<I", len(packed)) + packed
    slot[24:HEADER_BYTES] = np.frombuffer(header.ljust(HEADER_BYTES - 24, b"\0"), np.uint8)
    seal(slot)
    assert check(slot) is VerifyResult.BAD_HEADER


@pytest.mark.parametrize(
    ("offset", "data", "expected"),
    [
        (0, b"XXXX", VerifyResult.BAD_MAGIC),
        (4, struct.pack("<H", 2), VerifyResult.PROTECTED),
        (4, struct.pack("<H", 3), VerifyResult.BAD_VERSION),
        (6, struct.pack("<H", 511), VerifyResult.BAD_HEADER),
        (8, struct.pack("<Q", 2**64 - 1), VerifyResult.BAD_HEADER),
        (8, struct.pack("<Q", 4096), VerifyResult.BAD_HEADER),
        (8, struct.pack("<Q", 2999), VerifyResult.BAD_CHECKSUM),
        (24, struct.pack("<I", 2**32 - 1), VerifyResult.BAD_HEADER),
        (24, struct.pack("<I", 485), VerifyResult.BAD_HEADER),
        (511, b"x", VerifyResult.BAD_HEADER),
        (600, b"torn", VerifyResult.BAD_CHECKSUM),
    ],
)
def test_each_kind_of_damage_has_its_name(offset: int, data: bytes, expected: VerifyResult) -> None:
    slot = sealed()
    slot[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    assert check(slot) is expected


@pytest.mark.parametrize("field", ["page_hash", "namespace", "lora"])
def test_the_full_key_is_compared(field: str) -> None:
    slot = sealed()
    asked = {"page_hash": b"k" * 32, "namespace": b"n" * 32, "lora": b"l" * 32}
    asked[field] = asked[field][:31] + b"?"
    assert verify(slot, **asked) is VerifyResult.FOREIGN
    assert verify(slot, b"k" * 32, b"n" * 32, b"") is VerifyResult.FOREIGN


def test_the_checksum_is_xxh3_of_header_rest_and_payload() -> None:
    slot = sealed()
    (stored,) = struct.unpack_from("<Q", slot.tobytes(), 16)
    assert stored == xxhash.xxh3_64_intdigest(slot[24 : HEADER_BYTES + 3000].tobytes())


@pytest.mark.parametrize(
    "change",
    [
        {"page_hash": b""},
        {"lora": b"x"},
        {"position": -1},
        {"rope": "other"},
        {"codec": "x" * 33},
        {"codec": "é"},
        {"quality": 256},
        {"level": -1},
        {"profile": bytes(65)},
    ],
)
def test_a_meta_out_of_range_is_not_written(change: dict[str, Any]) -> None:
    fields = {name: getattr(META, name) for name in RecordMeta.__slots__} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        write_meta(np.zeros(4096, np.uint8), RecordMeta(**fields), 10)


@pytest.mark.parametrize("payload_bytes", [-1, 3585])
def test_a_payload_that_does_not_fit_is_not_written(payload_bytes: int) -> None:
    with pytest.raises(ValueError, match="payload_bytes"):
        write_meta(np.zeros(4096, np.uint8), META, payload_bytes)


def test_an_unsealable_slot_says_why() -> None:
    with pytest.raises(RecordError) as error:
        seal(np.zeros(4096, np.uint8))
    assert error.value.kind is VerifyResult.BAD_MAGIC


def test_the_longest_meta_fits_in_the_header() -> None:
    meta = RecordMeta(
        b"k" * 32,
        b"n" * 32,
        b"l" * 32,
        2**63 - 1,
        2**32 - 1,
        "delta",
        "c" * 32,
        255,
        255,
        b"h" * 64,
    )
    assert read_meta(sealed(meta)) == meta


def test_an_odd_array_is_no_record() -> None:
    slot = sealed(size=8192)
    assert check(slot[::2]) is not VerifyResult.OK
    assert check(slot.reshape(2, -1)) is not VerifyResult.OK
    assert check(slot.view(np.uint16)) is not VerifyResult.OK


def test_records_are_verified_together_as_alone() -> None:
    other = RecordMeta(b"q" * 32, b"n" * 32, b"", 0, 64, "pre")
    torn, flipped = sealed(), sealed()
    torn[0] = 0
    flipped[2000] ^= 1
    odd: Any = np.zeros(512, np.uint16)
    slots = [sealed(), torn, flipped, odd, sealed(other), sealed(), sealed()[:100]]
    key = RecordKey(META.page_hash, META.namespace, META.lora)
    found = verify_records(slots, [key] * len(slots))
    assert found == [check(slot) for slot in slots]
    assert [result.value for result in found] == [
        "ok", "bad_magic", "bad_checksum", "bad_header", "foreign", "ok", "bad_header"
    ]  # fmt: skip
    assert verify_records([], []) == []


def test_records_are_sealed_together_but_for_those_that_cannot_be() -> None:
    slots = [sealed() for _ in range(4)]
    expected = [slot.copy() for slot in slots]
    for slot in slots:
        slot[16:24] = 0
    slots[1][0] = 0
    write_meta(slots[2], dataclasses.replace(META, namespace=b"o" * 32), 3000)
    before = [slot.copy() for slot in slots]
    found = seal_records(slots, META.namespace)
    assert found[0] == found[3] == Sealed(META, 3000)
    errors = [error for error in found[1:3] if isinstance(error, RecordError)]
    assert [error.kind for error in errors] == [VerifyResult.BAD_MAGIC, VerifyResult.FOREIGN]
    for at in (0, 3):
        assert (slots[at] == expected[at]).all()
    for at in (1, 2):
        assert (slots[at] == before[at]).all()
