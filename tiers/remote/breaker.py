"""The circuit breaker: when a store is not to be asked, and when to try it again. Pure logic."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BreakerState(enum.Enum):
    """CLOSED lets calls through, OPEN none, HALF_OPEN waits for what a probe says."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When the breaker opens, and for how long.

    Attributes:
        max_failures: calls that fail one after another before it opens.
        first_wait_s: from opening to the first probe.
        max_wait_s: longest time between probes. Each wait is twice the last, up to here, until a
            call ends well; so a store that comes back is found again within this time, and one
            that answers probes and then fails is asked less and less.
    """

    max_failures: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 15.0


class CircuitBreaker:
    """State of one store. Not thread-safe; its owner guards it and brings the time.

    It begins open with a probe due: a store is asked nothing before it answered once.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._state = BreakerState.OPEN
        self._num_failures = 0
        self._wait_s = config.first_wait_s
        self._probe_at_s = 0.0
        self.num_opened = 0
        self.num_closed = 0

    @property
    def state(self) -> BreakerState:
        """What it does now."""
        return self._state

    def allows(self) -> bool:
        """Whether a call may be made."""
        return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A call ended well. One that began before the breaker opened does not close it."""
        if self._state is BreakerState.CLOSED:
            self._num_failures = 0
            self._wait_s = self._config.first_wait_s

    def failed(self, now_s: float, *, at_once: bool = False) -> bool:
        """A call ended badly; returns whether that opened the breaker.

        Args:
            now_s: the time.
            at_once: no second chance, as for a wrong password.
        """
        if self._state is not BreakerState.CLOSED:
            return False
        self._num_failures += 1
        if self._num_failures < self._config.max_failures and not at_once:
            return False
        self._open(now_s)
        self.num_opened += 1
        return True

    def probe_in_s(self, now_s: float) -> float | None:
        """Seconds until a probe is due, 0 when it is; None when there is nothing to probe."""
        if self._state is not BreakerState.OPEN:
            return None
        return max(0.0, self._probe_at_s - now_s)

    def begin_probe(self) -> None:
        """A probe is on its way."""
        self._state = BreakerState.HALF_OPEN

    def end_probe(self, now_s: float, *, ok: bool) -> None:
        """What the probe said."""
        if ok:
            self._state = BreakerState.CLOSED
            self._num_failures = 0
            self.num_closed += 1
        else:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._state = BreakerState.OPEN
        self._probe_at_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._config.max_wait_s)
