"""What is found after a restart, in whatever state the files were left."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.base import Location, RecoveredPages
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import (
    LATEST_VERSION,
    SegmentHeader,
    SegmentTable,
    decode_header,
    encode_footer,
    encode_header,
    record_offset,
)
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.tier_pages import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT_BYTES,
    key,
    make_slot,
    read_page,
    store,
)

OpenTier = Callable[..., DiskTier]
FOLDER = NAMESPACE.hex()[:16]


class NoSeal(FileIO):
    """Keeps segments as a killed process leaves them: preallocated, without a footer."""

    def truncate(self, fd: int, num_bytes: int) -> None:
        raise OSError(5, "killed")

    def pwritev(self, fd: int, buffers: object, offset: int) -> int:
        data = buffers[0]  # type: ignore[index]
        if bytes(data[:4]) == b"HKVF":
            raise OSError(5, "killed")
        return super().pwritev(fd, buffers, offset)  # type: ignore[arg-type]


def write_and_leave(
    open_tier: OpenTier, numbers: range, *, sealed: bool
) -> tuple[list[Location], list[Path]]:
    """Writes pages, closes, and returns their locations and the segment files."""
    tier = open_tier(io=None if sealed else NoSeal())
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, numbers)
    folder = tier._config.path / FOLDER
    tier.close()
    return locations, sorted(folder.glob("*.hkv"))


def found(pages: RecoveredPages) -> dict[bytes, Location]:
    return {
        pages.hashes[row].tobytes(): Location(int(pages.segment[row]), int(pages.block[row]))
        for row in range(len(pages))
    }


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_namespace_that_could_not_be_opened_takes_nothing(open_tier: OpenTier) -> None:
    """What is live in its segments is not known: what was written would take its place."""
    write_and_leave(open_tier, range(4), sealed=True)
    tier = open_tier()

    def enter(pages: RecoveredPages) -> None:
        raise OSError(24, "too many open files")

    with pytest.raises(OSError, match="too many"):
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, enter=enter)
    assert tier.write(NAMESPACE, [make_slot(9)]) == [None]
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 4
    assert tier.write(NAMESPACE, [make_slot(9)]) != [None]


def test_an_unsealed_segment_is_recovered_and_sealed(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=False)
    before = path.stat().st_size
    tier = open_tier()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert found(pages) == {key(n): at for n, at in enumerate(locations)}
    assert path.stat().st_size == 4096 + 20 * SLOT_BYTES + 4096 < before
    assert tier.stats().errors == {}
    assert tier.stats().used_bytes == path.stat().st_size
    assert all(read_page(tier, at, n) is VerifyResult.OK for n, at in enumerate(locations))


def test_recovery_of_an_unsealed_segment_stops_at_the_first_hole(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=False)
    overwrite(path, record_offset(12, SLOT_BYTES) + 700, b"torn")
    tier = open_tier()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert found(pages) == {key(n): locations[n] for n in range(12)}
    assert read_page(tier, locations[12], 12) is VerifyResult.MISSING


def test_an_empty_unsealed_segment_is_removed(open_tier: OpenTier) -> None:
    _, (path,) = write_and_leave(open_tier, range(3), sealed=False)
    overwrite(path, record_offset(0, SLOT_BYTES), b"\0" * 512)
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 0
    assert not path.exists()
    assert tier.stats().used_bytes == 0


@pytest.mark.parametrize("from_end", [1, 9, 56, 128, 4000, 4096])
def test_a_damaged_footer_costs_a_scan_and_no_page(open_tier: OpenTier, from_end: int) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=True)
    size = path.stat().st_size
    overwrite(path, size - from_end, bytes([path.read_bytes()[size - from_end] ^ 1]))
    tier = open_tier()
    assert found(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == {
        key(n): at for n, at in enumerate(locations)
    }
    assert tier.stats().errors == {"damaged_footer": 1}
    tier.close()
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 20
    assert tier.stats().errors == {}


def test_a_scan_behind_a_damaged_footer_skips_bad_records(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=True)
    overwrite(path, path.stat().st_size - 60, b"damage")
    overwrite(path, record_offset(5, SLOT_BYTES) + 600, b"damage")
    overwrite(path, record_offset(19, SLOT_BYTES), b"damage")
    for _ in range(2):  # by the scan, then by the footer that it wrote
        tier = open_tier()
        pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        assert found(pages) == {key(n): locations[n] for n in range(19) if n != 5}
        assert read_page(tier, locations[18], 18) is VerifyResult.OK
        assert read_page(tier, locations[5], 5) is not VerifyResult.OK
        tier.close()


def write_until_full(open_tier: OpenTier) -> tuple[list[Location], Path]:
    """Fills a segment of slots to its last: its file is as long as before it was sealed."""
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(20))
    path = tier._config.path / FOLDER / f"seg-{locations[0].segment:08d}.hkv"
    header = decode_header(path.read_bytes()[:4096])
    assert header is not None
    locations += store(tier, range(20, header.num_slots))
    assert {location.segment for location in locations} == {header.segment_id}
    tier.close()
    assert path.stat().st_size == header.file_bytes
    return locations, path


@pytest.mark.parametrize("from_end", [1, 56, 128, 4096])
def test_a_full_segment_with_a_damaged_footer_is_read_behind_holes(
    open_tier: OpenTier, from_end: int
) -> None:
    """Its length does not tell that it was sealed, and nothing of it is writing's end."""
    locations, path = write_until_full(open_tier)
    size, last = path.stat().st_size, len(locations) - 1
    overwrite(path, size - from_end, bytes([path.read_bytes()[size - from_end] ^ 1]))
    overwrite(path, record_offset(5, SLOT_BYTES) + 600, b"damage")
    for errors in ({"damaged_footer": 1}, {}):  # by the scan, then by the footer that it wrote
        tier = open_tier()
        pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        assert found(pages) == {key(n): at for n, at in enumerate(locations) if n != 5}
        assert tier.stats().errors == errors
        assert read_page(tier, locations[last], last) is VerifyResult.OK
        tier.close()


@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_header_costs_no_page(open_tier: OpenTier, sealed: bool) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=sealed)
    overwrite(path, 20, b"damage")
    tier = open_tier()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert found(pages) == {key(n): at for n, at in enumerate(locations)}
    assert tier.stats().used_bytes == path.stat().st_size


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 4096 + 5 * SLOT_BYTES + 77])
def test_a_cut_file_gives_what_is_left_of_it(open_tier: OpenTier, num_bytes: int) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=True)
    os.truncate(path, num_bytes)
    tier = open_tier()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    left = max(0, num_bytes - 4096) // SLOT_BYTES
    assert found(pages) == {key(n): locations[n] for n in range(left)}


def test_temp_files_go_and_foreign_files_stay(open_tier: OpenTier, tmp_path: Path) -> None:
    _, (path,) = write_and_leave(open_tier, range(3), sealed=True)
    root, folder = tmp_path / "disk", tmp_path / "disk" / FOLDER
    temps = [
        folder / "seg-00000009.hkv.tmp",
        folder / "ns.msgpack.tmp",
        root / "folder.msgpack.tmp",
        root / "direct-io-probe.tmp",
    ]
    foreign = [
        folder / "seg-00000050.hkv",  # named as ours are, and not ours
        folder / "seg-1.hkv",
        folder / "seg-0000000001.hkv",
        folder / "notes.tmp",
        folder / "README",
        root / "README",
        root / "0123456789abcdef" / "seg-00000001.hkv",
        root / "not-a-namespace" / "seg-00000001.hkv.tmp",
    ]
    for file in temps + foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"somebody's\n" * 5000)
    tier = open_tier()
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert len(pages) == 3
    assert not [file for file in temps if file.exists()]
    assert tier.stats().used_bytes == path.stat().st_size
    assert tier.stats().errors == {"foreign_file": 1}
    assert store(tier, [77])[0].segment > 50
    tier.clear(None)
    tier.close()
    assert all(file.read_bytes() == b"somebody's\n" * 5000 for file in foreign)


def test_a_segment_of_another_id_or_namespace_is_foreign(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(5), sealed=True)
    shutil.copy(path, path.with_name("seg-00000040.hkv"))
    tier = open_tier()
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    other_folder = path.parent.parent / OTHER_NAMESPACE.hex()[:16]
    tier.close()
    shutil.copy(path, other_folder / path.name)
    tier = open_tier()
    assert found(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == {
        key(n): at for n, at in enumerate(locations)
    }
    assert len(tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})) == 0
    assert tier.stats().errors == {"foreign_file": 2}
    assert read_page(tier, Location(40, 1), 0) is VerifyResult.MISSING
    assert read_page(tier, locations[0], 0, OTHER_NAMESPACE) is VerifyResult.MISSING


def test_a_segment_of_a_later_format_is_left_alone(open_tier: OpenTier) -> None:
    _, (path,) = write_and_leave(open_tier, range(5), sealed=True)
    data = bytearray(path.read_bytes())
    import xxhash

    data[-124:-122] = (LATEST_VERSION + 1).to_bytes(2, "little")
    data[-8:] = xxhash.xxh3_64_digest(bytes(data[-128:-8]))[::-1]
    path.write_bytes(data)
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 0
    assert tier.stats().errors == {"future_version": 1}
    tier.close()
    assert path.read_bytes() == data


def test_records_of_another_size_are_stale(open_tier: OpenTier) -> None:
    locations, _ = write_and_leave(open_tier, range(5), sealed=True)
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, 2 * SLOT_BYTES, {})) == 0
    assert tier.stats().errors == {"stale_layout": 1}
    assert read_page(tier, locations[0], 0) is VerifyResult.MISSING
    assert tier.stats().used_bytes > 0, "it still counts, and can be reclaimed"


def test_ids_are_never_used_again(open_tier: OpenTier) -> None:
    seen: set[int] = set()
    for _ in range(5):
        tier = open_tier()
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        ids = {at.segment for at in store(tier, range(40))}
        assert not ids & seen
        seen |= ids
        tier.clear(None)
        tier.close()


class CountingDisk(FileIO):
    """Counts what is read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().preadv(fd, buffers, offset)
        self.num_bytes += done
        return done


def test_ten_gigabytes_are_found_by_their_footers(open_tier: OpenTier, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / FOLDER
    folder.mkdir(parents=True)
    slot_bytes, num_records, num_segments = 256 << 10, 1000, 40
    rng = np.random.default_rng(0)
    for segment_id in range(1, num_segments + 1):
        table = SegmentTable(slot_bytes // 4096)
        for page_hash in rng.integers(0, 256, (num_records, 32), np.uint8):
            table.add(page_hash.tobytes(), b"", 0)
        end = record_offset(num_records, slot_bytes)
        header = SegmentHeader(segment_id, num_records, slot_bytes, end + (1 << 20), NAMESPACE)
        with (folder / f"seg-{segment_id:08d}.hkv").open("wb") as file:
            file.write(encode_header(header))
            file.seek(end)
            file.write(encode_footer(table, segment_id, NAMESPACE))
    disk = CountingDisk()
    tier = open_tier(max_bytes=20 << 30, segment_bytes=256 << 20, io=disk)
    pages = tier.open_namespace(NAMESPACE, slot_bytes, {})
    assert disk.num_bytes < 10**9 // 100, "more than the footers was read"
    assert len(pages) == num_records * num_segments
    assert tier.stats().used_bytes > 10 * 10**9


def stretch(path: Path, offset: int, *, at: int) -> None:
    """Cuts a segment at `offset` and puts what lay there, but for its end, behind a hole, at `at`.

    On disk the file stays as small as it was, and it has no footer any more.
    """
    data = path.read_bytes()[offset : offset + SLOT_BYTES]
    os.truncate(path, offset)
    overwrite(path, at, data)


@pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
def test_a_hole_is_not_read_however_long_it_is(open_tier: OpenTier, packed: bool) -> None:
    """Who may write to the folder makes a file of terabytes from one block."""
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, packed=packed)
    locations = store(tier, range(20))
    (path,) = (tier._config.path / FOLDER).glob("*.hkv")
    tier.close()
    far = 1 + (1 << 18 if packed else 1 << 20)
    stretch(path, locations[19].block * 4096, at=far * 4096)
    disk = CountingDisk()
    tier = open_tier(io=disk, max_bytes=64 << 30)
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, packed=packed)
    assert disk.num_bytes < 64 << 20
    moved = Location(locations[19].segment, far)
    assert found(pages) == {key(n): at for n, at in enumerate([*locations[:19], moved])}
    assert read_page(tier, moved, 19, num_blocks=2) is VerifyResult.OK
    tier.close()
    tier = open_tier(max_bytes=64 << 30)
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, packed=packed)) == 20
    assert tier.stats().errors == {}


@pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
def test_what_lies_between_holes_costs_no_more_than_it_is_long(
    open_tier: OpenTier, packed: bool
) -> None:
    """Nor do blocks with holes between them make a start read what is not there."""
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, packed=packed)
    locations = store(tier, range(20))
    (path,) = (tier._config.path / FOLDER).glob("*.hkv")
    tier.close()
    last = path.read_bytes()[locations[19].block * 4096 :][:SLOT_BYTES]
    os.truncate(path, locations[19].block * 4096)
    for number in range(1, 64):
        overwrite(path, number * (8 << 20), b"x" * 4096)
    far = 1 + (64 << 11)
    overwrite(path, far * 4096, last)
    disk = CountingDisk()
    tier = open_tier(io=disk, max_bytes=64 << 30)
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {}, packed=packed)
    moved = Location(locations[19].segment, far)
    assert found(pages) == {key(n): at for n, at in enumerate([*locations[:19], moved])}
    assert disk.num_bytes < 16 << 20


def test_a_hole_of_more_places_than_a_segment_has_ends_it(open_tier: OpenTier) -> None:
    locations, (path,) = write_and_leave(open_tier, range(20), sealed=True)
    stretch(path, locations[19].block * 4096, at=1 << 40)
    disk = CountingDisk()
    tier = open_tier(io=disk)
    pages = tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert disk.num_bytes < 64 << 20
    assert found(pages) == {key(n): locations[n] for n in range(19)}


def test_ages_outlive_a_restart(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=2 << 20)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = [store(tier, range(n, n + 28)) for n in range(0, 28 * 5, 28)]
    assert len({batch[0].segment for batch in locations}) == 5
    assert read_page(tier, locations[0][0], 0) is VerifyResult.OK
    tier.close()
    tier = open_tier(max_bytes=2 << 20)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    dropped: list[int] = []
    tier.on_drop = lambda digest, segment_id: dropped.append(segment_id)
    while not dropped:
        tier.write(NAMESPACE, [make_slot(9999)])
    assert dropped[0] == locations[1][0].segment


@pytest.mark.parametrize("name", ["folder.msgpack", f"{FOLDER}/ns.msgpack", "segment"])
def test_a_pipe_in_a_files_place_holds_nobody_up(
    open_tier: OpenTier, tmp_path: Path, name: str
) -> None:
    """Opening one for reading waits for a writer, which never comes."""
    locations, paths = write_and_leave(open_tier, range(5), sealed=True)
    pipe = paths[0] if name == "segment" else tmp_path / "disk" / name
    pipe.unlink()
    os.mkfifo(pipe)
    outcomes: list[object] = []

    def open_again() -> None:
        try:
            tier = open_tier()
            tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
            outcomes.append(read_page(tier, locations[0], 0))
        except TierConfigError as error:
            outcomes.append(error)

    thread = threading.Thread(target=open_again, daemon=True)
    thread.start()
    thread.join(300)
    assert outcomes, "it waits"
    assert outcomes != [VerifyResult.OK] or name != "segment"
