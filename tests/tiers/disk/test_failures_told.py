"""A disk that fails is told of in the log, with the system's reason, and counted as what it is."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.disk_context import failures
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.disk.test_reused_segments import World
from tests.tiers.disk.test_setup import SickDisk
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, make_slot, read_page, store

OpenTier = Callable[..., DiskTier]


def told(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    """The lines of a kind of failure."""
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [line for line in lines if f"disk_errors_{kind}" in line]


def opened_on(io: SickDisk, open_tier: OpenTier) -> tuple[SickDisk, DiskTier]:
    """A tier with a namespace, on a disk that is well so far."""
    tier = open_tier(io=io)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    return io, tier


def test_a_folder_that_vanished_is_no_full_disk(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when its file system is unmounted: what names nothing any more takes no segment."""
    folder = tmp_path / "disk"
    tier = open_tier()
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    shutil.rmtree(folder)
    assert tier.write(NAMESPACE, [make_slot(n) for n in (2, 3)]) == [None, None]
    assert tier.stats().dropped == {"io": 2}
    [line] = told(caplog, "io_write")
    assert line.startswith(f"hier-kv: the disk folder {folder} takes no pages, ")
    assert "No such file or directory" in line
    assert not folder.exists()


class _Unmounted(SickDisk):
    """What lies below the mount has the folders of a start before, so that files could be made."""

    def device_of(self, path: Path) -> int:
        return super().device_of(path) + (1 if self.sick else 0)


def test_what_lies_below_a_mount_that_is_gone_is_not_filled(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io, tier = opened_on(_Unmounted(), open_tier)
    io.sick = errno.ESTALE
    assert tier.write(NAMESPACE, [make_slot(1)]) == [None]
    assert tier.stats().dropped == {"io": 1}
    assert "not the one of the start" in told(caplog, "io_write")[0]
    assert not list(tmp_path.rglob("seg-*"))
    io.sick = 0
    (location,) = store(tier, [1])
    assert read_page(tier, location, 1) is VerifyResult.OK


@pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
@pytest.mark.parametrize("keeps", [False, True], ids=["whole", "by page"])
def test_a_full_tier_gives_nothing_up_while_its_mount_is_gone(
    open_tier: OpenTier, tmp_path: Path, packed: bool, keeps: bool
) -> None:
    """That would make no room, and what lies on the mount would be lost, and count no more."""
    io, folder, away = _Unmounted(), tmp_path / "disk", tmp_path / "away"
    world = World(open_tier, packed, io=io)
    if not keeps:
        world.tier.keeper = None
    number = 0
    while not world.tier.stats().segments_reused + world.tier.stats().segments_dropped:
        assert None not in world.write(range(number, number + 4))
        number += 4
    pages, before = dict(world.books.pages), world.tier.stats()
    folder.rename(away)
    folder.mkdir()
    io.sick = errno.ESTALE
    active = world.tier._writer.actives[NAMESPACE]
    while None not in world.write(range(number, number + 4)):
        number += 4
    assert active.segment.sealed
    for _ in range(3):
        assert set(world.write(range(number, number + 4))) == {None}
    stats = world.tier.stats()
    assert "full" not in stats.dropped
    assert stats.dropped["io"] >= 12
    assert pages.items() <= world.books.pages.items()
    assert stats.segments_dropped == before.segments_dropped
    folder.rmdir()
    away.rename(folder)
    io.sick = 0
    assert None not in world.write(range(number, number + 4))
    world.check()


@pytest.mark.parametrize(
    ("call", "kind", "sick"),
    [
        ("pwritev", "io_write", errno.EIO),
        ("allocate", "io_write", errno.EROFS),
        ("preadv", "io_read", errno.EIO),
        ("unlink", "io_unlink", errno.EROFS),
    ],
)
def test_each_kind_of_failure_is_told_once_with_its_reason(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, call: str, kind: str, sick: int
) -> None:
    io, tier = opened_on(SickDisk(call), open_tier)
    if call != "allocate":
        (location,) = store(tier, [1])
    io.sick = sick
    for number in (2, 3):
        assert not told(caplog, kind) or number == 3
        tier.write(NAMESPACE, [make_slot(number)])
        if kind == "io_read":
            assert read_page(tier, location, 1) is VerifyResult.MISSING
        elif kind == "io_unlink":
            tier.clear(NAMESPACE)
    [line] = told(caplog, kind)
    assert f"Errno {sick}" in line
    assert tier.stats().errors[kind] >= 2
    assert "full" not in tier.stats().dropped


def test_a_segment_that_cannot_be_sealed_is_told_of(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    io, tier = opened_on(SickDisk("truncate"), open_tier)
    store(tier, [1])
    io.sick = errno.EIO
    tier.close()
    [line] = told(caplog, "io_seal")
    assert line.endswith("Input/output error")


def test_a_full_disk_is_counted_and_not_told(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no failure: other files have the room."""
    io, tier = opened_on(SickDisk("allocate"), open_tier)
    io.sick = errno.ENOSPC
    assert tier.write(NAMESPACE, [make_slot(1)]) == [None]
    assert tier.stats().dropped == {"full": 1}
    assert not told(caplog, "io_write")


def test_it_is_told_again_after_a_minute_and_how_often_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    log = type(failures)(logging.getLogger("tests.disk"), clock=lambda: now_s)
    for _ in range(3):
        log.tell("it failed", OSError(errno.EIO, "so"))
    now_s = 61.0
    log.tell("it failed", OSError(errno.EIO, "so"))
    assert [each.getMessage() for each in caplog.records] == [
        "it failed: [Errno 5] so",
        "it failed: [Errno 5] so (2 times more since this was logged)",
    ]
