"""CUDA streams and events of the copies between device pool and DRAM; nothing on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CopyStreams:
    """The streams of saves and loads, and their order with the forwards, synchronous on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._save: Any = _new_stream(device) if self._cuda else None
        self._load: Any = _new_stream(device) if self._cuda else None

    def save_events(self, record: Callable[[], list[Any]]) -> list[Any]:
        """Events, made by SGLang, after which the pages of a node are complete on the device."""
        return record() if self._cuda else []

    def fence_loads(self, forward_stream: Any) -> None:
        """Orders the next loads after the forward in flight, which may still write freed rows."""
        if self._load is not None:
            self._load.wait_stream(torch.cuda.current_stream())
            if forward_stream is not None:
                self._load.wait_stream(forward_stream)

    def in_forward_order(self, forward_stream: Any, *inputs: torch.Tensor) -> Any:
        """Context whose work runs where the forwards do, behind the current stream's so far."""
        if not self._cuda:
            return _NULL
        stream = forward_stream or torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        for tensor in inputs:
            tensor.record_stream(stream)
        return torch.cuda.stream(stream)

    def saving(self, events: list[Any]) -> Any:
        """Context in which a save's copies run."""
        if self._save is None:
            return _NULL
        for event in events:
            event.synchronize()
        return torch.cuda.stream(self._save)

    def loading(self) -> Any:
        """Context in which a batch's copies run."""
        return _NULL if self._load is None else torch.cuda.stream(self._load)

    def record(self) -> Any:
        """An event behind the copies queued so far; None on a CPU."""
        if self._load is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._load)
        return event

    def synchronize(self) -> None:
        """Waits until the load stream is empty, so that slots may be given back."""
        if self._load is not None:
            self._load.synchronize()


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Null:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NULL = _Null()
