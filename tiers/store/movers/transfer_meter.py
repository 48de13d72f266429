"""How fast pages come from the disk, measured over the time that anything was being read.

Several threads read at once, so the time of one read says little of the tier's speed. The meter
takes the time during which at least one read was under way, and the bytes that arrived in it; one
measurement ends when the last read of a plan does. Of that time reading and decoding get their
shares by the time that the threads spent on each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.policy.cost_model import TransferBacklog
from sglang_ext.tiers.store.types import StoreCounters
from sglang_ext.tiers.store.worker_failures import note_failure

failures = FailureLog(logging.getLogger(__name__))

OnMeasured = Callable[[int, float, int, float], None]
"""Called with bytes read, seconds of reading, raw bytes decoded, seconds of decoding."""


class TransferMeter:
    """Counts what is queued and in flight, and measures. Thread-safe; every call is O(1).

    Args:
        on_measured: takes the measurements; called by the thread that ends a read, no lock held.
        clock: seconds, monotonic.
        counters: where it is counted that a measurement was not taken.
    """

    def __init__(
        self,
        on_measured: OnMeasured | None = None,
        clock: Callable[[], float] = time.monotonic,
        counters: StoreCounters | None = None,
    ) -> None:
        self._on_measured = on_measured
        self._clock = clock
        self._counters = counters or StoreCounters()
        self._lock = threading.Lock()
        # All guarded by _lock.
        self._queued_bytes = 0  # not begun
        self._flying_bytes = 0
        self._num_flying = 0
        self._progress_s = 0.0  # when something last arrived, or the disk began to work
        self._busy_s = 0.0  # since the last measurement, as the next four
        self._read_bytes = 0
        self._read_s = 0.0
        self._decode_bytes = 0
        self._decode_s = 0.0

    def queued(self, num_bytes: int) -> None:
        """Bytes were asked for; a negative number was given up before it began."""
        with self._lock:
            self._queued_bytes += num_bytes

    def began(self, num_bytes: int) -> None:
        """A thread begins to read queued bytes."""
        with self._lock:
            if not self._num_flying:
                self._progress_s = self._clock()
            self._num_flying += 1
            self._queued_bytes -= num_bytes
            self._flying_bytes += num_bytes

    def ended(
        self,
        num_bytes: int,
        *,
        read_s: float = 0.0,
        decode_bytes: int = 0,
        decode_s: float = 0.0,
        whole: bool = True,
    ) -> None:
        """A read that began is over.

        Args:
            num_bytes: as given when it began.
            read_s: seconds that the thread spent on reading and verifying.
            decode_bytes: raw bytes that it decoded.
            decode_s: seconds that it spent on that.
            whole: all of it arrived; otherwise its time measures nothing.
        """
        with self._lock:
            now_s = self._clock()
            self._num_flying -= 1
            self._flying_bytes -= num_bytes
            self._busy_s += now_s - self._progress_s
            self._progress_s = now_s
            if whole:
                self._read_bytes += num_bytes
                self._read_s += read_s
                self._decode_bytes += decode_bytes
                self._decode_s += decode_s

    def plan_ended(self) -> None:
        """No read of some plan is left: a measurement is complete.

        Raises nothing: that a measurement is not taken is no reason not to end the plan.
        """
        with self._lock:
            threads_s = self._read_s + self._decode_s
            share = self._read_s / threads_s if threads_s > 0 else 1.0
            measured = (
                self._read_bytes,
                share * self._busy_s,
                self._decode_bytes,
                (1 - share) * self._busy_s,
            )
            self._busy_s = self._read_s = self._decode_s = 0.0
            self._read_bytes = self._decode_bytes = 0
        if measured[0] and self._on_measured is not None:
            try:
                self._on_measured(*measured)
            except Exception:
                note_failure(self._counters, failures, "the speed of a transfer could not be noted")

    def queue(self) -> TransferBacklog:
        """What the disk has to do now."""
        with self._lock:
            if not self._num_flying:
                return TransferBacklog(bytes_ahead=self._queued_bytes)
            return TransferBacklog(
                bytes_ahead=self._queued_bytes + self._flying_bytes,
                stalled_bytes=self._flying_bytes,
                stalled_s=self._clock() - self._progress_s,
            )
