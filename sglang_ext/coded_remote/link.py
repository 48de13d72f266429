"""How fast the link is, and how much of the time that it is needed it is in use."""

from __future__ import annotations

from sglang_ext.streaming import LinkEstimator

_MIN_MEMORY_BYTES, _MAX_MEMORY_BYTES = 1e6, 64e6
_CHUNKS_REMEMBERED = 6


class LinkMeter:
    """Measures a link that several fetches use at once. Guarded by its owner's lock.

    Attributes:
        estimator: for the planner.
        busy_s: of `needed_s`, time with at least one fetch under way.
        needed_s: time in which some context waited for bytes.
    """

    def __init__(self) -> None:
        self.estimator = LinkEstimator(_MAX_MEMORY_BYTES)
        self.busy_s = self.needed_s = 0.0
        self._is_sized = False
        self._in_flight = 0
        self._is_alone = True  # no fetch began beside another since the link was idle
        self._is_needed = False
        self._last_s = 0.0  # of the clock
        self._busy_since_s = 0.0  # time with a fetch under way that no measurement covers
        self._bytes = 0  # arrived since then

    @property
    def is_idle(self) -> bool:
        """Whether no fetch is under way."""
        return not self._in_flight

    def size(self, chunk_bytes: int) -> None:
        """Lets the estimate remember some chunks of a model, so that it follows a change of speed.

        Args:
            chunk_bytes: of a chunk at its finest level.
        """
        if not self._is_sized:
            self._is_sized = True
            memory = _CHUNKS_REMEMBERED * chunk_bytes
            self.estimator = LinkEstimator(min(max(memory, _MIN_MEMORY_BYTES), _MAX_MEMORY_BYTES))

    def tick(self, now_s: float, *, needed: bool) -> None:
        """Time passed; `needed` from now on."""
        passed_s = now_s - self._last_s
        if self._in_flight:
            self.busy_s += passed_s if self._is_needed else 0.0
            self._busy_since_s += passed_s
        if self._is_needed:
            self.needed_s += passed_s
        self._last_s, self._is_needed = now_s, needed

    def began(self) -> None:
        """A fetch begins; `tick` was called."""
        self._is_alone = not self._in_flight
        self._in_flight += 1

    def arrived(self, num_bytes: int) -> None:
        """Bytes came, of any fetch."""
        self._bytes += num_bytes

    def ended(self, *, probe: bool = False) -> None:
        """A fetch ended; `tick` was called. Measures all that came since the last one ended."""
        self._in_flight -= 1
        if probe and self._is_alone:
            self.estimator.observe_probe(self._bytes, self._busy_since_s)
        else:
            self.estimator.observe(self._bytes, self._busy_since_s)
        self._bytes, self._busy_since_s = 0, 0.0
