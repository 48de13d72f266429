"""How fast the waiting queue moves, whatever holds it up.

The prefills of those before it are the least that a request waits for. Where the batch has no place
or the device no room, it waits for answers to end, which no sum of prefills knows: of a queue that
waits for those, what can be read meanwhile would be thought to come too late.
"""

from __future__ import annotations

from collections import deque

# So many admissions are remembered, and so few say nothing.
_REMEMBERED, _TOO_FEW = 32, 4


class QueuePace:
    """Times of the last admissions while others waited. Scheduler's thread only."""

    def __init__(self) -> None:
        # Time for which a request was held for its own pages does not count: a queue that waits for
        # its loads must not make more of them look free.
        self._held_s = 0.0
        self._admissions: deque[float] = deque(maxlen=_REMEMBERED)

    def admitted(self, now_s: float, held_s: float) -> None:
        """A request left the queue to run.

        Args:
            now_s: now.
            held_s: for how long it was held, at its turn, for its pages.
        """
        self._held_s += held_s
        self._admissions.append(now_s - self._held_s)

    def rest(self) -> None:
        """Nobody waits any more: what comes next does not wait for those that ran."""
        self._admissions.clear()

    def turn_in_s(self, num_ahead: int, now_s: float) -> float:
        """Seconds until a request runs that so many others are before; 0 where nothing is known."""
        if len(self._admissions) < _TOO_FEW:
            return 0.0
        first_s, last_s = self._admissions[0], self._admissions[-1]
        between_s = (last_s - first_s) / (len(self._admissions) - 1)
        return max(0.0, (num_ahead + 1) * between_s - (now_s - self._held_s - last_s))
