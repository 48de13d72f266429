"""What the load path and the save path ask of a device: streams, events, copies, memory.

As on CUDA: work that is queued on a stream runs in its order, at any time after it was queued; an
event stands for what was queued on a stream when it was recorded; nothing else orders anything.
Copies and kernels go to the stream of the surrounding `on`. Only `synchronize` waits for the
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class DevicePort(ABC):
    """One device. Thread-safe, but for what two threads do on one stream.

    Attributes:
        brings_pages: kernels cannot read the arena; pages are brought to the device's memory first.
        copies_wait: slots are not pinned, so whoever queues a copy of them may wait for the device.
    """

    brings_pages: bool
    copies_wait: bool

    @abstractmethod
    def enter_thread(self) -> None:
        """To be called once by each thread of the plugin's own, before it asks for anything."""

    @abstractmethod
    def new_stream(self, avoid: tuple[Any, ...]) -> Any:
        """A stream that is none of those in `avoid`, nor one that was given before."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The calling thread's stream."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Context in which the calling thread's stream is this one."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """An event behind what was queued on a stream so far; its `wait` is `wait_for` it."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Lets what is queued on a stream from now on wait for an event, on the device."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Lets the calling thread wait for an event."""

    @abstractmethod
    def is_done(self, event: Any) -> bool:
        """Whether an event has happened; waits for nothing."""

    @abstractmethod
    def when_done(self, event: Any, call: Callable[[], None]) -> None:
        """Calls something, in the order of these calls, when an event has happened.

        On a thread of the port's own, or at once where work is never queued.
        """

    @abstractmethod
    def seconds_between(self, first: Any, last: Any) -> float:
        """Seconds from one event to another; both have happened."""

    @abstractmethod
    def empty(self, num_bytes: int) -> Any:
        """Memory of the device, u8 `[num_bytes]`, not initialised."""

    @abstractmethod
    def bring(
        self,
        out: Any,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
    ) -> None:
        """Queues copies of a part of some slots to the device's memory.

        Args:
            out: u8 `[n, span]` on the device, contiguous.
            slots: u8 `[num_slots, slot_bytes]`; see `copies_wait`.
            page_slots: i64 `[n]`, which; may change after the call.
            span: bytes of a slot, with both ends.
        """

    @abstractmethod
    def send(
        self,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
        source: Any,
    ) -> None:
        """Queues copies of the device's memory to a part of some pinned slots: `bring`, back."""

    @abstractmethod
    def upload(self, values: npt.NDArray[np.int64], memory: Any = None) -> Any:
        """Queues a copy of indices to the device; `values` may change after the call.

        Args:
            values: the indices.
            memory: of `empty`, to copy them to; None: some that is free, if any is.

        Raises:
            torch.OutOfMemoryError: none is free.
        """

    @abstractmethod
    def prepare_uploads(self, num_values: int) -> None:
        """Takes what uploads of up to so many values need of the host now; at start."""

    @abstractmethod
    def rows(self, token_slots: torch.Tensor) -> Any:
        """Rows of the pool, as SGLang has them, as the indices that kernels take."""

    @abstractmethod
    def any_below(self, token_slots: torch.Tensor, end: int) -> bool:
        """Whether any of some rows is before `end`; waits for the current stream."""

    @abstractmethod
    def close(self) -> None:
        """Ends the port's thread after what was handed to it."""
