"""What stands around every call of an engine: breaker, bound on calls, thread that probes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_ext.tiers.disk.counters import Counters
from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.remote.base import (
    Deadline,
    Outcome,
    RemoteAuthError,
    RemoteEngine,
    RemoteFullError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from sglang_ext.tiers.remote.breaker import BreakerConfig, BreakerState, CircuitBreaker

logger = logging.getLogger(__name__)
failures = FailureLog(logger)

# Gauge of the breaker in `stats`.
_STATE_NUMBER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class Guard:
    """Runs calls of one engine. Thread-safe. `run` never raises."""

    def __init__(
        self,
        engine: RemoteEngine,
        counters: Counters,
        config: BreakerConfig,
        *,
        max_calls: int,
        probe_timeout_s: float,
        shown: str,
        upkeep: Callable[[], None] | None = None,
        upkeep_every_s: float = 0.0,
    ) -> None:
        """Starts the thread, which probes at once.

        Args:
            engine: whose calls.
            counters: where they are counted.
            config: the breaker's.
            max_calls: calls at once.
            probe_timeout_s: longest time of a probe.
            shown: the store's address without secrets.
            upkeep: called by the thread from time to time while the store is usable.
            upkeep_every_s: how often.
        """
        self._engine = engine
        self._counters = counters
        self._shown = shown
        self._probe_timeout_s = probe_timeout_s
        self._upkeep = upkeep
        self._upkeep_every_s = upkeep_every_s
        self._free_calls = threading.BoundedSemaphore(max_calls)
        self._changed = threading.Condition()
        self._breaker = CircuitBreaker(config)  # guarded by _changed
        self._closed = False  # guarded by _changed
        self._reason = "not connected yet"  # why it is open; guarded by _changed
        self._has_met_a_bug = False
        self._thread = threading.Thread(target=self._tend, name="hier-kv-remote", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether a call would be made now."""
        with self._changed:
            return self._breaker.allows() and not self._closed

    def wait_usable(self, timeout_s: float) -> bool:
        """Waits until calls are made; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._breaker.allows() and not self._closed, timeout_s
            )

    def run(
        self, call: Callable[[], None], failed: Callable[[], bool] | None = None
    ) -> Outcome | None:
        """Makes a call.

        Args:
            call: uses the engine.
            failed: asked after a call that raised nothing; True counts it as a failure.

        Returns:
            None when it ended well; else the outcome of the items that it did not finish.
        """
        if not self.usable:
            self._counters.drop("breaker_open")
            return Outcome.UNAVAILABLE
        if not self._free_calls.acquire(blocking=False):
            self._counters.drop("busy")
            return Outcome.BUSY
        try:
            call()
        except RemoteFullError:
            self._counters.error("full")
            self._note(ok=True)
            return Outcome.FULL
        except Exception as error:
            self._note_error(error)
            return (
                Outcome.TIMEOUT if isinstance(error, RemoteTimeoutError) else (Outcome.UNAVAILABLE)
            )
        finally:
            self._free_calls.release()
        if failed is not None and failed():
            self._note(ok=False, reason="it returns damaged records")
        else:
            self._note(ok=True)
        return None

    def stats(self) -> dict[str, int]:
        """The breaker's state (0 closed, 1 half open, 2 open) and how often it changed."""
        with self._changed:
            return {
                "breaker_state": _STATE_NUMBER[self._breaker.state],
                "breaker_opened": self._breaker.num_opened,
                "breaker_closed": self._breaker.num_closed,
            }

    def close(self) -> None:
        """Ends the thread, after the probe in its hands."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _note_error(self, error: Exception) -> None:
        kind = error_kind(error)
        self._counters.error(kind)
        if kind == "internal" and not self._has_met_a_bug:
            self._has_met_a_bug = True
            logger.error(
                "hier-kv: a call of the remote store %s went wrong", self._shown, exc_info=error
            )
        at_once = isinstance(error, RemoteAuthError)
        self._note(ok=False, reason=f"{kind}: {error}", at_once=at_once)

    def _note(self, *, ok: bool, reason: str = "", at_once: bool = False) -> None:
        with self._changed:
            if ok:
                self._breaker.succeeded()
                return
            if not self._breaker.failed(time.monotonic(), at_once=at_once):
                return
            self._reason = reason
            self._changed.notify_all()
        logger.warning(
            "hier-kv: the remote store %s is not used until it answers again (%s)",
            self._shown,
            reason,
        )

    def _tend(self) -> None:
        upkeep_at_s = time.monotonic() + self._upkeep_every_s
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                wait_s = self._breaker.probe_in_s(now_s)
                probes = wait_s == 0.0
                if probes:
                    self._breaker.begin_probe()
                else:
                    if self._upkeep is not None and wait_s is None:
                        wait_s = max(0.0, upkeep_at_s - now_s)
                    if wait_s != 0.0:
                        self._changed.wait(wait_s)
                        continue
            if probes:
                self._probe()
            elif self._upkeep is not None:
                try:
                    self._upkeep()
                except Exception:  # without this thread the store would not be probed
                    self._counters.error("internal")
                    failures.exception("hier-kv: values in a remote store could not be renewed")
                upkeep_at_s = time.monotonic() + self._upkeep_every_s

    def _probe(self) -> None:
        self._counters.add("probes")
        reason = ""
        try:
            self._engine.ping(Deadline.after(self._probe_timeout_s))
        except Exception as error:
            kind = error_kind(error)
            self._counters.error(kind)
            reason = f"{kind}: {error}"
        with self._changed:
            is_news = reason != self._reason
            self._reason = reason
            self._breaker.end_probe(time.monotonic(), ok=not reason)
            self._changed.notify_all()
        if not reason:
            logger.info("hier-kv: the remote store %s answers", self._shown)
        elif is_news:
            logger.warning(
                "hier-kv: the remote store %s does not answer and is tried again and again (%s)",
                self._shown,
                reason,
            )


def error_kind(error: Exception) -> str:
    """Name under which an error is counted; `internal` for what no engine should raise."""
    if isinstance(error, RemoteTimeoutError):
        return "timeout"
    if isinstance(error, RemoteAuthError):
        return "auth"
    return "unavailable" if isinstance(error, RemoteUnavailableError | OSError) else "internal"
