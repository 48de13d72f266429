"""Mooncake Store: `mooncake://master:port`, through a process of its own (`mooncake_worker.py`).

Two such processes, one for reads and one for writes, so that an upload never stands in front of a
request. Each has a piece of memory that it shares with the server; a call that is not answered by
its deadline costs the process its life, and the next call starts another.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteEngine,
    RemoteFullError,
    RemoteTimeoutError,
    RemoteUnavailableError,
    Usage,
    Value,
)
from sglang_ext.tiers.remote.url_options import Options, RemoteUrl, one_of, size

_WORKER = Path(__file__).with_name("mooncake_worker.py")
_MEMORY_BYTES = 32 << 20
_MAX_VALUE_BYTES = 16 << 20
_BATCH_ITEMS = 256
_BUFFER_BYTES = 16 << 20  # the client's own, which this tier does not use
_ALIGN = 64
_FULL = -200  # NO_AVAILABLE_HANDLE
_LENGTH = struct.Struct("<I")
_MAX_ANSWER_BYTES = 1 << 20
# One that was killed ends at once, but where a driver or a mount has it in its hands.
_KILL_S = 0.5
_MAX_LEFT_BEHIND = 4


def options(scheme: str) -> Options:
    """See `EngineModule` of registry.py."""
    readers = {
        "metadata": _metadata,
        "host": _host,
        "protocol": one_of("tcp", "rdma"),
        "devices": _host,
        "segment": size,
    }
    return Options(readers, default_port=50051)


def open_engine(url: RemoteUrl) -> RemoteEngine:
    """See `EngineModule` of registry.py.

    Raises:
        TierConfigError: Mooncake is not installed.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise TierConfigError(
            "--hier-kv-remote-url: mooncake:// needs Mooncake's client; pip install"
            " mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without CUDA"
        )
    given = url.options
    host, port = url.hosts[0]
    return MooncakeEngine(
        MooncakeConfig(
            master=f"{host}:{port}",
            metadata=given.get("metadata", "P2PHANDSHAKE"),
            host=given.get("host", ""),
            protocol=given.get("protocol", "tcp"),
            devices=given.get("devices", ""),
            segment_bytes=given.get("segment", 0),
        )
    )


@dataclass(frozen=True)
class MooncakeConfig:
    """How Mooncake is reached.

    Attributes:
        master: HOST:PORT of its master.
        metadata: URL of its metadata server, or P2PHANDSHAKE for none.
        host: this machine's name, as the store's nodes reach it; "" asks the route to the master.
        protocol: `tcp` or `rdma`.
        devices: names of RDMA devices, for `rdma`.
        segment_bytes: memory of this machine that is given to the store. What lies there is gone
            when this server ends, so 0, and nodes of the store's own, are the better choice.
    """

    master: str
    metadata: str
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0


class MooncakeEngine(RemoteEngine):
    """Speaks to Mooncake Store. It has no TTL: the store removes what was not read for longest."""

    max_value_bytes = _MAX_VALUE_BYTES
    keeps_ttl = False
    tells_size = False

    def __init__(self, config: MooncakeConfig) -> None:
        """Starts nothing yet.

        Args:
            config: the settings.
        """
        self._config = config
        self._reads, self._writes = _Process(config), _Process(config)

    def begin(self) -> None:
        """See `RemoteEngine.begin`. Only who serves lends memory."""
        self._reads.segment_bytes = self._config.segment_bytes

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`. Starts both processes if need be."""
        for process in (self._reads, self._writes):
            with process.hold(deadline):
                _check(process.call("exists", ["hkv-ping"], deadline))

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""
        process = self._reads
        with process.hold(deadline):
            for batch in _batches([min(f.out.size, _MAX_VALUE_BYTES) for f in fetches]):
                items = [
                    (fetches[i].name, place, length, fetches[i].offset)
                    for i, place, length in batch
                ]
                codes = _check(process.call("get", items, deadline), len(items))
                for (i, place, length), code in zip(batch, codes, strict=True):
                    if code > length:
                        raise RemoteUnavailableError("Mooncake says more than was asked for")
                    fetches[i].out[:code] = process.memory[place : place + code]
                    on_fetched(i, code)

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`. What was there already is reported as stored."""
        process = self._writes
        with process.hold(deadline):
            for batch in _batches([value.num_bytes for value in values]):
                items = []
                for i, place, length in batch:
                    at = place
                    for piece in values[i].pieces:
                        process.memory[at : at + piece.size] = piece
                        at += piece.size
                    items.append((values[i].name, place, length, values[i].replaces))
                codes = process.call("put", items, deadline)
                for (i, _, _), code in zip(batch, codes, strict=True):
                    if code >= 0:
                        on_stored(i, True)
                if _FULL in codes:
                    raise RemoteFullError("no node of the store has room")
                _check(codes, len(items))

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`. Asking for a value is what keeps it."""
        with self._reads.hold(deadline):
            _check(self._reads.call("exists", list(names), deadline), len(names))

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`. What was read in the last seconds goes, too."""
        with self._writes.hold(deadline):
            codes = self._writes.call("delete", list(names), deadline)
        return sum(code == 0 for code in codes)

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`. Its client does not say."""
        return Usage(0, 0)

    def close(self) -> None:
        """See `RemoteEngine.close`."""
        self._reads.close()
        self._writes.close()


class _Process:
    """One process with Mooncake's client. `call` is for who holds it.

    Attributes:
        segment_bytes: memory that it lends to the store when it is started.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self.segment_bytes = 0
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None  # guarded by _lock
        self._channel: socket.socket | None = None  # guarded by _lock
        self._left_behind: list[subprocess.Popen[bytes]] = []  # guarded by _lock
        self._closed = False
        self._memory_fd = -1  # guarded by _lock
        self.memory: ByteArray = np.empty(0, np.uint8)
        self._take_memory()

    def hold(self, deadline: Deadline) -> _Hold:
        """Makes the caller the only one to use the process and its memory."""
        if not self._lock.acquire(timeout=deadline.left_s()):
            raise RemoteTimeoutError("other calls took all the time")
        try:
            self._left_behind = [child for child in self._left_behind if child.poll() is None]
            if len(self._left_behind) >= _MAX_LEFT_BEHIND:
                raise RemoteUnavailableError("earlier processes of Mooncake's client do not end")
            if self._memory_fd < 0 and not self._closed:
                self._take_memory()
        except BaseException:
            self._lock.release()
            raise
        return _Hold(self)

    def _take_memory(self) -> None:
        """Memory that no process but this one has yet."""
        fd = os.memfd_create("hier-kv-mooncake")
        try:
            os.ftruncate(fd, _MEMORY_BYTES)
            self.memory = np.frombuffer(mmap.mmap(fd, _MEMORY_BYTES), np.uint8)
        except BaseException:
            os.close(fd)
            raise
        self._memory_fd = fd

    def _drop_memory(self) -> None:
        fd, self._memory_fd = self._memory_fd, -1
        if fd >= 0:
            os.close(fd)

    def call(self, verb: str, argument: Any, deadline: Deadline) -> list[int]:
        """Asks the process, which is started if there is none.

        Raises:
            RemoteError: it does not answer, cannot connect or ended; it is gone then.
        """
        try:
            if self._child is None:
                self._start(deadline)
            answer = self._ask(verb, argument, deadline)
            if not isinstance(answer, list):
                raise RemoteUnavailableError("the process of Mooncake's client answers nonsense")
            return answer
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the process, if there is one.

        One that does not end is left behind with the memory, to which it may still write: a call
        has its deadline, and the next one starts anew.
        """
        child, channel = self._child, self._channel
        self._child = self._channel = None
        if channel is not None:
            channel.close()
        if child is not None:
            child.kill()
            try:
                child.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                self._left_behind.append(child)
                self._drop_memory()

    def close(self) -> None:
        """Ends the process after the call that it is at; no other is started."""
        self._closed = True
        with self._lock:
            self.kill()
            self._drop_memory()

    def _start(self, deadline: Deadline) -> None:
        if self._closed:
            raise RemoteUnavailableError("closed")
        self._channel, theirs = socket.socketpair()  # closed by `kill`, whatever comes
        # Its log goes to stderr; errors of single values are answers and not worth a line.
        environment = {"GLOG_minloglevel": "3", **os.environ}
        with theirs:
            command = [sys.executable, "-P", str(_WORKER), str(theirs.fileno())]
            self._child = subprocess.Popen(
                [*command, str(self._memory_fd)],
                pass_fds=(theirs.fileno(), self._memory_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        config = self._config
        settings = {
            "host": config.host or _own_host(config.master),
            "metadata": config.metadata,
            "segment_bytes": self.segment_bytes,
            "buffer_bytes": _BUFFER_BYTES,
            "protocol": config.protocol,
            "devices": config.devices,
            "master": config.master,
        }
        code = self._ask("setup", settings, deadline)
        if code != 0:
            raise RemoteUnavailableError(f"Mooncake's client cannot connect (error {code})")

    def _ask(self, verb: str, argument: Any, deadline: Deadline) -> Any:
        assert self._channel is not None
        frame = msgpack.packb((verb, argument))
        try:
            self._channel.settimeout(deadline.left_s())
            self._channel.sendall(_LENGTH.pack(len(frame)) + frame)
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            if length > _MAX_ANSWER_BYTES:
                raise RemoteUnavailableError("the process of Mooncake's client answers nonsense")
            return msgpack.unpackb(self._receive(length, deadline))
        except TimeoutError as error:
            raise RemoteTimeoutError("Mooncake's client did not answer in time") from error
        except (OSError, ValueError) as error:
            raise RemoteUnavailableError("the process of Mooncake's client ended") from error

    def _receive(self, num_bytes: int, deadline: Deadline) -> bytes:
        assert self._channel is not None
        data = b""
        while len(data) < num_bytes:
            self._channel.settimeout(deadline.left_s())
            more = self._channel.recv(num_bytes - len(data))
            if not more:
                raise RemoteUnavailableError("the process of Mooncake's client ended")
            data += more
        return data


class _Hold:
    def __init__(self, process: _Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._process._lock.release()


def _batches(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Places values in the memory: (position, place, length) each, as many at once as fit."""
    batches: list[list[tuple[int, int, int]]] = []
    place = _MEMORY_BYTES
    for i, length in enumerate(sizes):
        # Half of the memory at once, so that a stream is reported in steps.
        full = place + length > _MEMORY_BYTES // 2 or len(batches[-1]) >= _BATCH_ITEMS
        if not batches or full:
            batches.append([])
            place = 0
        batches[-1].append((i, place, length))
        place += -(-length // _ALIGN) * _ALIGN
    return batches


def _check(codes: list[int], expected: int = 1) -> list[int]:
    if len(codes) != expected:
        raise RemoteUnavailableError("Mooncake's client answers for other values than asked for")
    for code in codes:
        if code < 0:
            raise RemoteUnavailableError(f"Mooncake's client says error {code}")
    return codes


def _own_host(master: str) -> str:
    """The address of this machine on the way to the master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RemoteUnavailableError(f"no way to the master at {master}: {error}") from error


def _metadata(text: str) -> str:
    if text != "P2PHANDSHAKE" and not text.startswith(("http://", "https://", "etcd://")):
        raise ValueError("P2PHANDSHAKE, or the http:// URL of Mooncake's metadata server")
    if "@" in text:
        raise ValueError("a URL without a user or password in it")
    return text


def _host(text: str) -> str:
    if not text or not all(c.isalnum() or c in ".-_:," for c in text):
        raise ValueError("a name")
    return text
