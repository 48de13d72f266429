"""What a server holds when nothing is going on: memory, files, threads, bytes in its folders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.core.case import CaseFailedError
from testkit.requests import num_on_their_way, tier_state
from testkit.server import Server

PATIENCE_S = 300.0  # for a state that comes soon, on any machine
_POLL_S = 0.1
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's are
_MIB = 1 << 20


@dataclass(frozen=True)
class Gauges:
    """One reading, of a server at rest.

    Attributes:
        rss_mib: anonymous memory of all processes of the server, in MiB: files and shared memory
            are left out.
        scheduler_rss_mib: of it, the scheduler's.
        fds: open files, of all processes.
        threads: of all processes.
        disk_mib: what the disk folder takes, in MiB.
        remote_mib: what the shared folder takes, in MiB.
        plain_rss_mib: what `rss_mib` is for plain SGLang behind the same rounds; None without one.
    """

    rss_mib: float
    scheduler_rss_mib: float
    fds: int
    threads: int
    disk_mib: float
    remote_mib: float
    plain_rss_mib: float | None


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Waits for a state.

    Raises:
        CaseFailedError: it does not come.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise CaseFailedError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(_POLL_S)


def rest(server: Server) -> None:
    """Waits until no request runs, and no page is on its way to DRAM, disk or remote store."""
    wait_for(lambda: _is_at_rest(server), "the server is at rest")


def _is_at_rest(server: Server) -> bool:
    """Whether nothing is under way; a pin or a waiting request that stays is a leak, too."""
    state = tier_state(server)
    host, remote = state["host"], state.get("remote") or {}
    waits = ("planned_pages", "waiting_requests")
    queued = num_on_their_way(host) + sum(host.get(name, 0) for name in waits)
    return not queued and not remote.get("upload_queue", 0)


def read(server: Server, disk: Path, remote: Path, plain: Server | None) -> Gauges:
    """Reads all, twice if need be: connections of answered requests are closed a moment later."""
    pids = [process.pid for process in server.tree()]
    last: list[tuple[int, int]] = []

    def is_steady() -> bool:
        last.append((sum(map(num_fds, pids)), sum(map(num_threads, pids))))
        return len(last) > 1 and last[-1] == last[-2]

    wait_for(is_steady, "open files and threads stay the same")
    fds, threads = last[-1]
    return Gauges(
        rss_mib=sum(map(rss_mib, pids)),
        scheduler_rss_mib=rss_mib(server.scheduler_pid),
        fds=fds,
        threads=threads,
        disk_mib=folder_mib(disk),
        remote_mib=folder_mib(remote),
        plain_rss_mib=sum(rss_mib(process.pid) for process in plain.tree()) if plain else None,
    )


def rss_mib(pid: int) -> float:
    """Anonymous memory of a process, in MiB."""
    return _status(pid, "RssAnon") / 1024


def num_threads(pid: int) -> int:
    """Threads of a process."""
    return _status(pid, "Threads")


def num_fds(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def folder_mib(folder: Path) -> float:
    """What the files of a folder take on disk, in MiB; some may go meanwhile, and folders, too."""
    total = 0
    for path, folders, files in os.walk(folder):  # which passes over a folder that is gone
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_blocks * _BLOCK_BYTES
    return total / _MIB


def settled(readings: Sequence[Gauges], warm_up_rounds: int) -> Sequence[Gauges]:
    """The readings behind a life's first rounds, in which caches fill."""
    return readings[warm_up_rounds:]
