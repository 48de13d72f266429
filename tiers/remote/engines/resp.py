"""One connection to a Redis or Valkey server: commands out, replies in, each by its deadline.

The protocol is RESP2. Written here, and not left to redis-py, because values go straight into the
caller's memory, each is reported when it has arrived, and a whole reply is bound by one deadline:
redis-py copies each value several times (bench/tiers/remote_stores.py measures both), returns the
replies of a pipeline all at once, and its timeouts are those of single system calls.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import (
    Deadline,
    RemoteAuthError,
    RemoteError,
    RemoteFullError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from sglang_ext.tiers.remote.engines.name_lookup import connect

_BUFFER_BYTES = 64 << 10
_SMALL_PIECE_BYTES = 4096  # copied into one system call with what is around it
_MAX_LINE_BYTES = 32 << 10
_LINE_END = b"\r\n"
_FULL_ERRORS = ("OOM", "MISCONF")
_AUTH_ERRORS = ("WRONGPASS", "NOAUTH", "NOPERM", "ERR AUTH", "ERR invalid password")

Argument = bytes | str | int | tuple[ByteArray, ...]
Reply = bytes | int | None | list["Reply"]


class ReplyBounds(NamedTuple):
    """The most that an honest server answers to a command; what is more is no answer to it.

    Attributes:
        depth: arrays inside of each other; 0 for a reply that is none.
        num_items: items of all its arrays together.
        num_bytes: of all its bulk strings together, which are kept in memory.
    """

    depth: int = 0
    num_items: int = 0
    num_bytes: int = 4096


class ReplyError(Exception):
    """The server answered with an error; the connection is still good."""


@dataclass
class _Room:
    """What is left of the bounds of a reply that is being read."""

    num_items: int
    num_bytes: int


_SHORT = ReplyBounds()


@dataclass(frozen=True)
class Login:
    """How to connect.

    Attributes:
        user: name, or "".
        password: or "".
        database: number.
        tls: context for TLS; None without.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = None


class Connection:
    """One connection, for one thread at a time. After any error but `ReplyError`, close it."""

    def __init__(self, host: str, port: int, login: Login, deadline: Deadline) -> None:
        """Connects and logs in.

        Raises:
            RemoteError: it did not work.
        """
        self.address = (host, port)
        self._password = login.password
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of the buffer is not consumed
        self._socket = self._connect(login, deadline)
        try:
            self._log_in(login, deadline)
        except BaseException:
            self.close()
            raise

    def send(self, commands: Sequence[Sequence[Argument]], deadline: Deadline) -> None:
        """Sends commands; their replies come in the same order.

        An argument that is a tuple of arrays is their bytes, sent from where they lie.

        Raises:
            RemoteError: the connection is broken or the time is over.
        """
        small = bytearray()
        for command in commands:
            small += b"*%d\r\n" % len(command)
            for argument in command:
                if isinstance(argument, tuple):
                    small += b"$%d\r\n" % sum(piece.size for piece in argument)
                    for piece in argument:
                        if piece.size <= _SMALL_PIECE_BYTES:
                            small += piece.data
                            continue
                        self._send(small, deadline)
                        small.clear()
                        self._send(piece.data, deadline)
                else:
                    text = str(argument).encode() if not isinstance(argument, bytes) else argument
                    small += b"$%d\r\n%b" % (len(text), text)
                small += b"\r\n"
        self._send(small, deadline)

    def reply(self, deadline: Deadline, bounds: ReplyBounds = _SHORT) -> Reply:
        """Reads one reply of bounded size.

        Args:
            deadline: for the whole reply.
            bounds: what can be answered to the command.

        Raises:
            ReplyError: the server says that the command failed.
            RemoteError: the connection is broken, the time is over, this is not the protocol, or
                more than the bounds allow.
        """
        return self._reply(deadline, _Room(bounds.num_items, bounds.num_bytes), bounds.depth)

    def _reply(self, deadline: Deadline, room: _Room, depth: int) -> Reply:
        kind, rest = self._line(deadline)
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            size = self._number(rest)
            if size < 0:
                return None
            room.num_bytes -= size
            if room.num_bytes < 0:
                raise _broken("a reply is longer than any that was asked for")
            out = np.empty(size, np.uint8)
            self._read_into(out, deadline)
            return out.tobytes()
        if kind == b"*":
            num = self._number(rest)
            room.num_items -= max(0, num)
            if room.num_items < 0 or not depth:
                raise _broken("a reply has more items, or levels, than any that was asked for")
            try:
                return [self._reply(deadline, room, depth - 1) for _ in range(num)]
            except ReplyError as error:  # the rest of the array is still to come
                raise _broken(f"an error inside of a reply: {error}") from error
        raise _broken("the server does not speak RESP2")

    def bulk_into(self, out: ByteArray, deadline: Deadline) -> int:
        """Reads a bulk string into `out`; returns its length, 0 for none or an empty one.

        Raises:
            ReplyError, RemoteError: as `reply`; also when it is longer than `out`.
        """
        kind, rest = self._line(deadline)
        if kind != b"$":
            raise _broken("the server answered with something else than a value")
        size = self._number(rest)
        if size > out.size:
            raise _broken("a value is longer than what was asked for")
        if size >= 0:
            self._read_into(out[:size], deadline)
        return max(size, 0)

    def call(
        self, command: Sequence[Argument], deadline: Deadline, bounds: ReplyBounds = _SHORT
    ) -> Reply:
        """Sends one command and reads its reply."""
        self.send([command], deadline)
        return self.reply(deadline, bounds)

    def is_stale(self) -> bool:
        """Whether an idle connection was closed by the server, or has bytes nobody asked for."""
        if self._end > self._start:
            return True
        try:
            poll = select.poll()  # `select` takes no descriptor from 1,024 on
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _connect(self, login: Login, deadline: Deadline) -> socket.socket:
        host, port = self.address
        try:
            plain = connect(host, port, deadline)
        except TimeoutError as error:
            raise RemoteTimeoutError(f"no connection to {host}:{port} in time") from error
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            raise RemoteUnavailableError(f"no connection to {host}:{port}: {error}") from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if login.tls is None:
            return plain
        try:
            plain.settimeout(deadline.left_s())
            return login.tls.wrap_socket(plain, server_hostname=host)
        except TimeoutError as error:
            plain.close()
            raise RemoteTimeoutError(f"no TLS with {host}:{port} in time") from error
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise RemoteAuthError(f"the certificate of {host}:{port}: {error}") from error
        except (OSError, ValueError) as error:
            plain.close()
            raise RemoteUnavailableError(f"no TLS with {host}:{port}: {error}") from error

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        try:
            if login.password:
                self._authenticate(login, deadline)
            if login.database:
                self.call(["SELECT", login.database], deadline)
            self.call(["PING"], deadline)
        except ReplyError as error:
            raise refusal(error) from error

    def _authenticate(self, login: Login, deadline: Deadline) -> None:
        user = [login.user] if login.user else []
        try:
            self.call(["AUTH", *user, login.password], deadline)
        except ReplyError as error:
            # A server that does not know AUTH answers with its arguments, so the answer is kept
            # out of what is raised and logged.
            known = next((start for start in _AUTH_ERRORS if str(error).startswith(start)), "ERR")
            raise refusal(ReplyError(f"{known} (the server refused the login)")) from None

    def _send(self, data: bytearray | memoryview, deadline: Deadline) -> None:
        if not len(data):
            return
        try:
            self._socket.settimeout(deadline.left_s())
            self._socket.sendall(data)
        except TimeoutError as error:
            raise RemoteTimeoutError("the store took too long to take data") from error
        except OSError as error:
            raise _broken(f"connection lost while sending: {error}") from error

    def _receive(self, view: memoryview, deadline: Deadline) -> int:
        try:
            self._socket.settimeout(deadline.left_s())
            num = self._socket.recv_into(view)
        except TimeoutError as error:
            raise RemoteTimeoutError("the store took too long to answer") from error
        except OSError as error:
            raise _broken(f"connection lost while reading: {error}") from error
        if num == 0:
            raise _broken("the server closed the connection")
        return num

    def _fill(self, deadline: Deadline) -> None:
        """Receives more behind what of the buffer is not consumed, which leaves room."""
        held = self._end - self._start
        self._buffer[:held] = self._buffer[self._start : self._end]
        self._start, self._end = 0, held
        self._end += self._receive(self._view[held:], deadline)

    def _line(self, deadline: Deadline) -> tuple[bytes, bytes]:
        """Reads a line; returns its first byte and the rest, without the end."""
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            held = self._end - self._start
            if held > _MAX_LINE_BYTES:
                raise _broken("a line without end")
            self._fill(deadline)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        if line[:1] == b"-":
            text = line[1:].decode("utf-8", "replace")
            # It is shown to people: what a terminal would obey is not.
            text = "".join(each if each.isprintable() else "?" for each in text)
            if self._password:  # a server may say again what it was told
                text = text.replace(self._password, "***")
            raise ReplyError(text[:300])
        return line[:1], line[1:]

    def _read_into(self, out: ByteArray, deadline: Deadline) -> None:
        """Fills `out`, and takes the line's end behind it."""
        held = min(self._end - self._start, out.size)
        view = out.data
        view[:held] = self._view[self._start : self._start + held]
        self._start += held
        while held < out.size:
            held += self._receive(view[held:], deadline)
        # Not read as a line: one that begins like an error would seem to leave all in order.
        while self._end - self._start < len(_LINE_END):
            self._fill(deadline)
        end = self._start + len(_LINE_END)
        if self._view[self._start : end] != _LINE_END:
            raise _broken("a value is longer than it says")
        self._start = end

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise _broken("a number was to come, and none came") from None


def refusal(error: ReplyError) -> RemoteError:
    """What an error in reply to a login, or to any command, means for who made the call."""
    text = str(error)
    if text.startswith(_AUTH_ERRORS):
        return RemoteAuthError(text)
    if text.startswith(_FULL_ERRORS):
        return RemoteFullError(text)
    return RemoteUnavailableError(text)


def _broken(message: str) -> RemoteUnavailableError:
    return RemoteUnavailableError(message)
