"""Servers of benches and tests end with the process that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from runtime_cpu.zygote import Forked, Zygote
from testkit.watchdog import Watchdog

_STARTS_A_SERVER = """
import sys, time
from testkit.server import Server
server = Server().start()
print(server.pid, flush=True)
time.sleep(1000)
"""
_WATCHES = """
import sys, time
from testkit.watchdog import Watchdog
watchdog = Watchdog(int(sys.argv[1]))
print("watches", flush=True)
time.sleep(1000)
"""


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 300.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def group_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == leader and runs(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def test_a_server_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _STARTS_A_SERVER], stdout=subprocess.PIPE) as mine:
        assert mine.stdout is not None
        server = int(mine.stdout.readline())
        try:
            assert runs(server)
            mine.send_signal(signal.SIGKILL)
            mine.wait()
            until(lambda: not group_of(server))
        finally:
            for pid in group_of(server):
                os.kill(pid, signal.SIGKILL)


def test_the_whole_group_ends() -> None:
    family = ["/bin/sh", "-c", "sleep 100 & sleep 100 & wait"]
    with subprocess.Popen(family, start_new_session=True) as leader:
        until(lambda: len(group_of(leader.pid)) == 3)
        command = [sys.executable, "-c", _WATCHES, str(leader.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as mine:
            assert mine.stdout is not None
            assert mine.stdout.readline() == b"watches\n"
            mine.send_signal(signal.SIGKILL)
        until(lambda: not group_of(leader.pid))


def test_a_watch_that_ended_leaves_the_group_alone() -> None:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as leader:
        watchdog = Watchdog(leader.pid)
        watchdog.close()
        watchdog.close()
        assert leader.poll() is None
        leader.kill()


def test_a_server_that_leads_no_group_yet_ends_with_the_zygote() -> None:
    """As one that was forked a moment before whoever asked for it was killed."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["sleep", "100"]) as forked, ours, theirs:
        zygote = Zygote(ours)
        zygote._clients.add(ours)
        zygote._servers[os.pidfd_open(forked.pid)] = Forked(forked.pid, ours, ours)
        theirs.close()
        try:
            zygote._answer(ours)
            until(lambda: forked.poll() is not None)
        finally:
            forked.kill()
            os.close(next(iter(zygote._servers)))
