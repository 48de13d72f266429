"""How long forwards take, from when SGLang launches them to when their results are there.

SGLang launches a batch (`Scheduler.run_batch`) and later handles its result
(`process_batch_result`), having waited for it; with its overlap scheduling the next batch has been
launched by then. A batch's time begins when it was launched or when the one before it was done,
whichever is later. Nothing here waits for the device.

A CPU has no queue: its forward runs within `run_batch`, and with the overlap scheduling the next
batch's runs before the result is handled. There a batch is done when `run_batch` returns.

Scheduler's thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_ext.tiers.policy.cost_model import CostModel

_ATTRIBUTE = "_hier_kv_launched"
# Steps of decoding without a result after which nobody decodes any more.
_STEPS_OF_SILENCE = 3.0


class _Launched(NamedTuple):
    start_s: float
    work: list[tuple[int, int]]  # (new tokens, tokens before them) of each request; empty: decode
    load_index: int  # of the batch of loads that ran beside it; -1 for none
    done_s: float | None  # None: when its result is handled
    is_beside_decoding: bool  # a prefill for which others stopped decoding


class ForwardTimer:
    """Feeds a cost model with prefills and decode steps.

    Args:
        cost: the model.
        load_s: seconds that the batch of loads with some index took; inf while that is not known.
        note: called with expected and measured seconds of each prefill that was expected.
        clock: seconds, monotonic; the one that SGLang stamps launches with.
        runs_in_launch: forwards are done when they have been launched, as on a CPU.
    """

    def __init__(
        self,
        cost: CostModel,
        load_s: Callable[[int], float],
        note: Callable[[float, float], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        runs_in_launch: bool = False,
    ) -> None:
        self._cost = cost
        self._load_s = load_s
        self._note = note
        self._clock = clock
        self._runs_in_launch = runs_in_launch
        self._done_s = 0.0
        self._decoded_s = -math.inf
        self._step_s = 0.0

    @property
    def is_decoding(self) -> bool:
        """Whether requests decode now, or will go on to when the prefill under way is done.

        A prefill has to wait for the end of their step, and holds them up.
        """
        return self._decodes_at(self._clock())

    def _decodes_at(self, now_s: float) -> bool:
        return now_s - self._decoded_s < _STEPS_OF_SILENCE * self._step_s

    def launched(self, batch: Any, result: Any) -> None:
        """A batch was launched; what will be known of it later is noted on its result.

        Args:
            batch: SGLang's `ScheduleBatch`, after `run_batch`.
            result: what `run_batch` returned, and `process_batch_result` will be given.
        """
        mode = batch.forward_mode
        if result is None or batch.launch_ts is None or mode.is_split_prefill():
            return
        if mode.is_extend() and batch.extend_lens and batch.prefix_lens:
            work = list(zip(batch.extend_lens, batch.prefix_lens, strict=False))
        elif mode.is_decode():
            work = []
        else:
            return
        is_beside_decoding = bool(work) and self._decodes_at(batch.launch_ts)
        if is_beside_decoding:  # no step ends before the prefill does
            until_s = batch.launch_ts + (self._cost.batch_s(work) or 0.0)
            self._decoded_s = max(self._decoded_s, until_s)
        done_s = self._clock() if self._runs_in_launch else None
        launched = _Launched(
            batch.launch_ts, work, batch.hicache_consumer_index, done_s, is_beside_decoding
        )
        setattr(result, _ATTRIBUTE, launched)

    def finished(self, result: Any) -> None:
        """A batch's result was handled."""
        launched: _Launched | None = getattr(result, _ATTRIBUTE, None)
        now_s = done_s = self._clock()
        if self._runs_in_launch:
            if launched is None or launched.done_s is None:
                return
            done_s = launched.done_s
        before_s, self._done_s = self._done_s, done_s
        if launched is None:
            return
        seconds = done_s - max(launched.start_s, before_s)
        if not launched.work:
            self._decoded_s, self._step_s = now_s, seconds
            self._cost.note_step(seconds)
            return
        if launched.is_beside_decoding:
            self._decoded_s = max(self._decoded_s, now_s)
        load_s = self._load_s(launched.load_index) if launched.load_index >= 0 else 0.0
        if not load_s:
            expected = self._cost.batch_s(launched.work)
            if expected is not None:
                self._note(expected, seconds)
        self._cost.note_prefill(launched.work, seconds, load_s)
