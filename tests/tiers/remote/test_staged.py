"""Staged records: every stage is of use alone, and no damage to any byte goes unseen."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    parse_header,
    write_meta,
)
from sglang_ext.tiers.remote.staged import MAX_STAGES, START_BYTES, read_stages, stage, unstage

PAGE, SPACE = (hashlib.sha256(name).digest() for name in (b"page", b"space"))
ENDS = (HEADER_BYTES + 100, HEADER_BYTES + 350, HEADER_BYTES + 900)


def coded(codec: str = "hier", num_bytes: int = 900) -> ByteArray:
    record = np.zeros(HEADER_BYTES + num_bytes, np.uint8)
    meta = RecordMeta(PAGE, SPACE, b"", 64, 64, "pre", codec, 2, quality=1, profile=SPACE)
    write_meta(record, meta, num_bytes)
    record[HEADER_BYTES:] = np.frombuffer(hashlib.shake_128(b"x").digest(num_bytes), np.uint8)
    return record


def test_every_prefix_that_ends_at_a_stage_is_a_record() -> None:
    record = coded()
    staged = stage(record, 0, ENDS)
    seal(staged)  # as `put` does, and no checksum of the table is of the sealed bytes
    stages = read_stages(staged[:START_BYTES].copy(), 10_000)
    assert stages.ends == tuple(end + START_BYTES - HEADER_BYTES for end in ENDS)
    assert (stages.first_level, stages.meta) == (0, parse_header(record)[0])
    for last, end in enumerate(stages.ends):
        assert stages.is_sound(last, staged[stages.start_of(last) : end])
        assert stages.failure is VerifyResult.BAD_CHECKSUM
        part = unstage(stages, last, staged[START_BYTES:end])
        meta, payload_bytes = parse_header(part)
        assert (meta.level, payload_bytes) == (last, ENDS[last] - HEADER_BYTES)
        assert np.array_equal(part[HEADER_BYTES:], record[HEADER_BYTES : ENDS[last]])
    with pytest.raises(ValueError, match="do not end"):
        unstage(stages, 1, staged[START_BYTES : stages.ends[2]])


def test_damage_to_any_byte_is_seen() -> None:
    staged = stage(coded(), 0, ENDS)
    seal(staged)
    good = read_stages(staged, staged.size)
    for at in [*range(START_BYTES), *range(START_BYTES, staged.size, 7)]:
        if 16 <= at < 24:
            continue  # the checksum of the whole record, which a reader of a part cannot use
        bad = staged.copy()
        bad[at] ^= 0x10
        if at < START_BYTES:
            with pytest.raises(RecordError):
                read_stages(bad, staged.size)
            continue
        sound = [good.is_sound(n, bad[good.start_of(n) : end]) for n, end in enumerate(good.ends)]
        assert sound.count(False) == 1


def test_short_and_foreign_bytes_are_refused() -> None:
    staged = stage(coded(), 0, ENDS)
    for start in (staged[:600], staged[:HEADER_BYTES], coded(), np.zeros(START_BYTES, np.uint8)):
        with pytest.raises(RecordError):
            read_stages(start, staged.size)
    with pytest.raises(RecordError):
        read_stages(staged, staged.size - 1)  # no room


@pytest.mark.parametrize(
    "ends", [(), (700,), ENDS[::-1], (ENDS[0], ENDS[0], ENDS[2]), tuple(range(1396, 1413))]
)
def test_what_has_no_such_stages_is_not_staged(ends: tuple[int, ...]) -> None:
    assert len(ends) <= MAX_STAGES + 1
    with pytest.raises(ValueError, match="no stages"):
        stage(coded(), 0, ends)


def test_raw_records_have_no_stages() -> None:
    with pytest.raises(ValueError, match="raw"):
        stage(coded("raw"), 0, ENDS)


def test_the_bytes_are_those_of_version_one() -> None:
    staged = stage(coded(), 0, ENDS)
    assert staged[512:536].tobytes().hex() == (
        "484b564c01030000" + "64030000" + staged[524:532].tobytes().hex() + "5e040000"
    )
    assert hashlib.sha256(staged.tobytes()).hexdigest() == GOLDEN


GOLDEN = "2bb999b99b04cdbaa70ea93f3994f83ea1e1b2a4740f3ce7eb823a6372cbd363"
