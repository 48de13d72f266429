"""A pool in the machine's own memory: all work is done when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.ports.base import DevicePort


class HostPort(DevicePort):
    """The CPU; an event is the time at which it was recorded, in seconds."""

    brings_pages = False
    copies_wait = False

    def enter_thread(self) -> None:
        """Any thread may do anything."""

    def new_stream(self, avoid: tuple[Any, ...]) -> Any:
        """There is none."""
        return None

    def current_stream(self) -> Any:
        """There is none."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Nothing to change."""
        return nullcontext()

    def record(self, stream: Any) -> Any:
        """All that was asked for is done."""
        return time.monotonic()

    def wait(self, stream: Any, event: Any) -> None:
        """It has happened."""

    def synchronize(self, event: Any) -> None:
        """It has happened."""

    def is_done(self, event: Any) -> bool:
        """It has happened."""
        return True

    def when_done(self, event: Any, call: Callable[[], None]) -> None:
        """Calls it now."""
        call()

    def seconds_between(self, first: Any, last: Any) -> float:
        """Seconds between two events."""
        return float(last - first)

    def empty(self, num_bytes: int) -> Any:
        """Ordinary memory."""
        return np.empty(num_bytes, np.uint8)

    def bring(
        self,
        out: Any,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
    ) -> None:
        """Copies the bytes."""
        out[:] = slots[page_slots, span]

    def send(
        self,
        slots: npt.NDArray[np.uint8],
        page_slots: npt.NDArray[np.int64],
        span: slice,
        source: Any,
    ) -> None:
        """Copies the bytes."""
        slots[page_slots, span] = source

    def upload(self, values: npt.NDArray[np.int64], memory: Any = None) -> Any:
        """A copy of them."""
        return values.copy()

    def prepare_uploads(self, num_values: int) -> None:
        """They need nothing."""

    def rows(self, token_slots: torch.Tensor) -> Any:
        """As numpy has them."""
        return token_slots.to(torch.int64).cpu().numpy()

    def any_below(self, token_slots: torch.Tensor, end: int) -> bool:
        """Asks torch."""
        return bool((token_slots < end).any())

    def close(self) -> None:
        """There is no thread."""
