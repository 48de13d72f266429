"""What an idle scheduler of the CPU runtime waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import zmq

from runtime_cpu.plugins.sglang_cpu.idle import wait_for_requests

FOR_EVER_MS = 3_600_000


def test_a_request_ends_the_wait() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as server:
        server.bind("inproc://requests")
        with context.socket(zmq.PAIR) as client:
            client.connect("inproc://requests")
            scheduler = SimpleNamespace(recv_from_tokenizer=server, is_fully_idle=lambda: True)
            waits = threading.Thread(target=wait_for_requests, args=(scheduler, FOR_EVER_MS))
            waits.start()
            client.send(b"request")
            waits.join(60)
            assert not waits.is_alive()
            assert server.recv(zmq.NOBLOCK) == b"request"  # SGLang's to take


@pytest.mark.parametrize(("is_idle", "pause_ms"), [(True, 50), (False, 2)])
def test_it_waits_as_long_as_it_may(is_idle: bool, pause_ms: int) -> None:
    waited: list[int] = []
    scheduler = SimpleNamespace(
        recv_from_tokenizer=SimpleNamespace(poll=waited.append), is_fully_idle=lambda: is_idle
    )
    wait_for_requests(scheduler, 50)
    assert waited == [pause_ms]


def test_a_rank_that_gets_its_requests_from_another_one_does_not_wait() -> None:
    wait_for_requests(SimpleNamespace(recv_from_tokenizer=None), FOR_EVER_MS)
