"""The order of saves, and of copies inside the pool, with the forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sglang_ext.device.ports.base import DevicePort

# K of a layer of so many pages lies on the device while it is saved: 4 MB at 2 KB a token.
PAGES_A_SAVE = 32


class CopyStreams:
    """The stream of saves, and its order with the forwards; nothing on a CPU."""

    def __init__(self, port: DevicePort, forward_stream: Any) -> None:
        self._port = port
        self._forward_stream = forward_stream
        self._save: Any = None

    def enter_thread(self) -> None:
        """To be called once by the thread that saves."""
        self._port.enter_thread()

    @property
    def pages_a_save(self) -> int | None:
        """Pages to copy at once, so that memory for them is bounded; None: any number."""
        return PAGES_A_SAVE if self._port.brings_pages else None

    def save_events(self) -> list[Any]:
        """Events behind which the pages of a node are complete on the device; scheduler's thread.

        The current stream has computed which rows they are; the forward stream may be writing them.
        """
        port = self._port
        if not port.brings_pages:
            return []
        writers = [port.current_stream()]  # here the scheduler's
        if self._forward_stream is not None:
            writers.append(self._forward_stream)
        if self._save is None:
            self._save = port.new_stream((self._forward_stream, writers[0]))
        return [port.record(stream) for stream in writers]

    def in_forward_order(self, *inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Context whose work runs where the forwards do, behind the current stream's so far."""
        port, current = self._port, self._port.current_stream()
        stream = self._forward_stream
        if stream is None or not port.brings_pages:
            return port.on(current)
        port.wait(stream, port.record(current))
        for tensor in inputs:
            tensor.record_stream(stream)
        return port.on(stream)

    @contextmanager
    def saving(self, events: list[Any]) -> Iterator[None]:
        """Context in which a save's copies run; when it ends, however it does, they are done.

        Slots are published behind it, or given to others where the save failed.
        """
        for event in events:
            self._port.synchronize(event)
        with self._port.on(self._save):
            try:
                yield
            finally:
                self._port.synchronize(self._port.record(self._save))
