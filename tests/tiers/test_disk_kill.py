"""kill -9 at any instant loses no acknowledged page and never makes a wrong one.

By default one layout, or one way of protection, of each; the long form has all.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.records.record import VerifyResult, read_meta
from sglang_ext.tiers.records.seals import CHECKSUMS
from tests.tiers.protection_cases import seals
from tests.tiers.tier_pages import NAMESPACE, PACKED_SLOT_BYTES, is_right

CHILD = Path(__file__).with_name("kill_child.py")
WRITER_S = 300.0  # no writer lives for so long
Page = tuple[bytes, Location]

FORCED = [
    *[("record", count) for count in (1, 2, 3, 5, 8, 13, 40, 70, 110, 150, 200, 260)],
    ("footer", 1),
    ("footer", 4),
    ("create:before_rename", 1),
    ("create:before_rename", 5),
    ("seal:before_footer", 2),
    ("seal:before_truncate", 1),
    ("seal:before_truncate", 6),
    ("seal:done", 2),
    ("reclaim:before_salvage", 1),
    ("reclaim:before_drop", 1),
    ("reclaim:before_drop", 3),
    ("reclaim:before_unlink", 1),
    ("reclaim:before_unlink", 2),
]


FORCED_REUSED = [
    *[("record", count) for count in (1, 2, 3, 5, 9, 40, 110)],
    *[("reuse:before_open", count) for count in (1, 4)],
    *[("reuse:opened", count) for count in (1, 3, 7)],
    ("footer", 2),
    ("footer", 5),
    ("seal:before_footer", 4),
    ("seal:before_truncate", 5),
    ("seal:done", 6),
]


class Writers:
    """Processes that write, one at a time, each a fork of one that has imported what it needs."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as file:
            self._nursery = subprocess.Popen(
                [sys.executable, str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def start(self, *arguments: str) -> int:
        """Starts one; returns its pid."""
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(arguments) + "\n")
        self._nursery.stdin.flush()
        return self._number()

    def wait(self, pid: int) -> int:
        """Returns how the one that runs ended."""
        too_late = threading.Timer(WRITER_S, self._give_up, (pid,))
        too_late.start()
        try:
            return self._number()
        finally:
            too_late.cancel()

    def errors(self) -> str:
        """What they have written to stderr."""
        return self._errors.read_text()

    def close(self) -> None:
        with self._nursery:  # closes its input
            pass

    def _number(self) -> int:
        assert self._nursery.stdout is not None
        line = self._nursery.stdout.readline()
        assert line, self.errors()
        return int(line)

    def _give_up(self, pid: int) -> None:
        self._nursery.kill()  # first, or it would tell of a killed writer
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    made = Writers(tmp_path_factory.mktemp("writers") / "errors")
    yield made
    made.close()


def run_child(
    writers: Writers,
    folder: Path,
    log: Path,
    index: int,
    step: str,
    count: int,
    *,
    packed: bool,
    key: str = "",
    reused: bool = False,
) -> None:
    """Runs the child until it is dead; the parent kills it where `step` is "none"."""
    mode = "auto" if index % 2 else "off"
    layout = ("packed" if packed else "slots") + key + ("-reused" if reused else "")
    first = str((index + 1) * 1_000_000)
    pid = writers.start(str(folder), str(log), first, mode, layout, step, str(count))
    if step == "none":
        while not log.exists() or log.stat().st_size < 1000:
            assert Path(f"/proc/{pid}").exists(), writers.errors()
            time.sleep(0.005)
        time.sleep(random.Random(index).uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
    assert writers.wait(pid) == -signal.SIGKILL, writers.errors()


def replay(pages: set[Page], log: Path) -> set[Page]:
    """Returns the pages acknowledged and not dropped, after the child's log."""
    text = log.read_text() if log.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    for line in complete.splitlines():
        kind, *fields = line.split()
        if kind == "page":
            pages.add((bytes.fromhex(fields[0]), Location(int(fields[1]), int(fields[2]))))
        elif kind == "gone":
            gone = Location(int(fields[0]), int(fields[1]))
            pages = {page for page in pages if page[1] != gone}
        elif kind == "drop":
            pages = {page for page in pages if page[1].segment != int(fields[0])}
        else:
            pages.add((bytes.fromhex(fields[1]), Location(int(fields[2]), int(fields[3]))))
    return pages


def found_after_restart(folder: Path, key: str = "") -> set[Page]:
    """Opens the folder, reads every page that is found, and returns those that are right.

    Every page found must be right: nothing was damaged here, only cut short.
    """
    config = DiskConfig(folder, max_bytes=8 << 20, min_free_bytes=0)
    with DiskTier(config, seals=seals(key[1:]) if key else CHECKSUMS) as tier:
        pages = tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {})
        assert not list(folder.rglob("*.tmp"))
        found = set()
        out = aligned_array(PACKED_SLOT_BYTES)
        for row in range(len(pages)):
            page_hash = pages.hashes[row].tobytes()
            location = Location(int(pages.segment[row]), int(pages.block[row]))
            request = ReadRequest(location, page_hash, b"", out, int(pages.num_blocks[row]))
            (result,) = tier.read(NAMESPACE, [request])
            assert result is VerifyResult.OK
            assert is_right(out, page_hash, NAMESPACE)
            assert read_meta(out).page_hash == page_hash
            found.add((page_hash, location))
        assert tier.stats().errors == {}
        assert tier.stats().used_bytes <= 8 << 20
    return found


@pytest.mark.sampled("both")
@pytest.mark.parametrize("layout", ["slots", "both"])
def test_acknowledged_pages_survive_33_kills_in_one_folder(
    tmp_path: Path, writers: Writers, layout: str
) -> None:
    """With `both` the processes take turns, as when a codec is switched on and off."""
    folder, log = tmp_path / "disk", tmp_path / "log"
    points = FORCED + [("none", 0)] * 8
    random.Random(0).shuffle(points)
    assert _kill_and_look(writers, folder, log, points, layout) > 3000


@pytest.mark.sampled("-encrypt")
@pytest.mark.parametrize("key", ["-tag", "-encrypt"])
def test_acknowledged_pages_survive_kills_where_a_key_is_set(
    tmp_path: Path, writers: Writers, key: str
) -> None:
    """Every page that is found was written with the key, and the rest of the folder is not."""
    points = FORCED[2::3] + [("none", 0)] * 2
    assert _kill_and_look(writers, tmp_path / "disk", tmp_path / "log", points, "both", key) > 500
    with DiskTier(DiskConfig(tmp_path / "disk", max_bytes=8 << 20, min_free_bytes=0)) as tier:
        assert not len(tier.open_namespace(NAMESPACE, PACKED_SLOT_BYTES, {}))
        assert set(tier.stats().errors) == {"locked_segment"}
    assert found_after_restart(tmp_path / "disk", key)


def _kill_and_look(
    writers: Writers,
    folder: Path,
    log: Path,
    points: list[tuple[str, int]],
    layout: str,
    key: str = "",
    *,
    reused: bool = False,
) -> int:
    """Kills writers of one folder in turns; returns how many pages were acknowledged."""
    pages: set[Page] = set()
    num_acknowledged = 0
    for index, (step, count) in enumerate(points):
        log.unlink(missing_ok=True)
        packed = layout == "packed" or (layout == "both" and index % 4 > 0)
        run_child(writers, folder, log, index, step, count, packed=packed, key=key, reused=reused)
        pages = replay(pages, log)
        num_acknowledged += log.read_text().count("page ")
        found = found_after_restart(folder, key)
        assert pages <= found, f"lost {len(pages - found)} pages at {step} {count}"
        pages = found
    files = sum(file.stat().st_size for file in folder.rglob("*.hkv"))
    assert files <= 8 << 20
    return num_acknowledged


@pytest.mark.sampled("packed--encrypt")
@pytest.mark.parametrize(("layout", "key"), [("slots", ""), ("packed", "-encrypt")])
def test_acknowledged_pages_survive_20_kills_of_segments_filled_again(
    tmp_path: Path, writers: Writers, layout: str, key: str
) -> None:
    """A page that was given up may be found or not; one that was not given up is found."""
    points = FORCED_REUSED + [("none", 0)] * 3
    random.Random(1).shuffle(points)
    # The first fills the disk; from then on every record takes the place of another one.
    points.insert(0, ("reuse:opened", 2))
    folder, log = tmp_path / "disk", tmp_path / "log"
    assert _kill_and_look(writers, folder, log, points, layout, key, reused=True) > 500
