"""A server that points elsewhere does not make the store send its password there."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.remote.remote_cases import (
    MISSING,
    OK,
    UNAVAILABLE,
    WAIT_S,
    make_items,
    open_store,
    read,
    until,
)


class _Pointer(socketserver.ThreadingTCPServer):
    """Answers a login and CLUSTER SLOTS like a member of a cluster, and all else by pointing."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.answer = b""
        self.num_asked = 0
        self.heard: list[bytes] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Answers(socketserver.StreamRequestHandler):
    server: Any

    def handle(self) -> None:
        while command := self._command():
            self.server.heard.append(command[0])
            if command[0] in (b"PING", b"SELECT", b"AUTH", b"ASKING"):
                self.wfile.write(b"+OK\r\n")
            elif command[0] == b"CLUSTER":
                host = b"*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % self.server.port
                self.wfile.write(b"*1\r\n*3\r\n:0\r\n:16383\r\n" + host)
            else:
                self.server.num_asked += 1
                self.wfile.write(self.server.answer)

    def _command(self) -> list[bytes]:
        line = self.rfile.readline()
        if not line.startswith(b"*"):
            return []
        parts = []
        for _ in range(int(line[1:])):
            size = int(self.rfile.readline()[1:])
            parts.append(self.rfile.read(size + 2)[:-2])
        return parts


@pytest.fixture
def pointer() -> Iterator[_Pointer]:
    with _Pointer() as server:
        yield server
        server.shutdown()


@pytest.fixture
def elsewhere() -> Iterator[_Pointer]:
    with _Pointer() as server:
        server.answer = b"$-1\r\n"
        yield server
        server.shutdown()


@pytest.mark.parametrize("verb", ["MOVED", "ASK"])
@pytest.mark.parametrize("query", ["", "&cluster=yes"])
def test_nobody_is_told_the_password_that_the_url_and_the_cluster_do_not_name(
    pointer: _Pointer, elsewhere: _Pointer, tmp_path: Path, verb: str, query: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    pointer.answer = b"-%s 1 127.0.0.1:%d\r\n" % (verb.encode(), elsewhere.port)
    store = open_store(f"redis://127.0.0.1:{pointer.port}?password-file={secret}{query}")
    try:
        assert store.wait_usable(WAIT_S)
        items = make_items(range(2))
        assert OK not in read(store, items, timeout_s=WAIT_S)
        assert pointer.num_asked > 0
        assert elsewhere.heard == []
    finally:
        store.close()


def test_a_node_of_the_cluster_is_followed(
    pointer: _Pointer, elsewhere: _Pointer, tmp_path: Path
) -> None:
    """The URL names it, so it may be asked."""
    pointer.answer = b"-ASK 1 127.0.0.1:%d\r\n" % elsewhere.port
    hosts = f"127.0.0.1:{pointer.port},127.0.0.1:{elsewhere.port}"
    store = open_store(f"redis://{hosts}?cluster=yes")
    try:
        assert store.wait_usable(WAIT_S)
        assert set(read(store, make_items(range(2)), timeout_s=WAIT_S)) <= {MISSING, UNAVAILABLE}
        assert b"ASKING" in elsewhere.heard
    finally:
        store.close()


@pytest.mark.parametrize("takes_login", [False, True])
def test_a_server_that_repeats_the_login_puts_it_in_no_error(
    pointer: _Pointer, tmp_path: Path, caplog: pytest.LogCaptureFixture, takes_login: bool
) -> None:
    caplog.set_level("DEBUG")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with _Pointer() as rude:
        rude.RequestHandlerClass = _LateRude if takes_login else _Rude
        store = open_store(f"redis://127.0.0.1:{rude.port}?password-file={secret}")
        try:
            assert until(lambda: "127.0.0.1" in caplog.text)
            assert read(store, make_items(range(1)), timeout_s=WAIT_S) == [UNAVAILABLE]
        finally:
            store.close()
            rude.shutdown()
    assert "hunter2" not in caplog.text
    assert "hunter2" not in repr(store.stats())


class _Rude(_Answers):
    """Does not know AUTH, and says so as Redis says of a command that was renamed."""

    def handle(self) -> None:
        while command := self._command():
            arguments = b"".join(b" `%s`" % part for part in command[1:])
            text = b"-ERR unknown command `%s`, with args beginning with:%s\r\n"
            self.wfile.write(text % (command[0], arguments))


class _LateRude(_Answers):
    """Takes the login, and repeats it in its answer to whatever comes next."""

    def handle(self) -> None:
        password = b""
        while command := self._command():
            if command[0] == b"AUTH":
                password = command[-1]
                self.wfile.write(b"+OK\r\n")
            else:
                self.wfile.write(b"-ERR unknown command, last was %s\r\n" % password)
