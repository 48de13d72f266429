"""Buffers on the device that pages are brought to, used in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_ext.device.ports.base import DevicePort
from sglang_ext.errors import HierKVConfigError

NUM_BUFFERS = 4


@dataclass
class Buffer:
    """One of the ring's.

    Attributes:
        memory: u8 on the device.
        free: event behind what read it last; None while nothing did.
    """

    memory: Any
    free: Any = None


class Ring:
    """A few buffers of equal size. Guarded by who queues loads.

    Args:
        port: the device.
        layer_bytes: of the largest layer of a page; a buffer holds at least one.
        num_bytes: of all buffers together; less where the device has not so much.

    Raises:
        HierKVConfigError: the device has no room for the smallest ring.

    Attributes:
        buffer_bytes: size of one.
        index: the numbers of pages in a buffer, as indices on the device.
    """

    def __init__(self, port: DevicePort, layer_bytes: int, num_bytes: int) -> None:
        self._buffers = _buffers(port, layer_bytes, num_bytes)
        self.buffer_bytes = len(self._buffers[0].memory)
        self.index = port.upload(np.arange(self.buffer_bytes // layer_bytes, dtype=np.int64))
        # Memory and index may still be in use by what was queued when they were made.
        port.synchronize(port.record(port.current_stream()))
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Of all buffers together."""
        return self.buffer_bytes * len(self._buffers)

    def take(self) -> Buffer:
        """The buffer whose turn it is; may be overwritten behind its `free`."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer


def _buffers(port: DevicePort, layer_bytes: int, num_bytes: int) -> list[Buffer]:
    size = max(layer_bytes, num_bytes // NUM_BUFFERS)
    while True:
        try:
            return [Buffer(port.empty(size)) for _ in range(NUM_BUFFERS)]
        except torch.OutOfMemoryError as error:
            if size == layer_bytes:
                raise HierKVConfigError(
                    f"--enable-hier-kv needs {NUM_BUFFERS * size} bytes of device memory to load "
                    "through, and less is free; lower --mem-fraction-static."
                ) from error
            size = max(layer_bytes, size // 2)
