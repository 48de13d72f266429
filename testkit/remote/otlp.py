"""A collector of OpenTelemetry traces: takes OTLP over HTTP, and keeps the spans in memory.

with TraceCollector() as collector:
    ...  # a server with collector.args() and collector.environment()
    spans = collector.trace_of("rid")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_WAIT_S, _POLL_S = 300.0, 0.05


@dataclass(frozen=True)
class Span:
    """A span that has ended; times since 1970."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]


class TraceCollector:
    """An HTTP server on loopback."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def args(self) -> list[str]:
        """Arguments of a server that sends its traces here."""
        url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        return ["--enable-trace", "--otlp-traces-endpoint", url]

    def environment(self, *, by_another_process: bool = False) -> dict[str, str]:
        """Its environment.

        Args:
            by_another_process: whether spans are made and sent by a process of their own, for each
                process that has something to tell.
        """
        found = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        return {**found, "SGLANG_TRACE_ASYNC": "1"} if by_another_process else found

    def trace_of(self, rid: str, num_schedulers: int = 1) -> list[Span]:
        """All spans of a request that is answered, its root first.

        Waits until each span's parent has come, and every process that had a part in it has told of
        that: SGLang's front process, which ends last, and its schedulers.

        Args:
            rid: the request's name.
            num_schedulers: how many ranks computed it.
        """
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            found = self._whole_trace(rid, num_schedulers)
            if found:
                return found
            time.sleep(_POLL_S)
        raise AssertionError(f"no whole trace of {rid} came in {_WAIT_S:.0f} s: {self._spans}")

    def _whole_trace(self, rid: str, num_schedulers: int) -> list[Span]:
        with self._lock:
            spans = list(self._spans)
        roots = [span for span in spans if span.attributes.get("rid") == rid]
        if not roots:
            return []
        [root] = roots
        found = [span for span in spans if span.trace_id == root.trace_id]
        known = {span.span_id for span in found}
        is_whole = all(span is root or span.parent_id in known for span in found)
        num_ended = sum("scheduler" in span.name.lower() for span in found)
        if not is_whole or num_ended < num_schedulers:
            return []
        return [root, *(span for span in found if span is not root)]

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            _span(each)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for each in scope.spans
        ]
        with self._lock:
            self._spans += spans

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(self.rfile.read(int(self.headers["Content-Length"])))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        return Handler


def _span(told: Any) -> Span:
    attributes = {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in told.attributes
    }
    ids = (told.trace_id, told.span_id, told.parent_span_id)
    times = (told.start_time_unix_nano, told.end_time_unix_nano)
    return Span(told.name, *ids, *times, attributes)
