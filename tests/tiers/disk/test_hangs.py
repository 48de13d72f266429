"""A disk that hangs holds up who reads and writes it, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.record import VerifyResult
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, read_page, store

OpenTier = Callable[..., DiskTier]
PATIENCE_S = 300.0


class HangingDisk(FileIO):
    """Calls of one kind wait until they may go on."""

    def __init__(self, call: str) -> None:
        self.call = ""
        self._hanging_call = call
        self.is_hanging, self.may_go_on = threading.Event(), threading.Event()

    def hang(self) -> None:
        self.call = self._hanging_call

    def _enter(self, call: str) -> None:
        if call == self.call:
            self.is_hanging.set()
            self.may_go_on.wait()

    def open(self, path: Path, flags: int) -> int:
        self._enter("open")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        self._enter("close")
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("pwritev")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("call", ["open", "close", "preadv", "pwritev"])
def test_a_call_that_hangs_does_not_keep_the_counts(open_tier: OpenTier, call: str) -> None:
    """The scheduler's thread asks for them every second."""
    disk = HangingDisk(call)
    tier = open_tier(io=disk, max_bytes=2 << 20)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    [at] = store(tier, [1])
    results: list[VerifyResult] = []

    def work() -> None:
        if call in ("pwritev", "close"):
            store(tier, [2])
            tier.clear(None)  # closes what was read
        else:
            results.append(read_page(tier, at, 1))

    if call == "close":
        assert read_page(tier, at, 1) is VerifyResult.OK
    disk.hang()
    worker = threading.Thread(target=work)
    asker = threading.Thread(target=tier.stats)
    worker.start()
    try:
        assert disk.is_hanging.wait(PATIENCE_S)
        asker.start()
        asker.join(PATIENCE_S)
        assert not asker.is_alive()
    finally:
        disk.may_go_on.set()
        worker.join(PATIENCE_S)
        asker.join(PATIENCE_S)
    assert results in ([], [VerifyResult.OK])


def test_two_reads_that_open_one_file_share_it(open_tier: OpenTier) -> None:
    disk = HangingDisk("open")
    tier = open_tier(io=disk)
    tier.open_namespace(NAMESPACE, SLOT_BYTES, {})
    places = store(tier, [1, 2])
    disk.hang()
    results: list[VerifyResult] = []
    readers = [
        threading.Thread(target=lambda at=at, n=n: results.append(read_page(tier, at, n)))
        for n, at in enumerate(places, 1)
    ]
    for reader in readers:
        reader.start()
    assert disk.is_hanging.wait(PATIENCE_S)
    disk.may_go_on.set()
    for reader in readers:
        reader.join(PATIENCE_S)
    assert results == [VerifyResult.OK] * 2
    assert tier.stats().open_fds == 1
