"""What the port asks of CUDA, and of whom: a stand-in says what it was asked."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.engine import PAGE, TINY, Engine
from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.load_path import LoadParts
from sglang_ext.device.load_thread import LoadThread
from sglang_ext.device.pinning import pin_memory
from sglang_ext.device.ports import cuda, cudart, open_port
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.host import HostPort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.save_path import SaveParts
from sglang_ext.device.save_thread import SaveThread
from sglang_ext.tiers.host import HostArena
from testkit.simulated.cuda import Cuda, Event, HappenedEvent, Stream


@pytest.fixture(autouse=True)
def page_locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were page-locked, of memory which is not."""
    sizes: list[int] = []

    def pinned(count: int) -> torch.Tensor:
        sizes.append(count)
        return torch.empty(count, dtype=torch.int64)

    monkeypatch.setattr(cuda, "pinned", pinned)
    return sizes


@pytest.fixture
def port() -> Any:
    made = CudaPort(torch.device("cpu"), Cuda())
    yield made
    made.close()


def test_a_thread_of_ours_uses_the_ranks_device_from_its_first_call_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each rank whose GPU is not the first one would take memory of that one, too."""
    stand_in = Cuda(event=HappenedEvent)

    class Runtime:
        def allow_during_capture(self) -> None:
            stand_in.note("allow_during_capture")

    runtime: Any = Runtime()
    monkeypatch.setattr(
        "bench.gpu.engine.open_port",
        lambda device, pinned: CudaPort(device, stand_in, runtime, batches=False),
    )
    engine = Engine(torch.device("cpu"), TINY)
    store: Any = None  # nothing is saved or loaded
    port, stream = engine.port, Stream(7)
    layers = LoadParts([engine.loads], [range(TINY.layers)])
    loads = LoadThread(store, [engine.copier], layers, port, LoadCounter(TINY.layers))
    saves = SaveThread(store, SaveParts([engine.saves]), PAGE)
    try:
        saves.after_saves(lambda: port.synchronize(port.record(stream)))
        port.when_done(port.record(stream), lambda: port.synchronize(port.record(stream)))
    finally:
        saves.close()
        loads.close()
        engine.close()
    entered = ["set_device cpu", "allow_during_capture"]
    assert stand_in.asked_by("hier-kv-load") == entered
    assert stand_in.asked_by("hier-kv-save") == [*entered, "record"]
    assert stand_in.asked_by("hier-kv-landed") == [*entered, "record"]


def test_a_stream_is_none_of_those_in_use_nor_one_of_our_own(port: CudaPort) -> None:
    used = [Stream(number) for number in (0, 1)]
    assert {port.new_stream((*used, None)).cuda_stream for _ in range(2)} == {2, 3}
    with pytest.raises(RuntimeError, match="gave no stream that differs from 4 streams"):
        port.new_stream((*used, None))


def test_parts_of_an_engine_share_five_streams_which_are_none_of_sglangs() -> None:
    stand_in = Cuda(num_streams=32)
    port = CudaPort(torch.device("cpu"), stand_in)
    forwards, schedule, copies = (Stream(number) for number in (2, 3, 5))
    streams = Streams(port, forwards)
    streams.take(schedule, copies, None)
    drawn = stand_in.drawn
    streams.take(Stream(0))  # as at each load and save
    port.close()
    ours = (streams.copies, streams.scatters, streams.states, streams.gathers, streams.sends)
    assert [stream.cuda_stream for stream in ours] == [1, 4, 6, 7, 8]
    assert stand_in.drawn == drawn == 8


def test_memory_for_small_uploads_is_page_locked_when_the_server_starts(
    port: CudaPort, page_locked: list[int]
) -> None:
    assert page_locked == [4096] * 16
    port.upload(np.arange(4000))
    assert page_locked[16:] == [4096]  # of one of these, by torch


def test_memory_for_the_uploads_of_a_prompt_is_page_locked_when_the_server_starts(
    port: CudaPort, page_locked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each load that is larger than any before would wait for CUDA to do that."""
    page_locked.clear()
    port.prepare_uploads(300_000)
    sizes = [1 << bits for bits in range(12, 20)]  # 4,096 to 524,288 values
    assert page_locked == [size for size in sizes for _ in range(2)]
    page_locked.clear()
    for num_values in (1, 4097, 300_000):
        port.upload(np.arange(num_values))
    assert page_locked == [4096, 8192, 524_288]
    page_locked.clear()
    port.prepare_uploads(1 << 40)  # no more than 8 MB a block
    assert max(page_locked) == 1 << 20
    monkeypatch.setattr(cuda, "_SMALL_UPLOAD", 64)
    monkeypatch.setattr(
        "bench.gpu.engine.open_port",
        lambda device, pinned: CudaPort(device, Cuda(event=HappenedEvent)),
    )
    page_locked.clear()
    engine = Engine(torch.device("cpu"), TINY)
    engine.close()
    assert page_locked.count(2 * TINY.tokens) == 2  # positions of all rows of the pool, moved


def test_nothing_but_synchronize_waits_for_the_device(port: CudaPort) -> None:
    stream, other = port.new_stream(()), port.new_stream(())
    event = port.record(stream)  # which never happens
    assert event.of_cuda.stream is stream
    assert event.of_cuda.options == {"enable_timing": True, "blocking": True}
    port.wait(other, event)
    assert other.waits == [event.of_cuda]
    with port.on(stream):
        assert port.current_stream() is stream
        memory = port.empty(12).reshape(2, 6)
        slots = np.arange(40, dtype=np.uint8).reshape(4, 10)
        port.bring(memory, slots, np.array([3, 1]), slice(2, 8))
        assert np.array_equal(memory.numpy(), slots[[3, 1], 2:8])
        values = np.arange(5)
        uploaded = port.upload(values)
        values[:] = 0
        assert uploaded.tolist() == [0, 1, 2, 3, 4]
        assert port.rows(torch.tensor([3, 1], dtype=torch.int32)).dtype == torch.int64
    assert port.seconds_between(event, event) == 0.25
    event.of_cuda.happened.set()
    port.synchronize(event)


def test_events_are_made_at_start_and_used_again_when_nobody_holds_them(port: CudaPort) -> None:
    made, stream = Event.made, port.new_stream(())
    for _ in range(3):
        held = [port.record(stream) for _ in range(cuda._EVENTS)]
        assert len({id(event.of_cuda) for event in held}) == cuda._EVENTS
        del held
    assert Event.made == made
    held = [port.record(stream) for _ in range(cuda._EVENTS + 1)]
    assert Event.made == made + 1
    ended = threading.Event()
    held[0].of_cuda.happened.set()
    one, num_free = held[0].of_cuda, len(port._events)
    port.when_done(held.pop(0), ended.set)
    assert ended.wait(60)
    port.when_done(held[0], threading.Event().set)  # the thread waits for another one now
    while len(port._events) == num_free:
        time.sleep(0.001)
    assert port._events[-1] is one
    held[0].of_cuda.happened.set()


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
    second.of_cuda.happened.set()
    assert seen == []
    first.of_cuda.happened.set()
    assert ended.wait(60)
    assert seen == ["first", "second"]


STUB = """
#include <string.h>
#include <stddef.h>
typedef struct { int order; int source[2]; int target[2]; unsigned flags; } attributes;
int mode = 7, status = 0, same_addresses = 1;
int cudaThreadExchangeStreamCaptureMode(int *to) {
    int before = mode; mode = *to; *to = before; return status;
}
int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, attributes *how,
                         size_t *first, size_t num, %s void *stream) {
    if (how->order != 1 || how->source[0] || how->target[1] || how->flags) return 101;
    if (num != 1 || first[0] || stream != (void *)0x123456789aUL) return 102;
    for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], sizes[i]);
    return status;
}
int cudaDeviceGetAttribute(int *value, int what, int device) {
    if (what != 91 || device != 3) return 103;
    *value = same_addresses; return status;
}
int cudaGetLastError(void) { int last = status; status = 0; return last; }
"""


@pytest.fixture(params=[12, 13])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A library with the arguments that CUDA's header gives the two calls."""
    source = tmp_path / "stub.c"
    source.write_text(STUB % ("size_t *failed," if request.param == 12 else ""))
    out = tmp_path / f"libcudart.so.{request.param}"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", out, source], check=True)
    return out


def maps_of(tmp_path: Path, *libraries: Path) -> Path:
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 00:1f 77    {path}\n" for path in libraries))
    return maps


def test_pages_are_copied_in_one_call_of_cudas(library: Path, tmp_path: Path) -> None:
    runtime = cudart.find_cudart(maps_of(tmp_path, library))
    assert runtime is not None
    slots = np.arange(40, dtype=np.uint8).reshape(4, 10)
    out = np.zeros((3, 6), np.uint8)
    which = np.array([3, 0, 2])
    here = out.ctypes.data + 6 * np.arange(3)
    runtime.copy_many(here, slots.ctypes.data + 10 * which + 2, 6, 0x123456789A)
    assert np.array_equal(out, slots[which, 2:8])
    runtime.copy_many(here[:0], here[:0], 6, 0)  # nothing to do
    with pytest.raises(cudart.CudartError, match="must succeed, got CUDA error 102"):
        runtime.copy_many(here, here, 6, 0)


def test_an_error_that_was_dealt_with_is_taken_back(library: Path, tmp_path: Path) -> None:
    """Or torch would take it for one of the next kernel's."""
    maps = maps_of(tmp_path, library, library)
    status = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "status")
    runtime = cudart.find_cudart(maps)
    assert runtime is not None
    status.value = 35
    with pytest.raises(cudart.CudartError, match="got CUDA error 35"):
        runtime.allow_during_capture()
    assert status.value == 0
    arena = HostArena(3, 8192)
    status.value = 2
    try:
        pin_memory(arena, Runtime(refused=0), forget=partial(cudart.forget_error, maps))
    finally:
        arena.close()
    assert status.value == 0


def test_an_error_is_not_taken_back_where_the_library_is_gone(tmp_path: Path) -> None:
    cudart.forget_error(maps_of(tmp_path, tmp_path / "gone" / "libcudart.so.12"))


def test_a_thread_may_wait_while_another_captures_a_graph(
    library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = cudart.find_cudart(maps_of(tmp_path, library))
    assert runtime is not None
    entered = []
    runtime.allow_during_capture = lambda: entered.append(threading.current_thread().name)  # type: ignore[method-assign]
    port = CudaPort(torch.device("cpu"), Cuda(), runtime, batches=False)
    port.close()
    assert entered == ["hier-kv-landed"]
    del runtime.allow_during_capture
    runtime.allow_during_capture()
    stub = ctypes.CDLL(str(library))
    assert ctypes.c_int.in_dll(stub, "mode").value == 2  # relaxed
    ctypes.c_int.in_dll(stub, "status").value = 35
    port = CudaPort(torch.device("cpu"), Cuda(), runtime, batches=False)
    port.enter_thread()  # says so, and goes on
    port.close()
    assert "may fail: cudaThreadExchangeStreamCaptureMode must succeed" in caplog.text


def test_without_batches_pages_are_copied_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    gone = tmp_path / "libcudart.so.13"
    assert cudart.find_cudart(maps_of(tmp_path)) is None
    assert cudart.find_cudart(maps_of(tmp_path, gone)) is None
    assert caplog.text.count("pages are copied one by one") == 2
    monkeypatch.setattr(Event, "synchronize", lambda self: None)

    class Refuses:
        def allow_during_capture(self) -> None: ...

        def takes_host_addresses(self, device: int) -> bool:
            return True

        def copy_many(self, *_: Any) -> None:
            raise cudart.CudartError("the driver is too old")

    port = CudaPort(torch.device("cpu"), Cuda(), Refuses())  # type: ignore[arg-type]
    slots, memory = np.arange(40, dtype=np.uint8).reshape(4, 10), port.empty(10)
    port.bring(memory.reshape(1, 10), slots, np.array([2]), slice(0, 10))
    assert memory.tolist() == slots[2].tolist()
    assert len({port.new_stream(()).cuda_stream for _ in range(4)}) == 4  # what tried has none
    port.close()
    assert "the driver is too old" in caplog.text


def test_no_batch_is_tried_where_the_device_has_other_addresses_of_page_locked_memory(
    library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under WSL2 a batch of an arena's pages is taken, and ends the process."""
    caplog.set_level(logging.INFO)
    runtime = cudart.find_cudart(maps_of(tmp_path, library))
    assert runtime is not None
    assert runtime.takes_host_addresses(3)
    with pytest.raises(cudart.CudartError, match=r"cudaDeviceGetAttribute must .* CUDA error 103$"):
        runtime.takes_host_addresses(0)
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "same_addresses").value = 0
    assert not runtime.takes_host_addresses(3)

    class OfWsl:
        def allow_during_capture(self) -> None: ...

        def takes_host_addresses(self, device: int) -> bool:
            return False

        def copy_many(self, *_: Any) -> None:
            raise AssertionError("a batch")

    port = CudaPort(torch.device("cpu"), Cuda(event=HappenedEvent), OfWsl())  # type: ignore[arg-type]
    slots, memory = np.arange(40, dtype=np.uint8).reshape(4, 10), port.empty(10)
    port.bring(memory.reshape(1, 10), slots, np.array([2]), slice(0, 10))
    port.close()
    assert memory.tolist() == slots[2].tolist()
    assert "page-locked memory at other addresses than the host" in caplog.text


def test_a_batch_that_cuda_refuses_is_copied_one_by_one_and_so_are_all_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was tried at start is two small copies of torch's own memory, not pages of an arena."""

    class RefusesPages:
        asked = 0

        def allow_during_capture(self) -> None: ...

        def takes_host_addresses(self, device: int) -> bool:
            return True

        def copy_many(self, targets: Any, sources: Any, num_bytes: int, stream: int) -> None:
            self.asked += 1
            if num_bytes > 16:
                raise cudart.CudartError("cudaMemcpyBatchAsync must succeed, got CUDA error 1")
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, num_bytes)

    runtime: Any = RefusesPages()
    port = CudaPort(torch.device("cpu"), Cuda(event=HappenedEvent), runtime)
    try:
        slots, memory = np.arange(200, dtype=np.uint8).reshape(4, 50), port.empty(80).reshape(2, 40)
        for which in (np.array([3, 1]), np.array([0, 2])):
            port.bring(memory, slots, which, slice(2, 42))
            assert np.array_equal(memory.numpy(), slots[which, 2:42])
        memory.fill_(7)
        port.send(slots, np.array([1, 3]), slice(5, 45), memory)
        assert (slots[[1, 3], 5:45] == 7).all()
    finally:
        port.close()
    assert runtime.asked == 2  # at start, and of the first pages
    assert caplog.text.count("copied one by one from now on") == 1


def test_a_pool_on_the_cpu_has_the_port_of_the_host() -> None:
    assert isinstance(open_port(torch.device("cpu")), HostPort)


class Runtime:
    """CUDA's registrations; refuses the one with this number."""

    def __init__(self, refused: int = -1) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[tuple[int, bytes]] = []  # addresses, and what is there then
        self.refused = refused

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.registered) == self.refused:
            return 2
        self.registered.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append((address, ctypes.string_at(address, 4)))
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


def test_registrations_end_before_the_memory_does() -> None:
    arena, runtime = HostArena(3, 8192), Runtime()
    arena.slots[:, :4] = np.frombuffer(b"here", np.uint8)
    pin_memory(arena, runtime, chunk_bytes=2 * 8192)
    address = arena.address
    assert not runtime.unregistered
    assert arena.close()
    assert runtime.unregistered == [(address + 2 * 8192, b"here"), (address, b"here")]
    arena.close()
    assert len(runtime.unregistered) == 2  # and not at exit, either


def test_no_child_shares_pages_that_are_page_locked() -> None:
    """Else a write after a fork moves the page away from the one that CUDA copies from and to."""
    arena = HostArena(3, 8192)
    try:
        arena.slots[:] = 1
        assert _shared_with_a_child(arena) == arena.nbytes  # of which no device knows
        pin_memory(arena, Runtime())
        assert _shared_with_a_child(arena) == 0
    finally:
        arena.close()


def _shared_with_a_child(arena: HostArena) -> int:
    """Bytes of the arena that a process has which is forked now, by the kernel's own list.

    It does nothing but wait for its end: other threads may have held locks when it began.
    """
    libc = ctypes.PyDLL(None)
    child = libc.fork()
    if child == 0:
        libc.pause()
    assert child > 0
    try:
        maps = Path(f"/proc/{child}/maps").read_text()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    spans = [line.split()[0].split("-") for line in maps.splitlines()]
    begin, end = arena.address, arena.address + arena.nbytes
    return sum(max(0, min(end, int(b, 16)) - max(begin, int(a, 16))) for a, b in spans)
