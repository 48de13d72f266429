"""What a link carries, from what it carried."""

from __future__ import annotations

import math

# A probe that is so many times as fast as expected shows that the speed has changed.
_CHANGED_FACTOR = 2.0


class LinkEstimator:
    """Bytes a second of a link: bytes over seconds, the last ones counting most.

    Sums of bytes and of seconds are kept apart, so that the estimate is the harmonic mean of the
    speeds seen: the one that predicts how long the next bytes take when the speed changes. Both
    fade with the bytes that came since. Not locked; its owner's thread only.

    Args:
        memory_bytes: after so many bytes an observation counts 1/e of a new one.
        prior_bytes_per_s: what is known of the link from before; None for nothing.
        prior_bytes: how many bytes that knowledge is worth.
    """

    def __init__(
        self,
        memory_bytes: float = 64e6,
        *,
        prior_bytes_per_s: float | None = None,
        prior_bytes: float = 1e6,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._bytes = self._seconds = 0.0
        if prior_bytes_per_s is not None:
            self._bytes, self._seconds = prior_bytes, prior_bytes / prior_bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate; None before anything was seen."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Counts a transfer: its bytes, and the seconds for which the link was busy with it."""
        if num_bytes <= 0 or seconds <= 0:
            return
        fade = math.exp(-num_bytes / self._memory_bytes)
        self._bytes = fade * self._bytes + num_bytes
        self._seconds = fade * self._seconds + seconds

    def observe_probe(self, num_bytes: int, seconds: float) -> None:
        """Counts a short transfer that was made to see whether the speed has risen.

        Next to what is remembered it would weigh nothing: where it is much faster than that, what
        is remembered holds no more. One that is slower says nothing, as it is short and may only
        show the round trip.
        """
        known = self.bytes_per_s
        if seconds <= 0 or (known is not None and num_bytes <= known * seconds):
            return
        if known is not None and num_bytes > _CHANGED_FACTOR * known * seconds:
            self._bytes = self._seconds = 0.0
        self.observe(num_bytes, seconds)
