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

    def __init__(self, **options: bool) -> None:
        Event.made += 1
        self.options = options
        self.stream: Stream | None = None
        self.happened = threading.Event()

    def record(self, stream: Stream) -> None:
        """Notes the stream."""
        self.stream = stream

    def synchronize(self) -> None:
        """Waits for the test."""
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
    """

    def __init__(self, num_streams: int = 4, event: type[Event] = Event) -> None:
        self.drawn = 0
        self.num_streams = num_streams
        self.Event = event
        self.current = Stream(0)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        """The pool's next."""
        self.drawn += 1
        return Stream(self.drawn % self.num_streams)

    def current_stream(self, device: torch.device) -> Any:
        """Of whoever asks."""
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Context in which it is this one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
