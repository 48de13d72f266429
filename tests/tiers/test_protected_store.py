"""A store with a key: nothing is served that was not stored with it. Here of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.records.checks import sealed_header
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordError, RecordMeta, VerifyResult
from sglang_ext.tiers.remote import RemoteStore
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.remote.ranges import RangeRequest
from sglang_ext.tiers.remote.staged import START_BYTES, stage
from sglang_ext.tiers.store.remote.profiles import RemoteProfiles
from tests.faults.hostile_pages import codec_of, profile
from tests.tiers.protection_cases import KEY, OTHER_KEY
from tests.tiers.remote.remote_cases import (
    KEPT,
    LONG_BYTES,
    MISSING,
    OK,
    PAGE_BYTES,
    REJECTED,
    make_item,
    make_items,
    open_store,
    payload,
    read,
)

MODES = ("tag", "encrypt")


@contextmanager
def opened(folder: Path, mode: str, *keys: bytes) -> Iterator[RemoteStore]:
    # It is damaged on purpose, and used all the same.
    patient = BreakerConfig(max_failures=10**6)
    url = f"file://{folder}?size=1GB&free=1"
    store = open_store(url, protect=(mode, *keys), breaker=patient)
    try:
        assert store.wait_usable(300)
        yield store
    finally:
        store.close()


def values(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.hkv"))


@pytest.mark.parametrize("mode", MODES)
def test_every_flipped_byte_is_a_miss(tmp_path: Path, mode: str) -> None:
    item = make_item(1, 1000)
    with opened(tmp_path, mode) as store:
        store.put([item])
        (path,) = values(tmp_path)
        good = path.read_bytes()
        for at in [*range(0, 512, 3), *range(480, 520), *range(520, 1000, 37)]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            assert read(store, [item]) == [REJECTED], at
        path.write_bytes(good)
        assert read(store, [item]) == [OK]


def test_forged_records_swapped_names_and_other_keys_are_misses(tmp_path: Path) -> None:
    items = make_items(range(3))
    with ExitStack() as stack:
        keyed = stack.enter_context(opened(tmp_path, "tag"))
        keyless = stack.enter_context(opened(tmp_path, "plain"))
        stranger = stack.enter_context(opened(tmp_path, "tag", OTHER_KEY))
        assert keyless.put(items[:1]) == [OK]  # a right checksum, by who has no key
        assert stranger.put(items[1:2]) == [OK]
        assert keyed.put(items[2:]) == [OK]
        assert read(keyed, items) == [REJECTED, REJECTED, OK]
        assert [head.outcome for head in keyed.head([item.key for item in items])] == [
            MISSING,  # known to be bad now
            MISSING,
            OK,
        ]
        stats = keyed.stats()
        assert stats["error_rejected_unprotected"] == 1
        assert stats["error_rejected_unknown_key"] == 1
        assert read(keyless, items[2:]) == [REJECTED]
        assert keyless.stats()["error_rejected_protected"] == 1
        assert keyed.put(items) == [OK, OK, KEPT]  # what is no page of ours gives way
        assert read(keyed, items) == [OK] * 3
        one, two, _ = values(tmp_path)
        one_bytes = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(one_bytes)
        assert sorted(str(outcome) for outcome in read(keyed, items)) == [
            str(OK),
            str(REJECTED),
            str(REJECTED),
        ]
        assert keyed.stats()["error_rejected_foreign"] == 2


def test_a_header_alone_is_proved(tmp_path: Path) -> None:
    """What is asked for by its header only is not believed before either."""
    item = make_item(1)
    forged = np.concatenate([sealed_header(item.record), item.record[HEADER_BYTES:PAGE_BYTES]])
    with opened(tmp_path, "tag") as store:
        store.put([make_item(1)])
        (path,) = values(tmp_path)
        path.write_bytes(forged.tobytes())
        assert [head.outcome for head in store.head([item.key])] == [REJECTED]
        assert store.put([item]) == [OK]


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_long_records_are_proved(tmp_path: Path, mode: str) -> None:
    item = make_item(1, LONG_BYTES)
    with opened(tmp_path, mode) as store:
        store.put([item])
        parts = [path for path in values(tmp_path) if "+" in path.name]
        assert len(parts) == 5
        for path in parts:
            good = path.read_bytes()
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            assert read(store, [item]) == [REJECTED]
            path.write_bytes(good[:-1])
            assert read(store, [item]) == [REJECTED]
            path.write_bytes(good)
        first, second = parts[:2]
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
        assert read(store, [item]) == [REJECTED]


@pytest.mark.parametrize("mode", MODES)
def test_records_of_an_older_key_are_found_and_read(tmp_path: Path, mode: str) -> None:
    items = make_items(range(4))
    with opened(tmp_path, mode, KEY) as old:
        assert old.put(items[:2]) == [OK] * 2
    with opened(tmp_path, mode, OTHER_KEY, KEY) as rotated:
        assert rotated.put(items[2:]) == [OK] * 2
        assert read(rotated, items) == [OK] * 4
        assert [head.outcome for head in rotated.head([item.key for item in items])] == [OK] * 4
        starts = [RangeRequest(item.key, np.zeros(64, np.uint8)) for item in items]
        assert [result.outcome for result in rotated.read_ranges(starts)] == [OK] * 4
    with opened(tmp_path, mode, OTHER_KEY) as new:
        outcome = REJECTED if mode == "tag" else MISSING
        assert read(new, items) == [outcome] * 2 + [OK] * 2


@pytest.mark.parametrize("mode", MODES)
def test_stages_are_proved_one_by_one(tmp_path: Path, mode: str) -> None:
    plain = make_item(1, 5000, codec="hier", level=2, quality=1)
    staged = plain._replace(record=stage(plain.record, 0, (900, 2600, 5000)))
    with opened(tmp_path, mode) as store:
        assert store.put([staged]) == [OK]
        start = np.zeros(START_BYTES, np.uint8)
        store.read_ranges([RangeRequest(staged.key, start)])
        stages = store.read_stages(start, staged.key, 1 << 20)
        assert stages.failure is VerifyResult.UNAUTHENTIC
        for number, end in enumerate(stages.ends):
            at = stages.start_of(number)
            data = np.zeros(end - at, np.uint8)
            store.read_ranges([RangeRequest(staged.key, data, at)])
            cut = data[:-1].copy()
            bad = data.copy()
            bad[7] ^= 1
            assert not stages.is_sound(number, cut)
            assert not stages.is_sound(number, bad)
            assert stages.is_sound(number, data)
            assert data.tobytes() == staged.record[at:end].tobytes()
        start[530] ^= 1
        with pytest.raises(RecordError) as error:
            store.read_stages(start, staged.key, 1 << 20)
        assert error.value.kind is VerifyResult.UNAUTHENTIC
    with opened(tmp_path, "plain") as keyless:
        assert isinstance(keyless.facts(start, staged.key, 1 << 20), VerifyResult)


def test_an_encrypted_store_shows_neither_pages_nor_names(tmp_path: Path) -> None:
    items = [*make_items(range(5)), make_item(9, LONG_BYTES)]
    with opened(tmp_path, "encrypt") as store:
        assert store.put(items) == [OK] * 6
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = b"".join(str(path).encode() + path.read_bytes() for path in files)
    for item in items:
        assert item.key.page_hash.hex().encode() not in data
        assert item.key.page_hash not in data
        assert item.key.namespace.hex().encode() not in data
        for num_bytes in (PAGE_BYTES - HEADER_BYTES, LONG_BYTES - HEADER_BYTES):
            assert payload(item.key, num_bytes)[:16] not in data


@pytest.mark.parametrize("mode", MODES)
def test_a_profile_that_nobody_can_use_is_stored_anew(tmp_path: Path, mode: str) -> None:
    """What lies there since before the key was set, or is forged, withholds no other pages."""
    known = codec_of("hier")
    digest = profile().digest
    meta = RecordMeta(bytes(32), bytes(32), b"", 0, 8, "pre", "hier", 0, 1, digest)
    with opened(tmp_path, "plain") as keyless:
        assert RemoteProfiles(keyless, known).publish(meta)
    with opened(tmp_path, mode) as one, opened(tmp_path, mode) as other:
        assert RemoteProfiles(one, known).publish(meta)
        assert RemoteProfiles(other, codec_of("hier", learned=False)).obtain(meta)
        newest = max(values(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        newest.write_bytes(b"?" * 600)
        assert RemoteProfiles(one, known).publish(meta)
        assert RemoteProfiles(other, codec_of("hier", learned=False)).obtain(meta)
