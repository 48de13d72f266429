"""A CUDA device: torch's streams and events, and a thread that calls back when events happen."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ports.cudart import Cudart, CudartError
from sglang_ext.tiers.failure_log import FailureLog

logger = logging.getLogger(__name__)
failures = FailureLog(logger)

# torch hands streams out of a pool of 32, round robin.
_DRAWS = 65
# Indices of a restored page and its corrections are fewer; so many pages may be restored while one
# forward runs before the scheduler's thread has to ask CUDA for page-locked memory.
_SMALL_UPLOAD = 4096
_SMALL_UPLOADS = 16
# Larger ones are of a prompt: while one waits for a forward the next is prepared. More than a
# million values at a time, 8 MB, are of several long ones; memory for these is page-locked then.
_LARGE_UPLOADS = 2
_LARGEST_UPLOAD = 1 << 20
# A load of 8,192 tokens of an 8B model takes 131, four a layer, and a save half as many; while one
# load waits for a forward the next is queued.
_EVENTS = 512


class _Event:
    """One of the port's events, which it has back when nobody holds this any more.

    Who waits for it on the device waits for what was recorded until then, whatever it stands for
    later.
    """

    __slots__ = ("_free", "of_cuda")

    def __init__(self, of_cuda: Any, free: deque[Any]) -> None:
        self.of_cuda = of_cuda
        self._free = free

    def wait(self) -> None:
        """The calling thread's stream waits for it."""
        self.of_cuda.wait()

    def synchronize(self) -> None:
        """The calling thread sleeps until it happened."""
        self.of_cuda.synchronize()

    def __del__(self) -> None:
        self._free.append(self.of_cuda)


class CudaPort(DevicePort):
    """One CUDA device.

    It has many methods because `DevicePort` has.

    Args:
        device: which.
        cuda: what makes streams and events.
        runtime: CUDA's own library; None: pages are copied one by one.
        batches: whether all of the arena is page-locked, as copies in batches want it, and those
            for which nobody waits.
    """

    brings_pages = True

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        runtime: Cudart | None = None,
        *,
        batches: bool = True,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._runtime = runtime
        self.copies_wait = not batches
        self._given: list[Any] = []
        # Made now: no load or save asks the driver for one, but where more are held at a time.
        self._events: deque[Any] = deque(self._new_event() for _ in range(_EVENTS))
        for event in self._events:
            event.record(self.current_stream())  # torch asks the driver no sooner
        # Held together, so that they are different ones; torch keeps them for `upload`.
        blocks = [pinned(_SMALL_UPLOAD) for _ in range(_SMALL_UPLOADS)]
        del blocks
        self._batches = batches and runtime is not None and self._copies_in_batches(runtime)
        self._calls: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hier-kv-landed", daemon=True)
        self._thread.start()

    def enter_thread(self) -> None:
        """Has the thread use this device, and go on while another one captures a graph.

        A new thread's device is the first one, whichever its process uses: the first call of CUDA's
        there would take memory of that device.
        """
        self._cuda.set_device(self._device)
        if self._runtime is not None:
            try:
                self._runtime.allow_during_capture()
            except CudartError as error:
                logger.warning("hier-kv: a graph captured while KV is copied may fail: %s", error)

    def new_stream(self, avoid: tuple[Any, ...]) -> Any:
        """A stream of torch's pool that is none of `avoid`, nor one that was given before.

        None is given back: `Streams` takes all that an engine has.

        Raises:
            RuntimeError: the pool has no other.
        """
        used = [stream for stream in (*avoid, *self._given) if stream is not None]
        taken = {stream.cuda_stream for stream in used}
        for _ in range(_DRAWS):
            stream = self._cuda.Stream(self._device)
            if stream.cuda_stream not in taken:
                self._given.append(stream)
                return stream
        raise RuntimeError(f"CUDA gave no stream that differs from {len(taken)} streams in use")

    def current_stream(self) -> Any:
        """The calling thread's stream."""
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Context in which the calling thread's stream is this one."""
        context: AbstractContextManager[None] = self._cuda.stream(stream)
        return context

    def record(self, stream: Any) -> Any:
        """An event with a time; who waits for it on the host sleeps."""
        try:
            event = self._events.pop()
        except IndexError:
            event = self._new_event()
        event.record(stream)
        return _Event(event, self._events)

    def _new_event(self) -> Any:
        return self._cuda.Event(enable_timing=True, blocking=True)

    def wait(self, stream: Any, event: Any) -> None:
        """Queues a wait on the device."""
        stream.wait_event(event.of_cuda)

    def synchronize(self, event: Any) -> None:
        """Sleeps until it happened."""
        event.of_cuda.synchronize()

    def is_done(self, event: Any) -> bool:
        """Asks the driver."""
        return bool(event.of_cuda.query())

    def when_done(self, event: Any, call: Callable[[], None]) -> None:
        """Calls it on the port's thread."""
        self._calls.put((event, call))

    def seconds_between(self, first: Any, last: Any) -> float:
        """By the device's clock."""
        return 1e-3 * float(first.of_cuda.elapsed_time(last.of_cuda))

    def empty(self, num_bytes: int) -> Any:
        """Memory of torch's."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def bring(
        self,
        out: Any,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
    ) -> None:
        """One call of CUDA, or one a page; they run asynchronously where slots are page-locked."""
        here, there = _addresses(out, slots, page_slots, span)
        if self._copied_in_one_call(here, there, span):
            return
        for row, slot in enumerate(page_slots.tolist()):
            out[row].copy_(torch.from_numpy(slots[slot, span]), non_blocking=True)

    def send(
        self,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
        source: Any,
    ) -> None:
        """As `bring`."""
        here, there = _addresses(source, slots, page_slots, span)
        if self._copied_in_one_call(there, here, span):
            return
        for row, slot in enumerate(page_slots.tolist()):
            torch.from_numpy(slots[slot, span]).copy_(source[row], non_blocking=True)

    def _copied_in_one_call(
        self, targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], span: slice
    ) -> bool:
        """Queues copies of equal size on the current stream; False where CUDA takes no batches.

        From the first one that it refuses on there are none. What of that one it may have queued
        is copied once more: the same bytes, on the same stream.
        """
        if not self._batches or self._runtime is None:
            return False
        stream = self.current_stream().cuda_stream
        try:
            self._runtime.copy_many(targets, sources, span.stop - span.start, stream)
        except CudartError as error:
            self._batches = False
            logger.warning("hier-kv: pages are copied one by one from now on: %s", error)
            return False
        return True

    def upload(self, values: npt.NDArray[np.int64], memory: Any = None) -> Any:
        """Copies by way of page-locked memory, which torch keeps until the copy is done."""
        staged = pinned(_staging_size(len(values)))[: len(values)]
        staged.numpy()[:] = values
        if memory is None:
            return staged.to(self._device, non_blocking=True)
        return memory.view(torch.int64)[: len(values)].copy_(staged, non_blocking=True)

    def prepare_uploads(self, num_values: int) -> None:
        """Page-locks memory for each size, which torch keeps: CUDA takes its time for that."""
        largest = min(num_values, _LARGEST_UPLOAD)
        sizes = {_staging_size(min(1 << bits, largest)) for bits in range(largest.bit_length() + 1)}
        # Held together, as in `__init__`.
        blocks = [pinned(size) for size in sorted(sizes) for _ in range(_LARGE_UPLOADS)]
        del blocks

    def rows(self, token_slots: torch.Tensor) -> Any:
        """They stay on the device."""
        return token_slots.to(torch.int64)

    def any_below(self, token_slots: torch.Tensor, end: int) -> bool:
        """Asks torch."""
        return bool((token_slots < end).any())

    def close(self) -> None:
        """Ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _copies_in_batches(self, runtime: Cudart) -> bool:
        """Whether pages are copied in batches; if not, the log says why."""
        try:
            reason = self._why_no_batches(runtime)
        except CudartError as error:
            reason = str(error)
        if reason:
            logger.info("hier-kv: pages are copied one by one: %s", reason)
        return not reason

    def _why_no_batches(self, runtime: Cudart) -> str:
        """Tries one: the driver may be older than the library. Empty where it can be done.

        What is tried is memory of torch's. That of pages is registered, so what a batch needs of
        that is asked for: to try it could end all that the process has on the device.

        Raises:
            CudartError: CUDA refuses.
        """
        if not runtime.takes_host_addresses(self._device.index or 0):
            return "the device has page-locked memory at other addresses than the host"
        source, stream = pinned(4), self.new_stream(())
        source[:] = torch.arange(4)
        target = torch.zeros(4, dtype=torch.int64, device=self._device)
        try:
            self.synchronize(self.record(self.current_stream()))  # of the zeros
            here, there = (each.data_ptr() + np.array([0, 16]) for each in (target, source))
            runtime.copy_many(here, there, 16, stream.cuda_stream)
            self.synchronize(self.record(stream))
        finally:
            self._given.remove(stream)
        return "" if torch.equal(target.cpu(), source) else "other bytes came than were sent"

    def _run(self) -> None:
        try:
            self.enter_thread()
        except Exception:
            failures.exception("hier-kv: a thread could not be given its device")
        while (item := self._calls.get()) is not None:
            event, call = item
            try:
                self.synchronize(event)
                call()
            except BaseException:
                failures.exception("hier-kv: what should follow a copy failed")
            del item, event, call  # what they kept is free now, not with the next one


def _addresses(
    memory: Any, slots: npt.NDArray[np.uint8], page_slots: npt.NDArray[np.int64], span: slice
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where pages lie in memory of the device, one behind the other, and in slots."""
    on_device = memory.data_ptr() + np.arange(len(page_slots)) * (span.stop - span.start)
    return on_device, slots.ctypes.data + page_slots * slots.strides[0] + span.start


def _staging_size(num_values: int) -> int:
    """Values of the page-locked memory that an upload goes through: few sizes, for all of them."""
    return max(_SMALL_UPLOAD, 1 << (num_values - 1).bit_length() if num_values else 0)


def pinned(count: int) -> torch.Tensor:
    """Page-locked i64 `[count]`."""
    return torch.empty(count, dtype=torch.int64, pin_memory=True)
