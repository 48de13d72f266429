"""Says what a thread met that nobody expected, and not each time that it meets it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_EVERY_S = 60.0


class FailureLog:
    """Logs errors with their tracebacks, each message once a minute at most. Thread-safe.

    Args:
        logger: takes them.
        clock: seconds, monotonic.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # when, and how many were left out since

    def exception(self, message: str) -> None:
        """Logs the error that is being handled; the next line says how many were left out.

        Args:
            message: one of a few, as each is remembered.
        """
        before = self._due(message)
        if before is not None:
            self._logger.exception("%s%s", message, before)  # noqa: LOG004, where it is handled

    def tell(self, message: str, reason: object) -> None:
        """Logs what is no error of ours on one line, as often as `exception` does.

        Args:
            message: one of a few, as each is remembered.
            reason: of this time.
        """
        before = self._due(message)
        if before is not None:
            self._logger.warning("%s: %s%s", message, reason, before)

    def _due(self, message: str) -> str | None:
        """What to say of those left out since the last time; None where it was said just now."""
        now_s = self._clock()
        with self._lock:
            said_s, num_left_out = self._said.get(message, (now_s - _EVERY_S, 0))
            if now_s - said_s < _EVERY_S:
                self._said[message] = said_s, num_left_out + 1
                return None
            self._said[message] = now_s, 0
        return f" ({num_left_out} times more since this was logged)" if num_left_out else ""
