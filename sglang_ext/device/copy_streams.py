"""The order of saves, and of copies inside the pool, with the forwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_ext.device.ports.base import DevicePort


class CopyStreams:
    """The stream of saves, and its order with the forwards; nothing on a CPU."""

    def __init__(self, port: DevicePort, forward_stream: Any) -> None:
        self._port = port
        self._forward_stream = forward_stream
        self._save: Any = None

    def save_events(self, record: Callable[[], list[Any]]) -> list[Any]:
        """Events, made by SGLang, after which the pages of a node are complete on the device."""
        if not self._port.brings_pages:
            return []
        if self._save is None:  # not before: here the current stream is the scheduler's
            used = (self._forward_stream, self._port.current_stream())
            self._save = self._port.new_stream(used)
        return record()

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

    def saving(self, events: list[Any]) -> AbstractContextManager[None]:
        """Context in which a save's copies run."""
        for event in events:
            event.synchronize()
        return self._port.on(self._save)
