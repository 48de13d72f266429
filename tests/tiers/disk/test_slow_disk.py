"""The kit's slow disk: a read takes at least its time, and follows the file in service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import VerifyResult
from testkit.slow import slow_down_disks
from testkit.slow.disk import SpeedFile, ThrottledIO
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, read_page, store

OpenTier = Callable[..., DiskTier]


def test_of_itself_a_tier_calls_the_system(open_tier: OpenTier) -> None:
    assert type(open_tier()._io) is FileIO


def test_a_read_takes_no_less_than_the_stated_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_tier: OpenTier
) -> None:
    speed = tmp_path / "speed"
    speed.write_text("0.5")
    monkeypatch.setattr(DiskTier, "__init__", DiskTier.__init__)  # for it to be put back
    slow_down_disks(speed)
    tier = open_tier()
    assert isinstance(tier._io, ThrottledIO)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    [location] = store(tier, [1])
    started_s = time.monotonic()
    assert read_page(tier, location, 1) is VerifyResult.OK
    assert time.monotonic() - started_s >= SLOT_BYTES / 0.5e6


def test_a_read_that_crawls_ends_when_the_limit_is_lifted(tmp_path: Path) -> None:
    speed = tmp_path / "speed"
    speed.write_text("0.000001")
    io = ThrottledIO(speed)
    data = tmp_path / "data"
    data.write_bytes(bytes(4096))
    fd = io.open(data, 0)
    buffer = bytearray(4096)
    reader = threading.Thread(target=io.preadv, args=(fd, [memoryview(buffer)], 0))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()  # over an hour at that speed
    speed.unlink()
    reader.join(300)
    assert not reader.is_alive()
    io.close(fd)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "speed"
    speed = SpeedFile(path)
    assert speed.bytes_per_s() is None
    for text, expected in (("50", 50e6), ("", None), ("0.25\n", 0.25e6), ("-1", None)):
        path.write_text(text)
        assert speed.bytes_per_s() == expected


@pytest.mark.parametrize("text", ["fast", "-3", "0"])
def test_what_is_no_speed_is_refused_at_open(tmp_path: Path, text: str) -> None:
    path = tmp_path / "speed"
    path.write_text(text)
    with pytest.raises(TierConfigError, match="a number of MB/s above 0"):
        ThrottledIO(path)
