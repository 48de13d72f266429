"""The process that holds Mooncake's client; run as a script by `mooncake_engine.py`.

A process of its own, because the client is native code that waits without a deadline and aborts its
process on some errors: the server must survive both. It is told what to do over a socket, in frames
of a length (u32, little-endian) and msgpack, and finds the bytes in memory that it shares with the
server. It imports nothing of this project.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_NOT_FOUND = (-703, -704)  # REPLICA_IS_NOT_READY, OBJECT_NOT_FOUND
_INVALID_PARAMS = -600  # what a value longer or shorter than asked for answers
_SMALL_BYTES = 4096  # a value is nearly always longer than such a range


class Worker:
    """One client of Mooncake Store and the memory that it moves values through."""

    def __init__(self, memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def setup(self, settings: dict[str, Any]) -> int:
        """Connects; returns 0, or Mooncake's error."""
        code = int(
            self._store.setup(
                settings["host"],
                settings["metadata"],
                settings["segment_bytes"],
                settings["buffer_bytes"],
                settings["protocol"],
                settings["devices"],
                settings["master"],
            )
        )
        return code or int(self._store.register_buffer(self._base, len(self._memory)))

    def get(self, items: list[tuple[str, int, int, int]]) -> list[int]:
        """Reads ranges: (name, place in memory, longest, first byte) each.

        Returns:
            Bytes read, 0 where there is no value; or Mooncake's error, negative.
        """
        codes = [0] * len(items)
        whole = [i for i, item in enumerate(items) if item[3] == 0 and item[2] > _SMALL_BYTES]
        if whole:
            found = self._store.batch_get_into(
                [items[i][0] for i in whole],
                [self._base + items[i][1] for i in whole],
                [items[i][2] for i in whole],
            )
            for i, code in zip(whole, found, strict=True):
                codes[i] = int(code)
        ranges = [i for i in range(len(items)) if i not in set(whole)]
        for i, code in zip(ranges, self._ranges([items[i] for i in ranges]), strict=True):
            codes[i] = code
        for i, item in enumerate(items):
            if codes[i] == _INVALID_PARAMS:
                codes[i] = self._clipped(item)
        return [0 if code in _NOT_FOUND else code for code in codes]

    def put(self, items: list[tuple[str, int, int, bool]]) -> list[int]:
        """Stores values: (name, place in memory, length, whether to overwrite) each."""
        codes = [0] * len(items)
        for replaces in (False, True):
            chosen = [i for i, item in enumerate(items) if item[3] is replaces]
            if not chosen:
                continue
            store = self._store.batch_upsert_from if replaces else self._store.batch_put_from
            found = store(
                [items[i][0] for i in chosen],
                [self._base + items[i][1] for i in chosen],
                [items[i][2] for i in chosen],
            )
            for i, code in zip(chosen, found, strict=True):
                codes[i] = int(code)
        return codes

    def exists(self, names: list[str]) -> list[int]:
        """1, 0 or an error for each name."""
        return [int(code) for code in self._store.batch_is_exist(names)]

    def delete(self, names: list[str]) -> list[int]:
        """0 or an error for each name.

        What was just read has a lease, and who deletes has read what it is. Somebody else who is
        reading it may get other bytes, which no checksum fits: a miss.
        """
        return [int(code) for code in self._store.batch_remove(names, True)]

    def _ranges(self, items: list[tuple[str, int, int, int]]) -> list[int]:
        if not items:
            return []
        found: Any = self._store.get_into_ranges(
            [self._base],
            [[item[0] for item in items]],
            [[[item[1]] for item in items]],
            [[[item[3]] for item in items]],
            [[[item[2]] for item in items]],
        )
        return [int(code[0]) for code in found[0]]

    def _clipped(self, item: tuple[str, int, int, int]) -> int:
        """Reads what there is of a range that reaches over the value's end."""
        name, place, longest, first = item
        size = int(self._store.get_size(name))
        if size < 0:
            return size
        length = min(longest, size - first)
        return self._ranges([(name, place, length, first)])[0] if length > 0 else 0


def main(socket_fd: int, memory_fd: int) -> None:
    """Serves one server process until it closes the socket or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=socket_fd)
    memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
    worker = Worker(memory)
    calls: dict[str, Callable[[Any], Any]] = {
        "setup": worker.setup,
        "get": worker.get,
        "put": worker.put,
        "exists": worker.exists,
        "delete": worker.delete,
    }
    while (frame := _read(channel)) is not None:
        verb, argument = msgpack.unpackb(frame, use_list=False)
        answer = msgpack.packb(calls[verb](argument))
        channel.sendall(_LENGTH.pack(len(answer)) + answer)
    os._exit(0)  # the client's own threads need no farewell


def _read(channel: socket.socket) -> bytes | None:
    head = _read_exactly(channel, _LENGTH.size)
    return None if head is None else _read_exactly(channel, _LENGTH.unpack(head)[0])


def _read_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = b""
    while len(data) < num_bytes:
        more = channel.recv(num_bytes - len(data))
        if not more:
            return None
        data += more
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
