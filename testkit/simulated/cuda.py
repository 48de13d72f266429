"""A stand-in for `torch.cuda`, which says what it was asked, and by whom.

Its memory is the host's, and nothing that is queued has to run: copies are done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    """One of a pool, by its number."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        """Notes it."""
        self.waits.append(event)


class Event:
    """Happens when a test says so."""

    made = 0

    def __init__(self, cuda: Cuda, **options: bool) -> None:
        Event.made += 1
        self.options = options
        self._cuda = cuda
        self.stream: Stream | None = None
        self.happened = threading.Event()

    def record(self, stream: Stream) -> None:
        """Notes the stream."""
        self._cuda.note("record")
        self.stream = stream

    def synchronize(self) -> None:
        """Waits for the test."""
        self._cuda.note("synchronize")
        assert self.happened.wait(60)

    def elapsed_time(self, other: Event) -> float:
        """A quarter of a second, in ms."""
        return 250.0


class HappenedEvent(Event):
    """One of a device that does at once what is queued."""

    def synchronize(self) -> None:
        """Waits for nothing."""


class Cuda:
    """What a port asks `torch.cuda` for.

    Args:
        num_streams: of its pool, which it hands out round robin, as torch does.
        event: kind of its events.

    Attributes:
        asked: names of threads, and what each asked for, in order.
    """

    def __init__(self, num_streams: int = 4, event: type[Event] = Event) -> None:
        self.drawn = 0
        self.num_streams = num_streams
        self._event = event
        self.asked: list[tuple[str, str]] = []
        self.current = Stream(0)

    def note(self, what: str) -> None:
        """The calling thread asks for something."""
        self.asked.append((threading.current_thread().name, what))

    def asked_by(self, thread: str) -> list[str]:
        """What a thread asked for."""
        return [what for name, what in self.asked if name == thread]

    def set_device(self, device: torch.device) -> None:
        """Notes the device; without this call a thread's is the first one."""
        self.note(f"set_device {device}")

    def Event(self, **options: bool) -> Event:  # noqa: N802
        """One of its kind."""
        return self._event(self, **options)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        """The pool's next."""
        self.note("Stream")
        self.drawn += 1
        return Stream(self.drawn % self.num_streams)

    def current_stream(self, device: torch.device) -> Any:
        """Of whoever asks."""
        self.note("current_stream")
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Context in which it is this one."""
        self.note("stream")
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
