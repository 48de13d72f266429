"""A CUDA device: torch's streams and events, and a thread that calls back when events happen."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.ports.base import DevicePort

logger = logging.getLogger(__name__)

# torch hands streams out of a pool of 32, round robin.
_DRAWS = 65


class CudaPort(DevicePort):
    """One CUDA device.

    Args:
        device: which.
        cuda: what makes streams and events.
    """

    brings_pages = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._calls: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hier-kv-landed", daemon=True)
        self._thread.start()

    def new_stream(self, avoid: tuple[Any, ...]) -> Any:
        """A stream of torch's pool that is none of `avoid`.

        Raises:
            RuntimeError: the pool has no other.
        """
        taken = {stream.cuda_stream for stream in avoid if stream is not None}
        for _ in range(_DRAWS):
            stream = self._cuda.Stream(self._device)
            if stream.cuda_stream not in taken:
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
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Queues a wait on the device."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """Sleeps until it happened."""
        event.synchronize()

    def when_done(self, event: Any, call: Callable[[], None]) -> None:
        """Calls it on the port's thread."""
        self._calls.put((event, call))

    def seconds_between(self, first: Any, last: Any) -> float:
        """By the device's clock."""
        return 1e-3 * float(first.elapsed_time(last))

    def empty(self, num_bytes: int) -> Any:
        """Memory of torch's."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy_in(self, out: Any, source: npt.NDArray[np.uint8]) -> None:
        """Runs asynchronously where `source` is page-locked."""
        out.copy_(torch.from_numpy(source), non_blocking=True)

    def upload(self, values: npt.NDArray[np.int64]) -> Any:
        """Copies by way of page-locked memory, which torch keeps until the copy is done."""
        staged = pinned(len(values))
        staged.numpy()[:] = values
        return staged.to(self._device, non_blocking=True)

    def rows(self, token_slots: torch.Tensor) -> Any:
        """They stay on the device."""
        return token_slots.to(torch.int64)

    def close(self) -> None:
        """Ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            event, call = item
            try:
                event.synchronize()
                call()
            except Exception:
                logger.exception("hier-kv: what should follow a copy failed")


def pinned(count: int) -> torch.Tensor:
    """Page-locked i64 `[count]`."""
    return torch.empty(count, dtype=torch.int64, pin_memory=True)
