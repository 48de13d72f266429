"""A device that is only simulated, and proves that what happens on it is ordered.

Streams are queues of work that a seed runs late, early or in any order that the events allow. Each
stream and thread carries a vector clock. Every read and write of a row of the pool, of a buffer on
the device and of a slot of the arena is noted with the clock that it has by order alone: two of
which one is a write, and neither is ordered behind the other, are a `Conflict`, however lucky the
timing was.

Threads are played: one real thread acts as each of them in turn (`acting`), and what hands
something from one to another says so (`hand_over`).

Tensors of SGLang's own (`tensor`) are guarded: a thread that must not wait for the device must not
look into one, and memory of one that nobody holds any more is written again.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from sglang_ext.device.ports.base import DevicePort

# What of torch waits for the device when it is asked of a tensor there.
_WAITS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "is_nonzero", "unique",
    "masked_select", "repeat_interleave", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "__array__",
}  # fmt: skip
_INDEXES = {"__getitem__", "__setitem__"}

Clock = dict[str, int]
Cell = tuple[Any, ...]
GRANULE_BYTES = 64


class ConflictError(AssertionError):
    """Two accesses that nothing orders, or a thread that waited and must not."""


class DeviceThreadError(AssertionError):
    """What the device's own thread called failed: no conflict, and right nowhere."""


@dataclass
class Event:
    """What was queued on a stream when it was recorded."""

    device: SimulatedDevice
    clock: Clock
    at: float | None = None  # when it happened

    def wait(self) -> None:
        """The calling thread's stream waits for it."""
        self.device.wait(self.device.current_stream(), self)

    def synchronize(self) -> None:
        self.device.synchronize(self)


@dataclass
class Stream:
    """Work in order; an entry is done, waited for, or called."""

    name: str
    clock: Clock = field(default_factory=dict)
    queued: deque[tuple[Event | None, Callable[[], None]]] = field(default_factory=deque)


@dataclass
class _Cell:
    """Who wrote and who read last, by name and tick."""

    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)


class DeviceTensor(torch.Tensor):
    """A tensor that SGLang has on the device, as `SimulatedDevice.tensor` makes it."""

    simulated: SimulatedDevice
    cell: Cell
    source: torch.Tensor  # that it is a view of, which stays as long as it does

    def record_stream(self, stream: Any) -> None:
        """Torch takes streams of its own only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        device = next(each.simulated for each in flat if isinstance(each, cls))
        name = getattr(func, "__name__", "")
        if name in _WAITS or _comes_to_the_host(name, args, kwargs or {}):
            device.require_may_wait(name)
        if name in _INDEXES and _has_host_indices(args[1]):
            device.require_may_wait(f"{name} with indices of the host's")
        if name in _INDEXES and _has_mask(args[1]):
            device.require_may_wait(f"{name} with a mask")
        real: Any = super().__torch_function__
        result = real(func, types, args, kwargs or {})
        for each in tree_leaves(result):
            if isinstance(each, cls):
                each.simulated, each.cell, each.source = device, cell_of(flat[0]), flat[0]
        return result


class SimulatedDevice(DevicePort):
    """A device with memory of its own.

    Args:
        seed: decides when what runs.
        may_not_wait: threads that must not wait for the device.

    It has many methods because all streams and threads share its clocks.
    """

    brings_pages = True

    def __init__(self, seed: int, may_not_wait: Iterable[str] = ("scheduler",)) -> None:
        self.rng = random.Random(seed)
        self.copies_wait = False  # as where DRAM could not be page-locked
        self.eagerness = self.rng.choice((0.0, 0.1, 0.5, 1.0))
        self.may_not_wait = set(may_not_wait)
        self.counts: dict[str, int] = {}
        self.bytes_in = self.bytes_out = 0
        self.conflicts: list[ConflictError | DeviceThreadError] = []
        self._thread = "scheduler"
        self._threads: dict[str, Clock] = {}
        self._streams: list[Stream] = []
        self._on: dict[str, list[Stream]] = {}
        self._cells: dict[Cell, _Cell] = {}
        self._memories: list[tuple[int, int, str, int]] = []
        self._kept: list[Any] = []  # an address stays that of one thing
        self._calls: deque[tuple[Event, str, Callable[[], None]]] = deque()
        self._step = 0.0
        # Memory that was given back, by the stream it was taken on and its size.
        self._heap: dict[tuple[str, int], list[npt.NDArray[np.int64]]] = {}
        self.memory_left: int | None = None  # None: enough
        self.copies_fail_in: int | None = None  # calls until one fails half-way; None: never
        self._num_tensors = 0
        # Tensors of SGLang's that nobody holds, by the stream they were made on.
        self._freed: dict[str, list[tuple[Cell, Clock]]] = {}

    # ---- threads ----

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """What is called acts as this thread."""
        before, self._thread = self._thread, name
        try:
            yield
        finally:
            self._thread = before

    def hand_over(self) -> Clock:
        """What the acting thread has done so far, for `take_over`."""
        clock = self._clock()
        clock[self._thread] = clock.get(self._thread, 0) + 1
        return dict(clock)

    def take_over(self, clock: Clock) -> None:
        """The acting thread goes on behind what another had done."""
        _merge(self._clock(), clock)

    def _clock(self) -> Clock:
        return self._threads.setdefault(self._thread, {})

    # ---- the port ----

    def enter_thread(self) -> None: ...

    def new_stream(self, avoid: tuple[Any, ...]) -> Stream:
        self._streams.append(Stream(f"stream {len(self._streams)}"))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        stack = self._on.setdefault(self._thread, [])
        if not stack:
            stack.append(self.new_stream(()))
        return stack[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        stack = self._on.setdefault(self._thread, [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def record(self, stream: Stream) -> Event:
        event = Event(self, dict(stream.clock))

        def happen() -> None:
            event.at = self._step

        stream.queued.append((None, happen))
        self._maybe_run()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        _merge(stream.clock, event.clock)
        stream.queued.append((event, _nothing))

    def require_may_wait(self, what: str) -> None:
        """Raises where the acting thread must not wait for the device.

        Raises:
            ConflictError: it must not.
        """
        if self._thread in self.may_not_wait:
            self._conflict(f"thread {self._thread} waits for the device: {what}")

    def synchronize(self, event: Event) -> None:
        self.require_may_wait("synchronize")
        self.count("synchronize")
        while event.at is None:
            self.run(1)
        _merge(self._clock(), event.clock)

    def is_done(self, event: Event) -> bool:
        if _happened(event):
            _merge(self._clock(), event.clock)
        return _happened(event)

    def when_done(self, event: Event, call: Callable[[], None]) -> None:
        clock = self.hand_over()

        def follow() -> None:
            self.take_over(clock)
            call()

        self._calls.append((event, self._landing_thread(), follow))

    def _landing_thread(self) -> str:
        """Name of the thread of the device's that calls what the acting thread has called."""
        return "landed"

    def seconds_between(self, first: Event, last: Event) -> float:
        assert first.at is not None
        assert last.at is not None
        return last.at - first.at

    def empty(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        memory = np.full(num_bytes + GRANULE_BYTES, 0x5A, np.uint8)
        memory = memory[-memory.ctypes.data % GRANULE_BYTES :][:num_bytes]
        self.add_memory(memory, "buffer", GRANULE_BYTES)
        self.count("device_bytes", num_bytes)
        return memory

    def bring(
        self,
        out: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
    ) -> None:
        if self.copies_wait:
            self.require_may_wait("a copy of slots that are not page-locked")
        which, fails = self._queued(page_slots)
        part = out[: len(which)]

        def copy() -> None:
            part[:] = slots[which, span]

        self.count("copies")
        self.bytes_in += part.nbytes
        reads = [cell for slot in which.tolist() for cell in self.cells_of(slots[slot, span])]
        self.launch("copy", copy, reads, self.cells_of(part) if len(which) else ())
        _fail_if(fails)

    def send(
        self,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
        source: npt.NDArray[np.uint8],
    ) -> None:
        which, fails = self._queued(page_slots)
        part = source[: len(which)]
        memory = self.raw(part) if len(which) else part

        def copy() -> None:
            slots[which, span] = memory

        self.count("copies")
        self.bytes_out += part.nbytes
        writes = [cell for slot in which.tolist() for cell in self.cells_of(slots[slot, span])]
        self.launch("copy", copy, self.cells_of(part) if len(which) else (), writes)
        _fail_if(fails)

    def _queued(self, page_slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], bool]:
        """The slots of a call whose copies are queued, and whether it fails behind these."""
        if self.copies_fail_in is not None:
            self.copies_fail_in -= 1
            if self.copies_fail_in < 0:
                self.count(f"failed copies on {self._thread}")
                return page_slots[: -(-len(page_slots) // 2)].copy(), True
        return page_slots.copy(), False

    def upload(
        self, values: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.int64]:
        if memory is not None:
            return self._upload_to(memory.view(np.int64)[: len(values)], values.copy())
        taken = self._take(len(values))
        self._upload_to(taken, values.copy())
        free = self._heap[self.current_stream().name, len(taken)]
        return np.asarray(_Handle(taken, free.append))[: len(values)]

    def prepare_uploads(self, num_values: int) -> None: ...

    def _upload_to(
        self, memory: npt.NDArray[np.int64], staged: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:

        def copy() -> None:
            memory[: len(staged)] = staged

        self.count("uploads")
        self.launch("upload", copy, (), self.cells_of(memory))
        return memory

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        """Memory for indices: such as was given back on this stream, as torch does."""
        if self.memory_left is not None and 8 * count > self.memory_left:
            self.count(f"no memory on {self._thread}")
            raise torch.OutOfMemoryError("none is left")
        size = 1 << max(count - 1, 0).bit_length()
        free = self._heap.setdefault((self.current_stream().name, size), [])
        if free:
            return free.pop()
        memory = np.full(size, -1, np.int64)
        self.add_memory(memory, "indices", memory.nbytes)
        self.count("index_bytes", memory.nbytes)
        return memory

    def raw(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same memory, but not kept: work on a device does not keep its memory either."""
        assert array.flags.c_contiguous
        self.cells_of(array)  # known, so it stays an address of ours
        view: Any = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        known: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer=view)
        return known

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """One of SGLang's, which the acting thread's stream makes.

        As torch does, it may be given memory of one of this stream's that nobody holds any more,
        whatever other streams still read there.
        """
        stream = self.current_stream().name
        made: Any = values.clone().as_subclass(DeviceTensor)
        self._num_tensors += 1
        made.simulated, made.cell = self, ("rows", self._num_tensors)
        freed = self._freed.pop(stream, [])
        for _, clock in freed:
            self.take_over(clock)  # the allocator's lock
        self.launch("make a tensor", _nothing, (), [made.cell, *(cell for cell, _ in freed)])
        weakref.finalize(made, self._free, stream, made.cell)
        known: torch.Tensor = made
        return known

    def _free(self, stream: str, cell: Cell) -> None:
        self._freed.setdefault(stream, []).append((cell, dict(self._clock())))

    def rows(self, token_slots: torch.Tensor) -> npt.NDArray[np.int64]:
        self.launch("rows", _nothing, [cell_of(token_slots)], ())
        return plain(token_slots).numpy().astype(np.int64)

    def any_below(self, token_slots: torch.Tensor, end: int) -> bool:
        self.launch("rows", _nothing, [cell_of(token_slots)], ())
        self.synchronize(self.record(self.current_stream()))
        return bool((plain(token_slots) < end).any())

    def close(self) -> None:
        self.deliver(everything=True)

    # ---- work ----

    def launch(
        self, what: str, work: Callable[[], None], reads: Iterable[Cell], writes: Iterable[Cell]
    ) -> None:
        """Queues work on the acting thread's stream, with all that it reads and writes."""
        stream = self.current_stream()
        _merge(stream.clock, self._clock())
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self._note(f"{what} on {stream.name}", stream.name, stream.clock, reads, writes)
        stream.queued.append((None, work))
        self._maybe_run()

    def touch(self, what: str, reads: Iterable[Cell], writes: Iterable[Cell]) -> None:
        """The acting thread itself reads and writes."""
        clock = self._clock()
        clock[self._thread] = clock.get(self._thread, 0) + 1
        self._note(f"{what} by {self._thread}", self._thread, clock, reads, writes)

    def _note(
        self, what: str, who: str, clock: Clock, reads: Iterable[Cell], writes: Iterable[Cell]
    ) -> None:
        tick = clock[who]
        for name in reads:
            cell = self._cells.setdefault(name, _Cell())
            self._require(cell.write, clock, what, name)
            cell.reads[who] = (tick, what)
        for name in writes:
            cell = self._cells.setdefault(name, _Cell())
            self._require(cell.write, clock, what, name)
            for reader, (at, read) in cell.reads.items():
                self._require((reader, at, read), clock, what, name)
            cell.write, cell.reads = (who, tick, what), {}

    def _require(
        self, before: tuple[str, int, str] | None, clock: Clock, what: str, name: Cell
    ) -> None:
        if before is not None and clock.get(before[0], 0) < before[1]:
            self._conflict(f"{what} is not ordered behind {before[2]}: both touch {name}")

    def _conflict(self, what: str) -> NoReturn:
        conflict = ConflictError(what)
        self.conflicts.append(conflict)
        raise conflict

    def require_order(self) -> None:
        """Raises the first conflict again: threads go on after an error.

        Raises:
            ConflictError: there was one.
            DeviceThreadError: see there.
        """
        if self.conflicts:
            raise self.conflicts[0]

    def add_memory(self, memory: npt.NDArray[Any], name: str, granule_bytes: int) -> None:
        """Memory whose accesses are noted, in pieces of some bytes."""
        self._memories.append((memory.ctypes.data, memory.nbytes, name, granule_bytes))
        self._kept.append(memory)

    def cells_of(self, part: npt.NDArray[Any]) -> list[Cell]:
        """The pieces that a contiguous part of known memory touches."""
        first = part.ctypes.data
        for base, size, name, granule in reversed(self._memories):
            if base <= first < base + max(size, 1):
                start, stop = first - base, first - base + max(part.nbytes, 1)
                return [(name, base, at) for at in range(start // granule, -(-stop // granule))]
        raise AssertionError("an access to memory that is not known")

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a count."""
        self.counts[name] = self.counts.get(name, 0) + by

    def run(self, steps: int) -> None:
        """Runs some work, of any stream whose next may run."""
        for _ in range(steps):
            ready = [
                stream
                for stream in self._streams
                if stream.queued and (stream.queued[0][0] is None or _happened(stream.queued[0][0]))
            ]
            if not ready:
                if any(stream.queued for stream in self._streams):
                    self._conflict("all streams wait for one another")
                return
            self._step += 1.0
            try:
                self.rng.choice(ready).queued.popleft()[1]()
            except Exception as error:  # a thread may take it for its own
                self._conflict(f"queued work failed: {error!r}")

    def run_all(self) -> None:
        """Runs all that is queued."""
        while any(stream.queued for stream in self._streams):
            self.run(1)

    def _maybe_run(self) -> None:
        while self.rng.random() < self.eagerness * 0.9:
            self.run(1)

    def deliver(self, *, everything: bool = False) -> None:
        """What follows events is called, on a thread of the device's own, where they happened."""
        while self._calls and (everything or _happened(self._calls[0][0])):
            event, thread, call = self._calls.popleft()
            with self.acting(thread):
                self.synchronize(event)
                call()
                del event, call  # what they kept is given up by this thread


class _Handle:
    """What the host holds of memory for indices; without it, the memory is free again."""

    def __init__(self, memory: npt.NDArray[np.int64], give_back: Callable[..., None]) -> None:
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, give_back, memory)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values, for what is simulated."""
    return tensor.as_subclass(torch.Tensor)


def cell_of(tensor: torch.Tensor) -> Cell:
    """A tensor of SGLang's, as a whole."""
    return getattr(tensor, "cell", ("rows", id(tensor)))


def _has_host_indices(index: Any) -> bool:
    """Whether indices have to be uploaded; slices and numbers have not."""
    parts = index if isinstance(index, tuple) else (index,)
    host = (list, range, np.ndarray, torch.Tensor)
    return any(isinstance(each, host) and not isinstance(each, DeviceTensor) for each in parts)


def _has_mask(index: Any) -> bool:
    """Whether some of the indices are a mask: how many it names is known on the device alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in parts)


def _comes_to_the_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether values are copied to the host's memory."""
    if name == "copy_":
        return not isinstance(args[0], DeviceTensor)
    if name != "to":
        return False
    targets = [str(each) for each in (*args[1:], *kwargs.values()) if not torch.is_tensor(each)]
    return "cpu" in targets


def _fail_if(fails: bool) -> None:
    if fails:
        raise RuntimeError("a copy that was meant to fail")


def _merge(into: Clock, other: Clock) -> None:
    for name, tick in other.items():
        if into.get(name, 0) < tick:
            into[name] = tick


def _happened(event: Event) -> bool:
    return event.at is not None


def _nothing() -> None: ...
