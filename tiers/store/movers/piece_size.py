"""How much is given to the disk in one call: what takes it a certain time, at its speed now."""

from __future__ import annotations


class PieceSize:
    """Bytes of a call, learned from the calls before. One thread at a time notes; any may ask.

    What goes with each call counts little in a long one; a short one does not keep others waiting,
    and its pages come free soon.

    Args:
        target_s: how long a call should take.
        least_bytes: never fewer, however slow the disk is. Calls of less than half of it say little
            of its speed.
        most_bytes: never more.
    """

    def __init__(self, target_s: float, least_bytes: int, most_bytes: int) -> None:
        self._target_s = target_s
        self._least_bytes, self._most_bytes = least_bytes, max(least_bytes, most_bytes)
        self.num_bytes = least_bytes
        """Of the next call."""

    def note(self, num_bytes: int, seconds: float) -> None:
        """A call took so long."""
        if 2 * num_bytes >= self._least_bytes:
            wanted = int(num_bytes / max(seconds, 1e-6) * self._target_s)
            self.num_bytes = min(max(wanted, self._least_bytes), self._most_bytes)
