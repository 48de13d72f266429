"""What an idle scheduler of the CPU runtime waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import zmq

from runtime_cpu.plugins.sglang_cpu.idle import wait_for_requests

FOR_EVER_MS = 3_600_000


def test_a_request_ends_the_wait() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as server:
        server.bind("inproc://requests")
        with context.socket(zmq.PAIR) as client:
            client.connect("inproc://requests")
            scheduler = SimpleNamespace(recv_from_tokenizer=server)
            waits = threading.Thread(target=wait_for_requests, args=(scheduler, FOR_EVER_MS))
            waits.start()
            client.send(b"request")
            waits.join(60)
            assert not waits.is_alive()
            assert server.recv(zmq.NOBLOCK) == b"request"  # SGLang's to take


def test_it_waits_as_long_as_it_may() -> None:
    waited: list[int] = []
    wait_for_requests(SimpleNamespace(recv_from_tokenizer=SimpleNamespace(poll=waited.append)), 5)
    assert waited == [5]


def test_a_rank_that_gets_its_requests_from_another_one_does_not_wait() -> None:
    wait_for_requests(SimpleNamespace(recv_from_tokenizer=None), FOR_EVER_MS)
