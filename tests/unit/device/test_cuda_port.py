"""What the port asks of CUDA, and of whom: a stand-in says what it was asked."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.pinning import pin_memory
from sglang_ext.device.ports import cuda, open_port
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.host import HostPort
from sglang_ext.tiers.host import HostArena


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Event:
    def __init__(self, **options: bool) -> None:
        self.options = options
        self.stream: Stream | None = None
        self.happened = threading.Event()

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.happened.wait(60)

    def elapsed_time(self, other: Event) -> float:
        return 250.0  # ms


class Cuda:
    """Streams from a pool of four, round robin."""

    Event = Event

    def __init__(self) -> None:
        self.drawn = 0
        self.current = Stream(0)

    def Stream(self, device: torch.device) -> Stream:
        self.drawn += 1
        return Stream(self.drawn % 4)

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def port() -> Any:
    made = CudaPort(torch.device("cpu"), Cuda())
    yield made
    made.close()


def test_a_stream_is_none_of_those_in_use(port: CudaPort) -> None:
    used = [Stream(number) for number in (0, 1, 2)]
    for _ in range(6):
        assert port.new_stream((*used, None)).cuda_stream == 3
    with pytest.raises(RuntimeError, match="gave no stream that differs from 4 streams"):
        port.new_stream((*used, Stream(3)))


def test_nothing_but_synchronize_waits_for_the_device(
    port: CudaPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "pinned", lambda count: torch.empty(count, dtype=torch.int64))
    stream, other = port.new_stream(()), port.new_stream(())
    event = port.record(stream)  # which never happens
    assert event.stream is stream
    assert event.options == {"enable_timing": True, "blocking": True}
    port.wait(other, event)
    assert other.waits == [event]
    with port.on(stream):
        assert port.current_stream() is stream
        memory = port.empty(64)
        source = np.arange(64, dtype=np.uint8)
        port.copy_in(memory, source)
        assert np.array_equal(memory.numpy(), source)
        values = np.arange(5)
        uploaded = port.upload(values)
        values[:] = 0
        assert uploaded.tolist() == [0, 1, 2, 3, 4]
        assert port.rows(torch.tensor([3, 1], dtype=torch.int32)).dtype == torch.int64
    assert port.seconds_between(event, event) == 0.25
    event.happened.set()
    port.synchronize(event)


def test_calls_follow_their_events_in_order_and_an_error_ends_none(
    port: CudaPort, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    stream = port.new_stream(())
    first, second = port.record(stream), port.record(stream)
    seen: list[str] = []
    ended = threading.Event()

    def fail() -> None:
        seen.append("first")
        raise RuntimeError("a bug")

    def end() -> None:
        seen.append("second")
        ended.set()

    port.when_done(first, fail)
    port.when_done(second, end)
    second.happened.set()
    assert seen == []
    first.happened.set()
    assert ended.wait(60)
    assert seen == ["first", "second"]


def test_a_pool_on_the_cpu_has_the_port_of_the_host() -> None:
    assert isinstance(open_port(torch.device("cpu")), HostPort)


class Runtime:
    """CUDA's registrations; refuses the one with this number."""

    def __init__(self, refused: int = -1) -> None:
        self.registered: list[tuple[int, int]] = []
        self.refused = refused

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.registered) == self.refused:
            return 2
        self.registered.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def test_the_arena_is_registered_in_chunks_of_whole_slots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = HostArena(7, 8192)
    try:
        runtime = Runtime()
        assert pin_memory(arena, runtime, chunk_bytes=3 * 8192 + 5000) == arena.nbytes
        begins = [address - arena.address for address, _ in runtime.registered]
        assert begins == [0, 3 * 8192, 6 * 8192]
        assert [size for _, size in runtime.registered] == [3 * 8192, 3 * 8192, 8192]
        assert pin_memory(arena, Runtime(refused=1), chunk_bytes=3 * 8192) == 3 * 8192
        assert "32768 of 57344 bytes of DRAM could not be page-locked" in caplog.text
        assert pin_memory(arena, Runtime(), chunk_bytes=1) == arena.nbytes
    finally:
        arena.close()
