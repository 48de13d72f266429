"""A TCP proxy that behaves like a bad network: slow, late, lossy, or lying."""

from __future__ import annotations

import contextlib
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

_PIECE_BYTES = 16 << 10
_POLL_S = 0.05
_LATE_S = 0.05
# The end of one reply of Redis, where another begins.
_REPLY_ENDS = re.compile(rb"\r\n(?=[$*:+_-])")
_MAX_PIECES_LATE = 4096  # on their way at once in one direction of a connection


@dataclass(frozen=True)
class Network:
    """How the network is at the moment.

    Attributes:
        bytes_per_s: of all connections together and each way; 0 for no bound.
        delay_s: how long each piece takes on its way, one way.
        drop_after_bytes: each connection is reset after so many bytes from the server; 0 never.
        garbage_share: share of pieces from the server in which some bytes are changed.
        repeated_share: share of pieces from the server that come twice.
        reordered_share: share of pieces from the server whose replies come in another order.
        late_share: share of pieces from the server that come later than they should.
        refuses: whether new connections are closed at once.
        stalls: whether nothing passes, while connections stay.
    """

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    drop_after_bytes: int = 0
    garbage_share: float = 0.0
    repeated_share: float = 0.0
    reordered_share: float = 0.0
    late_share: float = 0.0
    refuses: bool = False
    stalls: bool = False


class Proxy:
    """Passes connections on to a server. `network` may be set at any time, from any thread.

    Attributes:
        port: of 127.0.0.1, to connect to.
        num_dropped: connections that were reset in the middle.
        num_spoilt: pieces that were changed.
        num_repeated, num_reordered, num_late: pieces that came twice, in another order, late.
    """

    def __init__(self, target_port: int, network: Network | None = None, seed: int = 0) -> None:
        """Starts to listen.

        Args:
            target_port: of 127.0.0.1.
            network: how it is at first; good by default.
            seed: of what is garbled.
        """
        self._target = ("127.0.0.1", target_port)
        self._network = network or Network()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._free_at_s = {True: 0.0, False: 0.0}  # by direction; guarded by _lock
        self._sockets: set[socket.socket] = set()  # guarded by _lock
        self._closed = threading.Event()
        self.num_dropped = self.num_spoilt = self.num_bytes_down = 0
        self.num_repeated = self.num_reordered = self.num_late = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def network(self) -> Network:
        """How the network is."""
        return self._network

    @network.setter
    def network(self, network: Network) -> None:
        self._network = network

    def set(self, **changes: Any) -> None:
        """Changes some of the network's properties."""
        self._network = replace(self._network, **changes)

    def follow(self, bytes_per_s: Callable[[float], float], stop: threading.Event) -> None:
        """Sets the bandwidth from a trace until `stop`; blocks.

        Args:
            bytes_per_s: bandwidth at a time in seconds after the call.
            stop: ends it.
        """
        start_s = time.monotonic()
        while not stop.wait(_POLL_S):
            self.set(bytes_per_s=bytes_per_s(time.monotonic() - start_s))

    def drop_all(self) -> None:
        """Resets every connection."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            self._reset(each)

    def counts(self) -> dict[str, int]:
        """How often it did what it is told to do to pieces and connections."""
        return {
            "replies_garbled": self.num_spoilt,
            "replies_repeated": self.num_repeated,
            "replies_reordered": self.num_reordered,
            "replies_late": self.num_late,
            "connections_cut": self.num_dropped,
        }

    def close(self) -> None:
        """Ends everything."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.drop_all()
        for thread in list(self._threads):
            thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._network.refuses:
                self._reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                self._reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets |= {client, server}
            for source, sink, down in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pass_on, args=(source, sink, down), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        """Reads one direction of a connection at the line's speed; another thread delivers."""
        late: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_PIECES_LATE)
        writer = threading.Thread(target=self._deliver, args=(late, source, sink), daemon=True)
        self._threads.append(writer)
        writer.start()
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._wait_turn(len(data), down)
                network = self._network
                limit = network.drop_after_bytes if down else 0
                if limit and passed + len(data) > limit:
                    self.num_dropped += 1
                    late.put((0.0, data[: max(0, limit - passed)]))
                    break
                if down:
                    data = self._misplace(self._spoil(data, network.garbage_share), network)
                    self._maybe_late(network.late_share)
                    self.num_bytes_down += len(data)
                passed += len(data)
                late.put((time.monotonic() + network.delay_s, data))
        late.put((0.0, b""))

    def _deliver(
        self, late: queue.Queue[tuple[float, bytes]], source: socket.socket, sink: socket.socket
    ) -> None:
        is_open = True
        while (piece := late.get())[1]:
            if is_open:
                self._closed.wait(max(0.0, piece[0] - time.monotonic()))
                try:
                    sink.sendall(piece[1])
                except OSError:
                    is_open = False
                    self._reset(source)
        for each in (source, sink):
            self._reset(each)

    def _wait_turn(self, num_bytes: int, down: bool) -> None:
        """Waits until the line has carried the piece."""
        while self._network.stalls and not self._closed.is_set():
            time.sleep(_POLL_S)
        bytes_per_s = self._network.bytes_per_s
        if not bytes_per_s:
            return
        with self._lock:
            start_s = max(time.monotonic(), self._free_at_s[down])
            until_s = self._free_at_s[down] = start_s + num_bytes / bytes_per_s
        self._closed.wait(max(0.0, until_s - time.monotonic()))

    def _spoil(self, data: bytes, share: float) -> bytes:
        if not share or self._random.random() >= share:
            return data
        self.num_spoilt += 1
        spoilt = bytearray(data)
        for _ in range(8):
            spoilt[self._random.randrange(len(spoilt))] ^= self._random.randrange(1, 256)
        return bytes(spoilt)

    def _misplace(self, data: bytes, network: Network) -> bytes:
        """Sends a piece twice, or its last replies first."""
        if self._meets(network.repeated_share):
            self.num_repeated += 1
            data += data
        if self._meets(network.reordered_share):
            self.num_reordered += 1
            ends = [match.end() for match in _REPLY_ENDS.finditer(data)]
            at = self._random.choice(ends) if ends else len(data) // 2
            data = data[at:] + data[:at]
        return data

    def _maybe_late(self, share: float) -> None:
        if self._meets(share):
            self.num_late += 1
            self._closed.wait(_LATE_S)

    def _meets(self, share: float) -> bool:
        return bool(share) and self._random.random() < share

    def _reset(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(each)
        with contextlib.suppress(OSError):
            # Closed with linger 0 a connection ends with RST, as one that was lost does.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
