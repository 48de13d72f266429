"""Buffers on the device that pages are brought to, or laid out in, used in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        num_buffers: how many.

    Raises:
        HierKVConfigError: the device has no room for the smallest ring.

    Attributes:
        buffer_bytes: size of one.
        index: the numbers of pages in a buffer, as indices on the device.
    """

    def __init__(
        self, port: DevicePort, layer_bytes: int, num_bytes: int, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._buffers = _buffers(port, layer_bytes, num_bytes, num_buffers)
        self.buffer_bytes = len(self._buffers[0].memory)
        self.index = port.upload(np.arange(self.buffer_bytes // layer_bytes, dtype=np.int64))
        port.synchronize(port.record(port.current_stream()))  # loads use it on streams of theirs
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Of all buffers together."""
        return self.buffer_bytes * len(self._buffers)

    def groups(self, layer_bytes: Sequence[int], num_pages: int) -> Iterator[range]:
        """Neighbouring layers that go through together: as many as a buffer has room for.

        Args:
            layer_bytes: of each layer of a page.
            num_pages: pages that go through together.
        """
        step = max(1, self.buffer_bytes // (num_pages * max(layer_bytes)))
        for first in range(0, len(layer_bytes), step):
            yield range(first, min(first + step, len(layer_bytes)))

    def take(self) -> Buffer:
        """The buffer whose turn it is; may be overwritten behind its `free`."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer


def take_memory(port: DevicePort, sizes: Sequence[int]) -> list[Any]:
    """Memory of the device, to keep.

    Args:
        port: the device.
        sizes: bytes of each piece.

    Raises:
        HierKVConfigError: the device has not so much.
    """
    try:
        pieces = [port.empty(size) for size in sizes]
    except torch.OutOfMemoryError as error:
        raise HierKVConfigError(
            f"--enable-hier-kv needs {sum(sizes)} bytes of device memory to copy through, and less "
            "is free; lower --mem-fraction-static."
        ) from error
    # It may still be in use by what was queued before.
    port.synchronize(port.record(port.current_stream()))
    return pieces


def _buffers(port: DevicePort, layer_bytes: int, num_bytes: int, num_buffers: int) -> list[Buffer]:
    size = max(layer_bytes, num_bytes // num_buffers)
    while True:
        try:
            return [Buffer(memory) for memory in take_memory(port, [size] * num_buffers)]
        except HierKVConfigError:
            if size == layer_bytes:
                raise
            size = max(layer_bytes, size // 2)
