"""One folder, servers of one rank and of several: each refuses the other, and ranks share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.tiers.disk.folder import FolderLock, SharedFolderLock
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError

# A rank in a process of its own: says whether it got the folder, and holds it until it is killed.
RANK = """
import sys
from pathlib import Path
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.folder import SharedFolderLock
from sglang_ext.tiers.errors import TierConfigError
try:
    lock = SharedFolderLock(FileIO(), Path(sys.argv[1]), sys.argv[2], patience_s=0.0)
    print("has it", flush=True)
except TierConfigError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def rank(folder: Path, server: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a rank; returns it, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder), server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_ranks_of_one_server_share_a_folder_and_no_other_server_gets_it(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    SharedFolderLock(FileIO(), folder, "one")
    SharedFolderLock(FileIO(), folder, "one")
    with pytest.raises(TierConfigError, match=f"in use by process {os.getpid()} .*of its own$"):
        SharedFolderLock(FileIO(), folder, "two", patience_s=0.0)
    with pytest.raises(TierConfigError, match="in use by process"):
        FolderLock(FileIO(), folder)
    assert json.loads((folder / "LOCK").read_text())["server"] == "one"


def test_a_server_of_one_rank_keeps_others_out(tmp_path: Path) -> None:
    alone = FolderLock(FileIO(), tmp_path)
    with pytest.raises(TierConfigError, match=f"in use by process {os.getpid()}"):
        SharedFolderLock(FileIO(), tmp_path, "one", patience_s=0.05)
    alone.release()
    SharedFolderLock(FileIO(), tmp_path, "one")


def test_a_killed_server_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    first, said = rank(tmp_path, "one")
    assert said == "has it"
    second, said = rank(tmp_path, "one")
    assert said == "has it"
    other, said = rank(tmp_path, "two")
    assert f"in use by process {first.pid}" in said
    end(other)
    end(first)
    other, said = rank(tmp_path, "two")
    assert "in use by process" in said, "one of its ranks still runs"
    end(other)
    end(second)
    other, said = rank(tmp_path, "two")
    assert said == "has it"
    end(other)


def test_of_servers_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    """Every rank of one server or of none: ranks of two never hold it together."""
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        holders: list[str] = []

        def start(server: str, folder: Path = folder, holders: list[str] = holders) -> None:
            try:
                SharedFolderLock(FileIO(), folder, server, patience_s=0.1)
                holders.append(server)
            except TierConfigError:
                pass

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(start, ["one", "two"] * 4))
        assert len(set(holders)) <= 1
