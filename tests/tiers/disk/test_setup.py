"""What cannot work is refused at open in one sentence; in service it is dropped and counted."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from sglang_ext.tiers.access import problem_of
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.folder import SegmentIds
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, make_slot, read_page, store

OpenTier = Callable[..., DiskTier]
GIB = 1 << 30


class SickDisk(FileIO):
    """A disk that fails on demand: set `sick` to the errno that calls named in `calls` give."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.sick = 0
        self.free = 100 * GIB

    def _maybe_fail(self, call: str) -> None:
        if self.sick and call in self.calls:
            raise OSError(self.sick, os.strerror(self.sick))

    def open(self, path: Path, flags: int) -> int:
        self._maybe_fail("open")
        return super().open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("pwritev")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("preadv")
        return super().preadv(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._maybe_fail("allocate")
        super().allocate(fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._maybe_fail("truncate")
        super().truncate(fd, num_bytes)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename")
        super().rename(source, target)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync")
        super().sync(fd)

    def free_bytes(self, path: Path) -> int:
        return self.free


def refusal(open_tier: OpenTier, **settings: Any) -> str:
    with pytest.raises(TierConfigError) as error:
        open_tier(**settings)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


@pytest.mark.parametrize("max_bytes", [0, -1, 4096, 40 << 10])
def test_a_size_of_less_than_two_segments_is_refused(open_tier: OpenTier, max_bytes: int) -> None:
    assert "size must be at least" in refusal(open_tier, max_bytes=max_bytes)


def test_a_page_too_large_for_the_bound_is_refused(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=1 << 20)
    with pytest.raises(TierConfigError, match="raise its size"):
        tier.open_namespace(NAMESPACE, 1 << 20, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"direct_io": "maybe"},
        {"fsync": "sometimes"},
        {"helper_threads": -1},
        {"min_free_bytes": -1},
        {"segment_bytes": 0},
    ],
)
def test_an_unknown_value_is_refused_by_name(open_tier: OpenTier, settings: dict[str, Any]) -> None:
    assert next(iter(settings)) in refusal(open_tier, **settings)


def test_a_file_in_the_folders_place_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(open_tier, path=tmp_path / "file")
    assert "is a file" in refusal(open_tier, path=tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_refused(open_tier: OpenTier, error: int) -> None:
    io = SickDisk("open")
    io.sick = error
    assert "must be writable" in refusal(open_tier, io=io)


def test_a_folder_that_cannot_be_made_is_refused(open_tier: OpenTier) -> None:
    assert "cannot be used" in refusal(open_tier, path=Path("/proc/hier-kv"))


def test_a_folder_in_use_is_refused_and_names_its_owner(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    script = (
        "import sys, pathlib\n"
        "from sglang_ext.tiers.disk import DiskConfig, DiskTier\n"
        "tier = DiskTier(DiskConfig(pathlib.Path(sys.argv[1]), 1 << 30, 0))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert f"in use by process {other.pid}" in refusal(open_tier)
        other.kill()
    open_tier()


def test_one_process_cannot_open_a_folder_twice(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert "in use" in refusal(open_tier)
    tier.close()
    open_tier()


def test_direct_io_on_is_refused_where_it_does_not_work(open_tier: OpenTier) -> None:
    class NoDirect(FileIO):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return super().open(path, flags)

    assert "O_DIRECT" in refusal(open_tier, io=NoDirect(), direct_io="on")
    tier = open_tier(io=NoDirect(), direct_io="auto")
    assert tier.stats().mode == "buffered"
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    assert read_page(tier, store(tier, [1])[0], 1) is VerifyResult.OK


def test_a_folder_of_a_later_release_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    state = tmp_path / "disk" / "folder.msgpack"
    state.write_bytes(msgpack.packb({"version": 2, "next_segment": 5}))
    assert "format version 2" in refusal(open_tier)
    state.unlink()
    open_tier()


def test_a_namespace_of_a_later_release_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / NAMESPACE.hex()[:16]
    folder.mkdir(parents=True)
    (folder / "ns.msgpack").write_bytes(msgpack.packb({"version": 9}))
    tier = open_tier()
    with pytest.raises(TierConfigError, match="format version 9"):
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})


def test_two_digests_with_one_prefix_do_not_mix(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    twin = NAMESPACE[:8] + bytes(24)
    with pytest.raises(TierConfigError, match="belongs to namespace"):
        tier.open_namespace(twin, SLOT_BYTES, {})


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"\x00" * 40, msgpack.packb([1, 2]),
        *(msgpack.packb({"version": 1, "next_segment": each}) for each in (-3, 2**31, 2**32 - 9)),
    ],
)  # fmt: skip
def test_damaged_state_files_are_made_anew(
    open_tier: OpenTier, tmp_path: Path, damage: bytes
) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {"model": "m"})
    (location,) = store(tier, [1])
    tier.close()
    folder = tmp_path / "disk"
    (folder / "folder.msgpack").write_bytes(damage)
    (folder / NAMESPACE.hex()[:16] / "ns.msgpack").write_bytes(damage)
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {"model": "m"})) == 1
    assert read_page(tier, location, 1) is VerifyResult.OK
    assert store(tier, [2])[0].segment > location.segment


def test_a_full_disk_at_start_is_refused(open_tier: OpenTier) -> None:
    io = SickDisk("pwritev")
    io.sick = errno.ENOSPC
    assert "No space left" in refusal(open_tier, io=io, direct_io="off")


@pytest.mark.parametrize("call", ["pwritev", "allocate", "rename"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_stops_taking_writes_drops_and_recovers(
    open_tier: OpenTier, call: str, error: int
) -> None:
    io = SickDisk(call)
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    first = store(tier, range(10))
    io.sick = error
    results = tier.write(NAMESPACE, [make_slot(n) for n in range(100, 180)])
    assert None in results
    dropped = tier.stats().dropped
    assert sum(dropped.values()) == results.count(None)
    io.sick = 0
    later = store(tier, range(200, 210))
    for n, location in [*enumerate(first), *zip(range(200, 210), later, strict=True)]:
        assert read_page(tier, location, n) in (VerifyResult.OK, VerifyResult.MISSING)
    for n, maybe in zip(range(100, 180), results, strict=True):
        if maybe is not None:
            assert read_page(tier, maybe, n) is VerifyResult.OK
    assert all(
        read_page(tier, location, n) is VerifyResult.OK
        for n, location in zip(range(200, 210), later, strict=True)
    )


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_disk_that_stops_giving_reads_is_a_miss(open_tier: OpenTier, call: str) -> None:
    io = SickDisk(call)
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    (location,) = store(tier, [1])
    io.sick = errno.EIO
    assert read_page(tier, location, 1) is VerifyResult.MISSING
    assert tier.stats().errors["io_read"] == 1
    io.sick = 0
    assert read_page(tier, location, 1) is VerifyResult.OK


@pytest.mark.parametrize("call", ["truncate", "sync"])
def test_a_failed_sealing_loses_nothing(open_tier: OpenTier, call: str) -> None:
    io = SickDisk(call)
    tier = open_tier(io=io, fsync="seal")
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(5))
    io.sick = errno.EIO
    tier.close()
    assert tier.stats().errors["io_seal"] == 1
    io.sick = 0
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 5
    assert all(read_page(tier, at, n) is VerifyResult.OK for n, at in enumerate(locations))


def test_a_failed_sync_is_not_acknowledged(open_tier: OpenTier) -> None:
    io = SickDisk("sync")
    tier = open_tier(io=io, fsync="always")
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, [1])
    io.sick = errno.EIO
    assert tier.write(NAMESPACE, [make_slot(2)]) == [None]
    io.sick = 0
    assert read_page(tier, store(tier, [3])[0], 3) is VerifyResult.OK


def test_a_file_that_cannot_be_removed_still_counts(open_tier: OpenTier) -> None:
    io = SickDisk("unlink")
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    (location,) = store(tier, [1])
    used = tier.stats().used_bytes
    io.sick = errno.EROFS
    tier.clear(NAMESPACE)
    io.sick = 0
    stats = tier.stats()
    assert stats.used_bytes == used
    assert stats.errors["io_unlink"] == 1
    assert read_page(tier, location, 1) is VerifyResult.MISSING


def test_short_writes_and_reads_are_completed(open_tier: OpenTier) -> None:
    class Stutter(FileIO):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][: max(4096, len(buffers[0]) // 2)]], offset)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().preadv(fd, [buffers[0][:4096]], offset)

    tier = open_tier(io=Stutter())
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    locations = store(tier, range(40))
    assert all(read_page(tier, at, n) is VerifyResult.OK for n, at in enumerate(locations))
    tier.close()
    assert len(open_tier().open_namespace(NAMESPACE, SLOT_BYTES, {})) == 40


def test_a_write_without_progress_ends(open_tier: OpenTier) -> None:
    class Stuck(FileIO):
        stuck = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return 0 if self.stuck else super().pwritev(fd, buffers, offset)

    io = Stuck()
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, [1])
    io.stuck = True
    assert tier.write(NAMESPACE, [make_slot(2)]) == [None]
    io.stuck = False


def test_the_free_space_floor_holds(open_tier: OpenTier) -> None:
    io = SickDisk()
    tier = open_tier(io=io, min_free_bytes=GIB)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    io.free = GIB + (200 << 10)
    assert tier.write(NAMESPACE, [make_slot(1)]) == [None]
    assert tier.stats().dropped == {"full": 1}
    io.free = 2 * GIB
    kept = store(tier, range(29))
    io.free = GIB // 2
    results = tier.write(NAMESPACE, [make_slot(n) for n in range(100, 200)])
    assert None in results
    assert read_page(tier, kept[0], 0) is VerifyResult.OK, "dropped although it could not help"


def test_a_small_bound_makes_small_segments(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier(max_bytes=2 << 20, segment_bytes=256 << 20)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    for first in range(0, 1000, 50):
        store(tier, range(first, first + 50))
        files = list((tmp_path / "disk").rglob("*.hkv"))
        assert sum(file.stat().st_size for file in files) <= 2 << 20
    assert len(files) >= 6
    assert tier.stats().used_bytes == sum(file.stat().st_size for file in files)


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Sets how many files this process may have open, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("limit", "most"), [(1024, 128), (256, 64)])
def test_open_files_are_bounded(
    open_tier: OpenTier, limited: Callable[[int], None], limit: int, most: int
) -> None:
    """By a quarter of what the process may have: SGLang needs the others."""
    limited(limit)
    tier = open_tier(segment_bytes=4096)
    tier.open_namespace(NAMESPACE, 4096, {})
    locations = [
        at
        for n in range(0, 8 * 200, 8)
        for at in tier.write(NAMESPACE, [make_slot(i, slot_bytes=4096) for i in range(n, n + 8)])
        if at is not None
    ]
    assert len({at.segment for at in locations}) == 200
    before = len(os.listdir("/proc/self/fd"))
    for n, at in enumerate(locations):
        assert read_page(tier, at, n, slot_bytes=4096) is VerifyResult.OK
    assert tier.stats().open_fds == most
    assert len(os.listdir("/proc/self/fd")) - before <= most
    tier.close()
    assert tier.stats().open_fds == 0
    assert len(os.listdir("/proc/self/fd")) <= before


def test_bytes_written_per_useful_byte_are_known(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, range(20))
    tier.close()
    stats = tier.stats()
    assert stats.useful_bytes == 20 * (SLOT_BYTES - 512 - 100)
    assert stats.bytes_written == 4096 + 20 * SLOT_BYTES + 4096


def test_closing_leaves_no_preallocated_rest(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, range(3))
    tier.close()
    names = sorted(str(p.relative_to(tmp_path / "disk")) for p in (tmp_path / "disk").rglob("*"))
    folder = NAMESPACE.hex()[:16]
    assert names == sorted(
        ["LOCK", "folder.msgpack", folder, f"{folder}/ns.msgpack", f"{folder}/seg-00000001.hkv"]
    )
    size = (tmp_path / "disk" / folder / "seg-00000001.hkv").stat().st_size
    assert size == 4096 + 3 * SLOT_BYTES + 4096
    assert np.fromfile(tmp_path / "disk" / folder / "seg-00000001.hkv", np.uint8).size == size


# ---- other users of the machine ------------------------------------------------------------------


def modes(folder: Path) -> set[str]:
    kinds = {True: "folder", False: "file"}
    paths = [folder, *folder.rglob("*")]
    return {f"{kinds[p.is_dir()]} {stat.S_IMODE(p.stat().st_mode):o}" for p in paths}


def test_what_the_tier_makes_is_for_its_user_alone(open_tier: OpenTier, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "disk"
    old = os.umask(0)
    try:
        tier = open_tier(path=folder, direct_io="auto")
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
        store(tier, range(200))
        tier.close()
        assert modes(tmp_path / "above") == {"folder 700", "file 600"}
        # What an earlier release made is taken from the others, in folders of other models too.
        for path in (folder, folder / NAMESPACE.hex()[:16]):
            path.chmod(0o755)
        open_tier(path=folder).close()
        assert stat.S_IMODE((folder / NAMESPACE.hex()[:16]).stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_a_folder_that_everybody_writes_to_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(TierConfigError, match="every user of the machine; take that away"):
        open_tier()
    (tmp_path / "disk").chmod(0o1777)  # as /tmp, from which nobody may take that
    with pytest.raises(TierConfigError, match="name a folder in it") as caught:
        open_tier()
    assert "chmod" not in str(caught.value)


def test_another_users_folder_is_refused_but_to_root(tmp_path: Path) -> None:
    status = os.stat_result((stat.S_IFDIR | 0o700, 0, 0, 0, 1234, 0, 0, 0, 0, 0))
    assert problem_of(status, 1234) == ""
    assert problem_of(status, 0) == ""
    assert "belongs to user 1234 and not to user 99" in problem_of(status, 99)


@pytest.mark.parametrize("name", ["LOCK", "folder.msgpack.tmp", "direct-io-probe.tmp"])
def test_a_planted_link_leads_to_no_file(open_tier: OpenTier, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / name).symlink_to(victim)
    try:
        open_tier().close()
    except TierConfigError as error:
        assert name == "LOCK" and "symbolic link" in str(error)  # noqa: PT017, PT018
    assert victim.read_bytes() == b"precious"


def test_links_to_namespaces_and_segments_are_left_alone(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, range(8))
    tier.close()
    home = tmp_path / "disk" / NAMESPACE.hex()[:16]
    [segment] = home.glob("seg-*")
    away = tmp_path / "away"
    away.mkdir()
    segment.rename(away / segment.name)
    segment.symlink_to(away / segment.name)
    before = (away / segment.name).read_bytes()
    tier = open_tier()
    assert len(tier.open_namespace(NAMESPACE, SLOT_BYTES, {})) == 0
    tier.clear(None)
    tier.close()
    assert (away / segment.name).read_bytes() == before
    home.rename(tmp_path / "home")
    home.symlink_to(tmp_path / "home")
    tier = open_tier()
    with pytest.raises(TierConfigError, match="no symbolic link"):
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {})


@pytest.mark.parametrize("number", [4294967294, 4294967295, 9999999999, 4294967000, 100_000_000])
def test_a_file_with_a_number_far_ahead_spends_none_of_the_numbers_before_it(
    open_tier: OpenTier, tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    store(tier, [1])
    tier.close()
    file = tmp_path / "disk" / NAMESPACE.hex()[:16] / f"seg-{number:08d}.hkv"
    file.write_bytes(b"not ours")
    for page in (2, 3):
        again = open_tier()
        assert len(again.open_namespace(NAMESPACE, SLOT_BYTES, {})) == page - 1
        (place,) = store(again, [page])
        assert place.segment < 1000
        again.close()
    assert file.read_bytes() == b"not ours"
    assert len([each for each in caplog.records if "never gave out" in each.getMessage()]) <= 2


def test_a_number_that_a_file_ahead_has_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.tiers.disk.folder._FAR_IDS", 2)
    ids = SegmentIds(FileIO(), tmp_path, [1, 4, 5], sync=False)
    assert [ids.take() for _ in range(3)] == [2, 3, 6]
