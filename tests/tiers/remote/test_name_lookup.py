"""A store whose host's name is not found in time: the call ends at its deadline all the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sglang_ext.tiers.remote.base import Deadline, RemoteTimeoutError, RemoteUnavailableError
from sglang_ext.tiers.remote.engines.resp import Connection, Login
from tests.tiers.remote.remote_cases import WAIT_S, open_store, until

NAME = "hangs.invalid"
LATE_S = 600.0  # a lookup ends no sooner by itself


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A resolver that answers for `NAME` when the test has ended; what it was asked for."""
    look_up, asked, may_end = socket.getaddrinfo, [], threading.Event()

    def hang(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME or kwargs.get("flags", 0) & socket.AI_NUMERICHOST:
            return look_up(host, *args, **kwargs)
        asked.append(host)
        may_end.wait(LATE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield asked
    may_end.set()
    assert until(lambda: not _lookups())


def _lookups() -> int:
    return sum(each.name == "hier-kv-remote-name" for each in threading.enumerate())


def _connect(host: str, port: int, timeout_s: float) -> Connection:
    return Connection(host, port, Login(), Deadline.after(timeout_s))


def test_a_name_that_is_not_found_in_time_costs_the_calls_time(hung: list[str]) -> None:
    with pytest.raises(RemoteTimeoutError, match=rf"{NAME} was not looked up in time"):
        _connect(NAME, 6379, 0.2)
    assert until(lambda: hung == [NAME])
    assert _lookups() == 1  # it goes on


def test_lookups_that_hang_are_bounded(hung: list[str]) -> None:
    num_more = 10
    while num_more:
        num_more -= _lookups() == 16
        with pytest.raises(RemoteTimeoutError, match="looked up"):
            _connect(NAME, 6379, 0.02)
    assert until(lambda: len(hung) == 16)
    assert _lookups() == 16
    # An address has no name to be looked up, so it waits for none of them.
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listening,
        pytest.raises(RemoteTimeoutError, match="too long to answer"),
    ):
        _connect("127.0.0.1", listening.getsockname()[1], 1.0)


@pytest.mark.usefixtures("hung")
def test_a_store_with_such_a_name_is_not_used_and_it_counts() -> None:
    store = open_store(f"redis://{NAME}", timeout_s=0.1)
    try:
        assert until(lambda: store.stats().get("error_timeout", 0) >= 2)
        assert not store.usable
    finally:
        store.close()


def test_a_name_that_nobody_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: Any, *args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(RemoteUnavailableError, match=r"nobody:6379: .*not known"):
        _connect("nobody", 6379, WAIT_S)


def test_all_addresses_of_a_name_are_tried_within_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not each for as long as the call may take, and the last one as well."""
    with (
        closing(socket.socket()) as full,
        closing(socket.create_server(("127.0.0.1", 0))) as good,
        closing(socket.socket()) as filler,
    ):
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())  # and from now on connects hang there
        extra = [socket.socket() for _ in range(4)]
        for each in extra:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*kind, full.getsockname())] * 3 + [(*kind, good.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        given_s: list[float] = []

        class Timed(socket.socket):
            def settimeout(self, value: float | None, /) -> None:
                given_s.append(value or 0.0)
                super().settimeout(value)

        good.settimeout(WAIT_S)
        monkeypatch.setattr(socket, "socket", Timed)
        with pytest.raises(RemoteTimeoutError):
            _connect("several", 6379, 2.0)  # good takes the connection, and says nothing
        monkeypatch.undo()
        assert sum(given_s[: len(found)]) <= 2.0
        peer, _ = good.accept()
        peer.close()
        for each in extra:
            each.close()
