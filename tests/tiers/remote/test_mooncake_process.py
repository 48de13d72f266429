"""The process with Mooncake's client: what becomes of one that does not end when it is killed.

Mooncake is not needed: the process runs a script that speaks the worker's protocol.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.remote.base import Deadline, RemoteTimeoutError, RemoteUnavailableError
from sglang_ext.tiers.remote.engines import mooncake_engine
from sglang_ext.tiers.remote.engines.mooncake_engine import MooncakeConfig, _Process
from tests.tiers.remote.remote_cases import WAIT_S

WORKER = """
import mmap, os, pathlib, socket, struct, sys, time
import msgpack
channel = socket.socket(fileno=int(sys.argv[1]))
memory = mmap.mmap(int(sys.argv[2]), 0)
hangs = pathlib.Path(__file__).with_name("hangs")
while hangs.exists():
    time.sleep(0.01)
def receive(num):
    data = b""
    while len(data) < num:
        more = channel.recv(num - len(data))
        if not more:
            raise SystemExit
        data += more
    return data
while True:
    verb, _ = msgpack.unpackb(receive(*struct.unpack("<I", receive(4))))
    if verb != "setup" and hangs.exists():
        hangs.with_name("has begun").touch()
        while hangs.exists():
            time.sleep(0.01)
        memory[:4] = b"late"
        hangs.with_name("was late").touch()
        time.sleep(1000)
    frame = msgpack.packb(0 if verb == "setup" else [os.getpid()])
    channel.sendall(struct.pack("<I", len(frame)) + frame)
"""


class Stuck(subprocess.Popen[bytes]):
    """A process that a kill does not reach, as in the hands of a driver; it runs on."""

    def kill(self) -> None:
        pass

    def end(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(WAIT_S)


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stuck]]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(mooncake_engine, "_WORKER", worker)
    monkeypatch.setattr(mooncake_engine, "_KILL_S", 0.01)
    made: list[Stuck] = []

    def popen(*args: object, **settings: object) -> Stuck:
        made.append(Stuck(*args, **settings))  # type: ignore[call-overload]
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield made
    for child in made:
        child.end()


def ask(process: _Process, timeout_s: float) -> list[int]:
    with process.hold(Deadline.after(WAIT_S)):
        return process.call("exists", [], Deadline.after(timeout_s))


def test_one_that_does_not_end_is_left_behind_with_its_memory(
    children: list[Stuck], tmp_path: Path
) -> None:
    process = _Process(MooncakeConfig("127.0.0.1:1", "P2PHANDSHAKE", host="here"))
    first = ask(process, WAIT_S)
    (tmp_path / "hangs").touch()
    with pytest.raises(RemoteTimeoutError):
        ask(process, 1.0)
    while not (tmp_path / "has begun").exists():
        assert children[0].poll() is None
    (tmp_path / "hangs").unlink()
    with process.hold(Deadline.after(WAIT_S)):
        process.memory[:4] = np.frombuffer(b"mine", np.uint8)
        second = process.call("exists", [], Deadline.after(WAIT_S))
        while not (tmp_path / "was late").exists():
            assert children[0].poll() is None
        assert process.memory[:4].tobytes() == b"mine"
    assert [first, second] == [[child.pid] for child in children]
    process.close()


def test_few_are_left_behind(children: list[Stuck], tmp_path: Path) -> None:
    process = _Process(MooncakeConfig("127.0.0.1:1", "P2PHANDSHAKE", host="here"))
    (tmp_path / "hangs").touch()
    for _ in range(mooncake_engine._MAX_LEFT_BEHIND):
        with pytest.raises(RemoteTimeoutError):
            ask(process, 0.01)
    with pytest.raises(RemoteUnavailableError, match="do not end"):
        ask(process, WAIT_S)
    assert len(children) == mooncake_engine._MAX_LEFT_BEHIND
    (tmp_path / "hangs").unlink()
    children[0].end()
    assert ask(process, WAIT_S) == [children[-1].pid]
    process.close()


def test_a_process_that_cannot_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = _Process(MooncakeConfig("127.0.0.1:1", "P2PHANDSHAKE", host="here"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(FileNotFoundError), process.hold(Deadline.after(WAIT_S)):
            process.call("exists", [], Deadline.after(WAIT_S))
    held = [process._channel, process._child]
    assert held == [None, None]
    assert len(os.listdir("/proc/self/fd")) == num_open
    process.close()
