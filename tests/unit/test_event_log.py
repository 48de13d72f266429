"""The event log never fails what it tells of, has a bound, and is for its user alone."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.store.events import EventLog

# No file of this process may grow over 4 kB, as on a full file system, and later it may again.
_FULL = """
import resource, sys
from sglang_ext.tiers.store.events import EventLog
log = EventLog(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for number in range(200):
    log.note("full", number=number)
assert log.settle(300)
assert 0 < log.num_dropped < 200, log.num_dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.note("room", dropped=log.num_dropped)
log.close()
log.note("closed")
"""


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_full_file_system_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "events"
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "takes no more" in done.stderr
    lines = _lines(path)  # each is whole
    assert lines[-1]["e"] == "room"
    assert lines[-1]["dropped"] == 200 - len(lines) + 1


def test_two_files_are_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog(str(path), 1000)
    for number in range(100):
        log.note("saved", number=number)
        assert log.settle(300)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    assert log.num_dropped == 0
    log.close()
    numbers = [line["number"] for line in _lines(tmp_path / "events.1") + _lines(path)]
    assert numbers == list(range(int(str(numbers[0])), 100))
    again = EventLog(str(path), 1000)  # goes on behind what is there
    again.note("saved", number=100)
    again.close()
    assert _lines(path)[-1]["number"] == 100


def test_it_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch(mode=0o644)
    log = EventLog(str(path), 300)
    for _ in range(10):
        log.note("saved")
    log.close()
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe", "no/such"):
        with pytest.raises(TierConfigError, match="must be a file that can be written to"):
            EventLog(str(tmp_path / name))
    assert not (tmp_path / "victim").exists()


def test_a_file_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """What waits is bounded, the rest is counted; when the file goes on, so does the log."""
    log = EventLog(str(tmp_path / "events"), max_queued_bytes=10_000)
    inside, outside = os.pipe()
    with contextlib.suppress(BlockingIOError):  # full: a write to it waits until it is read
        os.set_blocking(outside, False)
        while True:
            os.write(outside, b"\n" * 4096)
    os.set_blocking(outside, True)
    os.dup2(outside, log._fd)
    logged = threading.Event()

    def note() -> None:
        for number in range(1000):
            log.note("saved", number=number)
        logged.set()

    threading.Thread(target=note, daemon=True).start()
    assert logged.wait(120)
    assert log.num_waiting > 0
    assert not log.settle(0.01)
    assert not log.settle(3600.0), "waited once more for a file that hangs"
    num_dropped = log.num_dropped
    assert 0 < num_dropped < 1000
    os.close(outside)
    reader = os.fdopen(inside, "rb")
    lines: list[bytes] = []
    while len(lines) < 1000 - num_dropped:
        lines += filter(None, [reader.readline().strip()])
    # Where the log's thread first looked when the queue was full, those in the middle were dropped.
    numbers = [json.loads(line)["number"] for line in lines]
    assert len(numbers) == 1000 - num_dropped
    assert numbers == sorted(set(numbers))
    log.close()
    assert reader.read() == b""  # the file was closed
    reader.close()


def test_what_was_logged_is_in_the_file_once_it_is_settled(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog(str(path))
    for number in range(50):
        log.note("saved", number=number)
        assert log.settle(300)
        assert _lines(path)[-1]["number"] == number
    log.close()


def test_one_line_may_be_longer_than_all_that_may_wait(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "events"), max_queued_bytes=100)
    log.note("cleared", pages=["f" * 64] * 100)
    log.close()
    assert json.loads((tmp_path / "events").read_text())["pages"] == ["f" * 64] * 100


def test_whatever_fails_costs_its_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(str(tmp_path / "events"))
    append = log._append

    def fails_once(line: bytes) -> None:
        monkeypatch.setattr(log, "_append", append)
        raise ValueError("nobody expects this")

    monkeypatch.setattr(log, "_append", fails_once)
    log.note("lost")
    log.note("kept")
    assert log.settle(300)
    assert [line["e"] for line in _lines(tmp_path / "events")] == ["kept"]
    assert log.num_dropped == 1
    log.close()
