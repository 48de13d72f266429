"""Replies of a server that answers more, or deeper, than anybody asked for."""

from __future__ import annotations

import fcntl
import re
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from sglang_ext.tiers.remote.base import Deadline, RemoteUnavailableError
from sglang_ext.tiers.remote.engines.redis_engine import _info
from sglang_ext.tiers.remote.engines.redis_nodes import Nodes
from sglang_ext.tiers.remote.engines.resp import Connection, Login, ReplyBounds, ReplyError
from tests.tiers.remote.remote_cases import WAIT_S

LIST = ReplyBounds(depth=2, num_items=10, num_bytes=100)
Answer = Callable[[bytes], Connection]


@pytest.fixture
def answer() -> Iterator[Answer]:
    """Makes a connection to a server that has said something already, and then hung up."""
    made: list[Connection] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def connect(said: bytes) -> Connection:
        # Backlog and buffers of the kernel hold both sides' words: no thread is needed.
        connected = _PlainConnection(listening.getsockname(), said, listening)
        made.append(connected)
        return connected

    with closing(listening):
        yield connect
    for connection in made:
        connection.close()


class _PlainConnection(Connection):
    """Logs in without a word, and finds what the server said."""

    def __init__(self, address: tuple[str, int], said: bytes, listening: socket.socket) -> None:
        self._said, self._listening = said, listening
        super().__init__(*address, Login(), Deadline.after(WAIT_S))

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        peer, _ = self._listening.accept()
        peer.sendall(self._said)
        peer.close()


def read(connection: Connection, bounds: ReplyBounds = LIST) -> object:
    return connection.reply(Deadline.after(WAIT_S), bounds)


def test_replies_within_the_bounds(answer: Answer) -> None:
    said = b"*2\r\n*2\r\n:1\r\n$3\r\nabc\r\n*-1\r\n" + b"$4\r\nwxyz\r\n"
    connection = answer(said)
    assert read(connection) == [[1, b"abc"], []]
    assert read(connection, ReplyBounds()) == b"wxyz"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"*1\r\n" * 3 + b":1\r\n", id="too deep"),
        pytest.param(b"*1\r\n" * 100_000, id="much too deep"),
        pytest.param(b"*11\r\n" + b":1\r\n" * 11, id="too many items"),
        pytest.param(b"*2\r\n*5\r\n" + b":1\r\n" * 5 + b"*5\r\n", id="too many in all"),
        pytest.param(b"*1000000\r\n", id="a million"),
        pytest.param(b"*2\r\n$60\r\n" + b"x" * 60 + b"\r\n$60\r\n", id="too long in all"),
        pytest.param(b"$1000000000000\r\n", id="too long"),
        pytest.param(b"*2\r\n-ERR no\r\n:1\r\n", id="an error inside"),
        pytest.param(b"*" + b"9" * 5000 + b"\r\n", id="no number"),
    ],
)
def test_more_than_was_asked_for_breaks_the_connection(answer: Answer, said: bytes) -> None:
    connection = answer(said)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteUnavailableError):
            read(connection)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_array_is_no_answer_to_most_commands(answer: Answer) -> None:
    with pytest.raises(RemoteUnavailableError):
        read(answer(b"*1\r\n:1\r\n"), ReplyBounds())
    with pytest.raises(ReplyError):
        read(answer(b"-ERR no\r\n"), ReplyBounds())


@pytest.mark.parametrize("host", [10**12, [b"x"], b"\xff"])
def test_a_list_of_slots_names_hosts(host: object) -> None:
    nodes = Nodes([("127.0.0.1", 1)], Login(), is_cluster=True)
    with pytest.raises(RemoteUnavailableError):
        nodes._enter([[0, 16383, [host, 7000]]], "127.0.0.1")  # type: ignore[list-item]


@pytest.mark.parametrize("address", [[b"h", 10**30], [b"h", 0], [b"h\0", 7000]])
def test_a_list_of_slots_names_addresses_that_can_be(address: list[object]) -> None:
    nodes = Nodes([("127.0.0.1", 1)], Login(), is_cluster=True)
    with pytest.raises(RemoteUnavailableError):
        nodes._enter([[0, 16383, address]], "127.0.0.1")  # type: ignore[list-item]


def test_what_a_server_refuses_with_says_nothing_to_a_terminal(answer: Answer) -> None:
    with pytest.raises(ReplyError, match=re.escape("ERR ?[2J?settings: ok")):
        read(answer(b"-ERR \x1b[2J\nsettings: ok\r\n"))


@pytest.mark.parametrize("num_digits", [400, 5000])
def test_numbers_that_cannot_be_meant_are_none(num_digits: int) -> None:
    text = f"used_memory:{'9' * num_digits}\r\nmaxmemory:1024\r\n"
    assert _info(text.encode()) == {"maxmemory": 1024}


def test_an_empty_line_is_no_answer(answer: Answer) -> None:
    with pytest.raises(RemoteUnavailableError, match="does not speak RESP2"):
        read(answer(b"\r\n+OK\r\n"))
    with pytest.raises(RemoteUnavailableError, match="does not speak RESP2"):
        read(answer(b"OK\r\n"))


@pytest.mark.parametrize("behind", [b"-ERR no\r\n", b"-\r\n", b":1\r\n", b"xy\r\n", b"\n\r\r\n"])
@pytest.mark.parametrize("into", [False, True])
def test_a_value_that_is_longer_than_it_says_breaks_the_connection(
    answer: Answer, behind: bytes, into: bool
) -> None:
    """Not as an error of the server's, after which the next reply would be of this one."""
    connection = answer(b"$3\r\nabc" + behind + b"+OK\r\n")
    out = np.zeros(3, np.uint8)
    take: Callable[[], object] = partial(read, connection)
    if into:
        take = partial(connection.bulk_into, out, Deadline.after(WAIT_S))
    with pytest.raises(RemoteUnavailableError, match="longer than it says"):
        take()


def test_a_value_whose_end_comes_in_pieces() -> None:
    """Around the end of the buffer, too: what is left of it is moved to its begin."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = _PlainConnection.__new__(_PlainConnection)
        connection._password = ""
        connection._buffer = bytearray(8)
        connection._view = memoryview(connection._buffer)
        connection._start = connection._end = 0
        connection._socket = ours
        theirs.sendall(b"$3\r\nabc\r")
        writer = threading.Thread(target=theirs.sendall, args=(b"\n+OK\r\n",))
        writer.start()
        assert read(connection) == b"abc"
        assert read(connection) == b"OK"
        writer.join()


@pytest.mark.parametrize("least", [3, 1500])
def test_an_idle_connection_is_kept_whatever_its_descriptor(least: int) -> None:
    """A server with thousands of open files would connect and log in anew for each call."""
    ours, theirs = socket.socketpair()
    with closing(theirs), closing(ours):
        moved = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, least))
        connection = Connection.__new__(Connection)
        connection._socket, connection._start, connection._end = moved, 0, 0
        with closing(connection):
            assert not connection.is_stale()
            theirs.sendall(b"unasked")
            assert connection.is_stale()
            moved.recv(100)
            assert not connection.is_stale()
            theirs.close()
            assert connection.is_stale()
