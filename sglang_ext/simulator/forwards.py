"""The simulated device's forwards, as the server's own timer is told of a real one's.

What the cost model knows of prefills, decode steps and copies comes from here, what it knows of the
disk from the page store's own meter, which goes by the same clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from sglang_ext.admission.cost_feeds import CostFeeds
from sglang_ext.admission.forward_timer import ForwardTimer

_NO_LOADS = -1


@dataclass(frozen=True)
class _Mode:
    """What the timer asks of SGLang's `ForwardMode`."""

    prefills: bool

    def is_split_prefill(self) -> bool:
        return False

    def is_extend(self) -> bool:
        return self.prefills

    def is_decode(self) -> bool:
        return not self.prefills


@dataclass(frozen=True)
class _Batch:
    """What the timer asks of SGLang's `ScheduleBatch`."""

    forward_mode: _Mode
    launch_ts: float
    extend_lens: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    hicache_consumer_index: int = _NO_LOADS


class Forwards:
    """One prefill at a time, and decoding between prefills.

    Args:
        feeds: take the measurements.
        clock: seconds.
    """

    def __init__(self, feeds: CostFeeds, clock: Callable[[], float]) -> None:
        self._feeds = feeds
        self._clock = clock
        self._loads_s: list[float] = []  # by index, of the prefills that have any
        self._timer = ForwardTimer(feeds.cost, self._loads_s.__getitem__, feeds.on_prefill, clock)
        self._prefill: SimpleNamespace | None = None
        self._loaded: tuple[int, float] = (0, 0.0)
        self._told_s = -math.inf  # when the timer was last told of something

    @property
    def is_decoding(self) -> bool:
        """See `ForwardTimer.is_decoding`."""
        return self._timer.is_decoding

    def begin_prefill(
        self, new_tokens: int, reused_tokens: int, num_loaded: int = 0, load_s: float = 0.0
    ) -> None:
        """A prefill begins now.

        Args:
            new_tokens: that it computes.
            reused_tokens: before them.
            num_loaded: pages that are copied from DRAM beside it, or before it.
            load_s: what that takes.
        """
        index = _NO_LOADS
        if num_loaded:
            index = len(self._loads_s)
            self._loads_s.append(load_s)
        self._loaded = (num_loaded, load_s)
        self._prefill = SimpleNamespace()
        batch = _Batch(_Mode(True), self._clock(), [new_tokens], [reused_tokens], index)
        self._timer.launched(batch, self._prefill)

    def end_prefill(self) -> None:
        """The prefill is done now."""
        prefill, self._prefill = self._prefill, None
        assert prefill is not None
        if self._loaded[0]:
            self._feeds.on_load(*self._loaded)
        self._timer.finished(prefill)
        self._told_s = self._clock()

    def decoded(self, step_s: float) -> None:
        """Requests have decoded up to now, a step of them in so many seconds."""
        now_s = self._clock()
        if now_s - self._told_s < step_s:
            return  # it is not over yet
        step = SimpleNamespace()
        self._timer.launched(_Batch(_Mode(False), now_s - step_s), step)
        self._timer.finished(step)
        self._told_s = now_s
