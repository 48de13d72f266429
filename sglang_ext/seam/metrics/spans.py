"""What SGLang's own traces say of a request's prefix: where it lay, and what was waited for.

With SGLang's `--enable-trace` each request has a trace. Here are added, in each scheduler process,

- attributes of its span of this process: reused tokens by tier, missed ones by reason;
- a span `hier_kv.wait` from when SGLang would have run it until it no longer waited for its pages,
  and what it waited for;
- below SGLang's `prefill_forward` a span `hier_kv.load`: its pages on their way to the device.

Imports no SGLang: it calls the trace that SGLang made for the request. Without `--enable-trace` a
request costs some looks at an attribute, a step one.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from sglang_ext.admission.waiting_request import WaitingRequest
from sglang_ext.device.load_thread import LoadTimes
from sglang_ext.provenance.request_state import RequestState, state_of

logger = logging.getLogger(__name__)
P = ParamSpec("P")

WAIT, LOAD = "hier_kv.wait", "hier_kv.load"
# SGLANG_TRACE_LEVEL of the least traces that have these spans; SGLang's own waits have it, too.
_LEVEL = 1
_MOST_LOADING = 1024


def _never_raises(
    method: Callable[Concatenate[RequestSpans, P], None],
) -> Callable[Concatenate[RequestSpans, P], None]:
    """A trace that cannot be told is told of in the log, once; the request runs."""

    @functools.wraps(method)
    def guarded(spans: RequestSpans, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(spans, *args, **kwargs)
        except Exception:
            if not spans.has_failed:
                logger.exception("hier-kv: a request's trace lacks what was to be said in it")
            spans.has_failed = True

    return guarded


class RequestSpans:
    """Adds to the traces of requests. Scheduler's thread only. Nothing here raises.

    Args:
        times_of: when a batch of loads began and ended, by its index; None while it has not.
        knows_tiers: whether this process knows where pages lie. One whose pages another one keeps
            is told of slots alone.

    Attributes:
        has_failed: a trace could not be told.
    """

    def __init__(
        self, times_of: Callable[[int], LoadTimes | None], *, knows_tiers: bool = True
    ) -> None:
        self._times_of = times_of
        self._knows_tiers = knows_tiers
        self.has_failed = False
        # Requests, their batches of loads, and when they were launched. Bounded, should SGLang
        # drop a batch.
        self._loading: deque[tuple[Any, int, int]] = deque(maxlen=_MOST_LOADING)

    @_never_raises
    def matched(self, req: Any, find: Callable[[Any], WaitingRequest | None]) -> None:
        """SGLang looks for a request's prefix: where it no longer waits, it is about to run.

        Args:
            req: SGLang's request.
            find: the request as it waits, by its handle; None where it does not.
        """
        trace = _trace_of(req)
        if trace is None:
            return
        waiting, state = find(req.cache_request_handle), state_of(req)
        if waiting is None or waiting.let_go_s is None or state.is_wait_told:
            return
        assert waiting.held_since_s is not None
        state.is_wait_told = True
        ahead_ns = time.time_ns() - time.monotonic_ns()
        began_ns, ended_ns = (
            ahead_ns + int(1e9 * at_s) for at_s in (waiting.held_since_s, waiting.let_go_s)
        )
        trace.trace_slice_start(WAIT, _LEVEL, began_ns)
        told = {f"{WAIT}.of": waiting.awaited.value, f"{WAIT}.gave_up": waiting.late}
        trace.trace_slice_end(WAIT, _LEVEL, ended_ns, told)

    @_never_raises
    def runs(self, req: Any, load_index: int) -> None:
        """A request is about to be computed for the first time, and was counted.

        Args:
            req: SGLang's request.
            load_index: of the batch of loads that runs beside it; -1 for none.
        """
        trace = _trace_of(req)
        if trace is None:
            return
        state = state_of(req)
        if self._knows_tiers:
            trace.trace_set_thread_attrs(attributes(state, max(0, int(req.cached_tokens))))
        if load_index >= 0 and state.num_loaded_tokens:
            self._loading.append((req, load_index, time.time_ns()))

    @_never_raises
    def computed(self, reqs: Sequence[Any]) -> None:
        """The results of a batch are about to be used: its loads are through."""
        if not self._loading:
            return
        computed = {id(req) for req in reqs}
        for each in list(self._loading):
            req, index, runs_ns = each
            if id(req) in computed:
                self._loading.remove(each)
                _add_load(req, runs_ns, self._times_of(index))


def attributes(state: RequestState, num_cached_tokens: int) -> dict[str, Any]:
    """What a span says of a request that runs.

    Args:
        state: what is known of the request.
        num_cached_tokens: tokens of its prompt that are not computed.
    """
    found: dict[str, Any] = {
        f"hier_kv.reused.{tier}_tokens": num
        for tier, num in state.by_tier(num_cached_tokens).items()
    }
    found |= {f"hier_kv.missed.{why}_tokens": int(num) for why, num in state.missed.items()}
    if state.missed:
        found["hier_kv.missed.first_reason"] = next(iter(state.missed))
    return found


def _add_load(req: Any, runs_ns: int, times: LoadTimes | None) -> None:
    trace = _trace_of(req)
    if trace is None:
        return
    told: dict[str, Any] = {"hier_kv.load.tokens": state_of(req).num_loaded_tokens}
    # A device may tell a moment later that it is done.
    began_ns, ended_ns = (runs_ns, time.time_ns()) if times is None else times[:2]
    if times is not None:
        told["hier_kv.load.busy_seconds"] = times.busy_s
    trace.trace_slice_start(LOAD, _LEVEL, began_ns)
    trace.trace_slice_end(LOAD, _LEVEL, ended_ns, told)


def _trace_of(req: Any) -> Any:
    """SGLang's trace of a request; None where it makes none."""
    trace = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    return trace if trace is not None and trace.tracing_enable else None
