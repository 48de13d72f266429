"""What every tier that keeps records does; run for each tier and each way it moves bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, ReadRequest, Tier
from sglang_ext.tiers.coded_host import CachedDiskTier, MemoryTier
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import VerifyResult
from sglang_ext.tiers.records.seals import CHECKSUMS
from tests.tiers.protection_cases import seals
from tests.tiers.tier_pages import (
    ADAPTER,
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    PackedDisk,
    is_right,
    key,
    make_slot,
    read_page,
    store,
)

OK, MISSING, FOREIGN = VerifyResult.OK, VerifyResult.MISSING, VerifyResult.FOREIGN


def _disk(
    direct_io: str,
    helper_threads: int,
    kind: type[DiskTier] = DiskTier,
    mode: str = "plain",
) -> Callable[[Path], Tier]:
    return lambda path: _disk_tier(path, direct_io, helper_threads, kind, mode)


def _disk_tier(
    path: Path,
    direct_io: str,
    helper_threads: int,
    kind: type[DiskTier] = DiskTier,
    mode: str = "plain",
) -> DiskTier:
    config = DiskConfig(
        path,
        max_bytes=64 << 20,
        min_free_bytes=0,
        segment_bytes=256 << 10,
        direct_io=direct_io,  # type: ignore[arg-type]
        helper_threads=helper_threads,
    )
    return kind(config, seals=CHECKSUMS if mode == "plain" else seals(mode))


TIERS: dict[str, Callable[[Path], Tier]] = {
    "disk-auto": _disk("auto", 1),
    "disk-buffered": _disk("off", 1),
    "disk-one-thread": _disk("auto", 0),
    "disk-three-helpers": _disk("auto", 3),
    "disk-packed": _disk("auto", 1, PackedDisk),
    "disk-packed-buffered": _disk("off", 1, PackedDisk),
    "disk-tag": _disk("auto", 1, mode="tag"),
    "disk-packed-tag": _disk("auto", 1, PackedDisk, "tag"),
    "disk-encrypt-buffered": _disk("off", 0, mode="encrypt"),
    "disk-packed-encrypt": _disk("auto", 1, PackedDisk, "encrypt"),
    "coded-host": lambda path: MemoryTier(64 << 20),
    "coded-host-disk": lambda path: CachedDiskTier(_disk_tier(path, "auto", 1), 1 << 20),
    "coded-host-disk-tag": lambda path: CachedDiskTier(
        _disk_tier(path, "auto", 1, mode="tag"), 1 << 20
    ),
    "coded-host-disk-small": lambda path: CachedDiskTier(
        _disk_tier(path, "auto", 1), 3 * SLOT_BYTES
    ),
}


@pytest.fixture(params=sorted(TIERS))
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Tier]]:
    """Closes the tier opened last, if any, and opens it again on the same place."""
    opened: list[Tier] = []

    def again() -> Tier:
        for tier in opened:
            tier.close()
        opened.append(TIERS[request.param](tmp_path / "tier"))
        return opened[-1]

    yield again
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(reopen: Callable[[], Tier]) -> Tier:
    tier = reopen()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {"model": "test"})) == 0
    return tier


def not_there(tier: Tier) -> tuple[VerifyResult, ...]:
    """What a read of a place says where no record begins; packed ones may begin in any block."""
    return (MISSING, VerifyResult.BAD_MAGIC) if isinstance(tier, PackedDisk) else (MISSING,)


def test_what_is_written_is_read(tier: Tier) -> None:
    locations = store(tier, range(100))
    assert len(set(locations)) == 100
    assert all(read_page(tier, location, n) is OK for n, location in enumerate(locations))


def test_one_call_reads_many_in_any_order_and_twice(tier: Tier) -> None:
    locations = store(tier, range(70))
    order = [*np.random.default_rng(0).permutation(70).tolist(), 3, 3, 69]
    outs = np.zeros((len(order), SLOT_BYTES), np.uint8)
    requests = [
        ReadRequest(locations[n], key(n), b"", out) for n, out in zip(order, outs, strict=True)
    ]
    assert tier.read(NAMESPACE, requests) == [OK] * len(order)
    assert all(is_right(out, key(n), NAMESPACE) for n, out in zip(order, outs, strict=True))


@pytest.mark.parametrize("shift", [1, 512, 4095])
def test_memory_need_not_be_aligned(tier: Tier, shift: int) -> None:
    room = np.zeros(5 * SLOT_BYTES + 8192, np.uint8)
    slots = [room[shift + i * SLOT_BYTES : shift + (i + 1) * SLOT_BYTES] for i in range(5)]
    for number, slot in enumerate(slots):
        slot[:] = make_slot(number)
    locations = tier.write(NAMESPACE, slots)
    room[:] = 0
    requests = [
        ReadRequest(location, key(n), b"", slot)
        for n, (location, slot) in enumerate(zip(locations, slots, strict=True))
        if location is not None
    ]
    assert tier.read(NAMESPACE, requests) == [OK] * 5
    assert all(is_right(slot, key(n), NAMESPACE) for n, slot in enumerate(slots))


def test_another_page_at_a_location_is_foreign(tier: Tier) -> None:
    first, second = store(tier, [1, 2])
    assert read_page(tier, first, 2) is FOREIGN
    assert read_page(tier, second, 1) is FOREIGN
    assert read_page(tier, first, 1, lora=ADAPTER) is FOREIGN
    assert read_page(tier, first, 1) is OK


def test_an_adapter_has_pages_of_its_own(tier: Tier) -> None:
    plain, adapted = tier.write(NAMESPACE, [make_slot(1), make_slot(1, lora=ADAPTER)])
    assert plain is not None
    assert adapted is not None
    assert read_page(tier, plain, 1) is OK
    assert read_page(tier, adapted, 1, lora=ADAPTER) is OK
    assert read_page(tier, adapted, 1) is FOREIGN


@pytest.mark.parametrize("segment", [0, 2, 77, 0xFFFFFFFF, -1, 2**40])
@pytest.mark.parametrize("block", [0, 1, 2, 3, 10**6, -1, 2**40])
def test_a_location_never_handed_out_is_missing(tier: Tier, segment: int, block: int) -> None:
    store(tier, [1])
    assert read_page(tier, Location(segment, block), 1) in not_there(tier)


def test_blocks_around_a_record_are_missing(tier: Tier) -> None:
    (location,) = store(tier, [1])
    for shift in (-1, 1, 2, 3, 1000):
        shifted = Location(location.segment, location.block + shift)
        assert read_page(tier, shifted, 1) in not_there(tier)


def test_a_useless_buffer_is_a_miss(tier: Tier) -> None:
    (location,) = store(tier, [1])
    frozen = np.zeros(SLOT_BYTES, np.uint8)
    frozen.flags.writeable = False
    useless: list[Any] = [
        np.zeros(SLOT_BYTES - 1, np.uint8),
        np.zeros(SLOT_BYTES * 2, np.uint8),
        np.zeros(SLOT_BYTES * 2, np.uint8)[::2],
        np.zeros(SLOT_BYTES, np.int8),
        np.zeros((2, SLOT_BYTES // 2), np.uint8),
        frozen,
        bytearray(SLOT_BYTES),
        None,
    ]
    for out in useless:
        assert tier.read(NAMESPACE, [ReadRequest(location, key(1), b"", out)]) == [MISSING]


def test_what_is_no_record_is_not_stored_and_stops_nothing(tier: Tier) -> None:
    slots: list[Any] = [
        make_slot(1),
        np.zeros(SLOT_BYTES, np.uint8),
        make_slot(2)[:4096],
        make_slot(3, OTHER_NAMESPACE),
        None,
        make_slot(4),
    ]
    locations = tier.write(NAMESPACE, slots)
    assert [location is not None for location in locations] == [1, 0, 0, 0, 0, 1]
    assert locations[5] is not None
    assert read_page(tier, locations[5], 4) is OK


def test_empty_calls_do_nothing(tier: Tier) -> None:
    assert tier.write(NAMESPACE, []) == []
    assert tier.read(NAMESPACE, []) == []
    tier.clear(OTHER_NAMESPACE)


def test_a_namespace_not_opened_is_a_miss(tier: Tier) -> None:
    (location,) = store(tier, [1])
    assert tier.write(OTHER_NAMESPACE, [make_slot(1, OTHER_NAMESPACE)]) == [None]
    assert read_page(tier, location, 1, OTHER_NAMESPACE) is MISSING


def test_namespaces_live_side_by_side(tier: Tier) -> None:
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES * 2, {})
    (first,) = store(tier, [1])
    (second,) = tier.write(
        OTHER_NAMESPACE, [make_slot(1, OTHER_NAMESPACE, slot_bytes=SLOT_BYTES * 2)]
    )
    assert second is not None
    assert first.segment != second.segment
    assert read_page(tier, first, 1) is OK
    assert read_page(tier, second, 1, OTHER_NAMESPACE, slot_bytes=SLOT_BYTES * 2) is OK
    assert read_page(tier, first, 1, OTHER_NAMESPACE, slot_bytes=SLOT_BYTES * 2) is MISSING


def test_pages_are_found_after_reopening(reopen: Callable[[], Tier]) -> None:
    tier = reopen()
    if not tier.persistent:
        pytest.skip("its records end with the process")
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(75))
    extra = tier.write(NAMESPACE, [make_slot(1000, lora=ADAPTER, quality=7)])
    pages = reopen().open_namespace(NAMESPACE, SLOT_BYTES, {})
    tier = reopen()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    found = {
        pages.hashes[i].tobytes(): Location(int(pages.segment[i]), int(pages.block[i]))
        for i in range(len(pages))
    }
    expected = {key(n): location for n, location in enumerate(locations)}
    assert found == expected | {key(1000): extra[0]}
    row = [pages.hashes[i].tobytes() for i in range(len(pages))].index(key(1000))
    assert pages.lora[row].tobytes() == ADAPTER
    assert pages.quality[row] == 7
    assert not np.delete(pages.lora, row, axis=0).any()
    assert all(read_page(tier, location, n) is OK for n, location in enumerate(locations))


def test_a_namespace_may_be_opened_again_while_it_is_open(tier: Tier) -> None:
    locations = store(tier, range(5))
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert len(pages) == 5
    assert read_page(tier, locations[4], 4) is OK
    assert read_page(tier, store(tier, [9])[0], 9) is OK


def test_clear_is_for_good(reopen: Callable[[], Tier]) -> None:
    tier = reopen()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    mine, others = store(tier, range(50)), store(tier, range(50), OTHER_NAMESPACE)
    tier.clear(NAMESPACE)
    assert read_page(tier, mine[0], 0) is MISSING
    assert read_page(tier, others[0], 0, OTHER_NAMESPACE) is OK
    (again,) = store(tier, [7])
    assert again.segment not in {location.segment for location in mine}
    if not tier.persistent:
        return
    tier = reopen()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 1
    assert len(tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})) == 50
    tier.clear(None)
    tier = reopen()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 0
    assert len(tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})) == 0


def test_after_close_everything_is_a_miss(tier: Tier) -> None:
    (location,) = store(tier, [1])
    tier.close()
    tier.close()
    assert read_page(tier, location, 1) is MISSING
    assert tier.write(NAMESPACE, [make_slot(2)]) == [None]
    tier.clear(None)
    with pytest.raises(TierConfigError, match="closed"):
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})


def test_no_thread_outlives_close(reopen: Callable[[], Tier]) -> None:
    before = set(threading.enumerate())
    with reopen() as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        store(tier, range(40))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("digest", "slot_bytes"), [(b"short", 8192), (NAMESPACE, 0)])
def test_an_impossible_namespace_is_refused(tier: Tier, digest: bytes, slot_bytes: int) -> None:
    with pytest.raises(TierConfigError):
        tier.open_namespace(digest, slot_bytes, {})


def test_many_readers_and_a_writer(tier: Tier) -> None:
    locations = store(tier, range(32))
    stop = threading.Event()
    wrong: list[VerifyResult] = []

    def keep_reading(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            n = int(rng.integers(32))
            result = read_page(tier, locations[n], n)
            if result is not OK:
                wrong.append(result)

    threads = [threading.Thread(target=keep_reading, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for first in range(100, 400, 30):
        store(tier, range(first, first + 30))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
