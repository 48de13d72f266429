"""What is added to SGLang's trace of a request, over the trace that SGLang has."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sglang.srt.observability import trace as sglang_trace

from sglang_ext.device.load_thread import LoadTimes
from sglang_ext.provenance.request_state import HitTier, state_of
from sglang_ext.seam.metrics.spans import LOAD, WAIT, RequestSpans
from tests.unit.admission.waiting_rig import Clock, Store, make_room, prefix, step

PAGE = 64
S_NS = 1_000_000_000
_begun: list[Any] = []  # traces; one that is never finished has SGLang complain


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """SGLang's tracing, with what has ended in memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(sglang_trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(sglang_trace, "tracer", provider.get_tracer("test"))
    monkeypatch.setattr(sglang_trace, "get_global_trace_level", lambda: 1)
    monkeypatch.setattr(sglang_trace, "threads_info", {})
    yield exporter
    while _begun:
        _begun.pop().trace_req_finish()
    provider.shutdown()


def request(rid: str = "r", *, is_traced: bool = True) -> Any:
    """A request of six pages, two of them in DRAM and the others new."""
    context: Any = sglang_trace.TraceNullContext()
    if is_traced:
        context = sglang_trace.TraceReqContext(rid, module_name="request")
        context.trace_req_start()
        _begun.append(context)
    req = SimpleNamespace(rid=rid, cached_tokens=2 * PAGE, cache_request_handle=rid)
    req.time_stats = SimpleNamespace(trace_ctx=context)
    state = state_of(req)
    state.note_enqueued(PAGE, [(HitTier.HOST, 2)])
    state.note_loaded(0, 2 * PAGE, HitTier.HOST)
    state.missed = {"too_slow": PAGE, "never_stored": 3 * PAGE}
    return req


def spans_of(exported: InMemorySpanExporter, req: Any) -> dict[str, Any]:
    """What has ended when the request has, by name; the process's span by the name of none."""
    req.time_stats.trace_ctx.trace_req_finish()
    found = exported.get_finished_spans()
    threads = [span for span in found if "thread_label" in (span.attributes or {})]
    return {"": threads[0], **{span.name: span for span in found}}


def test_a_rank_whose_pages_another_one_keeps_says_nothing_of_tiers(
    exported: InMemorySpanExporter,
) -> None:
    req = request()
    RequestSpans(lambda index: None, knows_tiers=False).runs(req, -1)
    assert not [n for n in spans_of(exported, req)[""].attributes if n.startswith("hier_kv.")]


def test_a_span_says_where_the_prefix_lay_and_why_the_rest_was_computed(
    exported: InMemorySpanExporter,
) -> None:
    req = request()
    RequestSpans(lambda index: None).runs(req, -1)
    found = spans_of(exported, req)
    own = {n: v for n, v in found[""].attributes.items() if n.startswith("hier_kv.")}
    assert own == {
        "hier_kv.reused.device_tokens": 0,
        "hier_kv.reused.host_tokens": 2 * PAGE,
        "hier_kv.reused.disk_tokens": 0,
        "hier_kv.reused.remote_tokens": 0,
        "hier_kv.missed.too_slow_tokens": PAGE,
        "hier_kv.missed.never_stored_tokens": 3 * PAGE,
        "hier_kv.missed.first_reason": "too_slow",
    }
    assert LOAD not in found  # no batch of loads ran beside it


def test_a_load_is_told_with_the_result_of_its_own_batch(exported: InMemorySpanExporter) -> None:
    req, other = request(), request("other")
    spans = RequestSpans({3: LoadTimes(5 * S_NS, 7 * S_NS, 1.5)}.get)
    spans.runs(req, 3)
    spans.computed([other])
    assert [span.name for span in exported.get_finished_spans()] == []
    spans.computed([other, req])
    spans.computed([other, req])
    [load] = exported.get_finished_spans()
    assert (load.name, load.start_time, load.end_time) == (LOAD, 5 * S_NS, 7 * S_NS)
    told = {"hier_kv.load.tokens": 2 * PAGE, "hier_kv.load.busy_seconds": 1.5}
    assert dict(load.attributes or {}) == told


def test_a_load_of_which_the_device_has_not_told_yet(exported: InMemorySpanExporter) -> None:
    req, spans = request(), RequestSpans(lambda index: None)
    spans.runs(req, 3)
    spans.computed([req])
    [load] = exported.get_finished_spans()
    assert load.start_time is not None
    assert load.end_time is not None
    assert load.start_time <= load.end_time
    assert dict(load.attributes or {}) == {"hier_kv.load.tokens": 2 * PAGE}


def test_a_wait_ends_when_the_request_is_let_go_and_is_told_once(
    exported: InMemorySpanExporter,
) -> None:
    store = Store()
    room, clock = make_room(store)
    req, spans = request(), RequestSpans(lambda index: None)
    room.enter("r", prefix())
    step(room, clock, "r")
    spans.matched(req, room.find)
    assert not room.may_admit("r")
    spans.matched(req, room.find)  # SGLang looks for the prefixes of waiting requests, too
    assert not exported.get_finished_spans()
    _let_go_after(2.5, room, clock, store)
    for _ in range(2):
        spans.matched(req, room.find)
    [wait] = exported.get_finished_spans()
    assert wait.name == WAIT
    assert wait.start_time is not None
    assert wait.end_time is not None
    assert (wait.end_time - wait.start_time) / S_NS == pytest.approx(2.5, abs=1e-6)
    told = {"hier_kv.wait.of": "underway", "hier_kv.wait.gave_up": False}
    assert dict(wait.attributes or {}) == told


def _let_go_after(seconds: float, room: Any, clock: Clock, store: Store) -> None:
    store.arrive(store.plans[0])
    step(room, clock, "r", seconds)
    assert room.may_admit("r")
    room.let_go("r")
    clock.now_s += 1.0
    room.let_go("r")  # asked again: it could run since


def test_nothing_is_kept_or_made_without_tracing(exported: InMemorySpanExporter) -> None:
    def fail(index: Any) -> Any:
        raise AssertionError("looked for something to tell")

    spans = RequestSpans(fail)
    for req in (request(is_traced=False), SimpleNamespace(rid="none")):
        spans.matched(req, fail)
        spans.runs(req, 3)
        spans.computed([req])
    assert not exported.get_finished_spans()


def test_a_trace_that_cannot_be_told_raises_nothing_and_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scheduler calls it between two requests: an error here would end the server."""

    def breaks(*_: Any) -> None:
        raise RuntimeError("no such span")

    req = request(is_traced=False)
    req.time_stats.trace_ctx = SimpleNamespace(tracing_enable=True, trace_set_thread_attrs=breaks)
    spans = RequestSpans(breaks)
    for _ in range(2):
        spans.runs(req, -1)
        spans.matched(req, breaks)
    assert spans.has_failed
    assert len(caplog.records) == 1
