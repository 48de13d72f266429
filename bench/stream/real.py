"""The same planner against a real socket: coded bytes over loopback TCP at a set bandwidth.

A thread serves byte ranges of real streams at a rate; the client asks for them as the planner says
and decodes them with the product's codec on the CPU. The time until everything is decoded is
compared with what virtual time says for the same sizes and the same decoder.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.stats import median
from bench.stream.content import NUM_CHANNELS, NUM_PLANES, RAW_BYTES_PER_TOKEN, Content
from bench.stream.links import GBPS, SteadyLink
from bench.stream.sim import REQUEST_S, stream
from sglang_ext.codec import create_codec
from sglang_ext.streaming import (
    ChunkFetch,
    ChunkOffer,
    ContextStream,
    LinkEstimator,
    QualityScale,
    StreamCosts,
)

_ASK = struct.Struct("<IQQ")
_SLICE_S = 0.002  # the rate is kept over so long


class ThrottledStore:
    """Serves ranges of some streams to one client at a time, no faster than a rate."""

    def __init__(self, streams: Sequence[bytes], bytes_per_s: float) -> None:
        self._streams = streams
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        self._thread.join(5.0)

    def _serve(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            due_s = 0.0
            while ask := _receive(peer, _ASK.size):
                number, start, end = _ASK.unpack(ask)
                view = memoryview(self._streams[number])[start:end]
                due_s = self._send(peer, view, max(due_s, time.monotonic()))

    def _send(self, peer: socket.socket, view: memoryview, due_s: float) -> float:
        step = max(4096, int(self._bytes_per_s * _SLICE_S))
        for at in range(0, len(view), step):
            part = view[at : at + step]
            peer.sendall(part)
            due_s += len(part) / self._bytes_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))
        return due_s


def _receive(peer: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = peer.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


@dataclass
class _Client:
    """Fetches and decodes one context."""

    content: Content
    offers: Sequence[ChunkOffer]
    planner: ContextStream
    link: LinkEstimator

    def run(self, port: int) -> float:
        """Seconds until everything that the planner asked for is decoded."""
        asked: queue.SimpleQueue[ChunkFetch | None] = queue.SimpleQueue()
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        parts = [bytearray() for _ in self.offers]
        decoder = _Decoder(self.content, self.offers)
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = threading.Thread(target=self._read, args=(peer, asked, arrived), daemon=True)
            reader.start()
            started_s = time.monotonic()
            while not self.planner.may_begin(time.monotonic() - started_s):
                while fetch := self.planner.next_fetch(time.monotonic() - started_s):
                    peer.sendall(_ASK.pack(fetch.chunk, fetch.start, fetch.end))
                    asked.put(fetch)
                fetch, data = arrived.get(timeout=60.0)
                parts[fetch.chunk] += data
                self.planner.arrived(fetch, time.monotonic() - started_s)
                decoder.put(fetch.chunk, bytes(parts[fetch.chunk]))
            decoder.finish()
            took_s = time.monotonic() - started_s
            asked.put(None)
            reader.join(5.0)
        return took_s

    def _read(self, peer: socket.socket, asked: Any, arrived: Any) -> None:
        last_s = 0.0
        while fetch := asked.get():
            start_s = max(time.monotonic(), last_s)
            data = _receive(peer, fetch.num_bytes)
            last_s = time.monotonic()
            self.link.observe(fetch.num_bytes, last_s - start_s)
            arrived.put((fetch, data))


class _Decoder:
    """Decodes whole prefixes on a thread of its own, beside the transfer."""

    def __init__(self, content: Content, offers: Sequence[ChunkOffer]) -> None:
        self._codec = create_codec("hier", dtype=content.dtype, profile=content.profile)
        self._out = np.empty((NUM_PLANES, offers[0].num_tokens, NUM_CHANNELS), np.uint16)
        self._jobs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, chunk: int, data: bytes) -> None:
        """A chunk's bytes so far."""
        self._jobs.put((chunk, data))

    def finish(self) -> None:
        """Waits for all of it; raises what decoding raised."""
        self._jobs.put(None)
        self._thread.join()
        if self._error is not None:
            raise CaseFailedError(f"a chunk from the socket does not decode: {self._error}")

    def _run(self) -> None:
        while job := self._jobs.get():
            try:
                self._codec.decode(job[1], self._out)
            except Exception as error:
                self._error = error


def compare_with_virtual(
    content: Content, gbps: Sequence[float], repeats: int
) -> list[dict[str, float]]:
    """Measured against virtual time, two chunks at the default level, at some bandwidths."""
    num_chunks = min(2, len(content.streams))
    tokens = len(content.streams) and content.offers(10**4)[0].num_tokens
    offers = [ChunkOffer(tokens, content.chunks[at]) for at in range(num_chunks)]
    quality = QualityScale(content.damage, content.profile.default_level)
    decode_s = _decode_s(content, offers[0])
    costs = StreamCosts(
        RAW_BYTES_PER_TOKEN,
        tokens * RAW_BYTES_PER_TOKEN / decode_s,
        _too_slow_to_compute,
        REQUEST_S,
    )
    rows = []
    for each in gbps:
        predicted = stream(offers, costs, quality, SteadyLink(each * GBPS))[0].ttft_s
        measured = []
        for _ in range(repeats):
            with ThrottledStore(content.streams, each * GBPS) as store:
                link = LinkEstimator()
                planner = ContextStream(offers, costs, quality, link, now_s=0.0)
                measured.append(_Client(content, offers, planner, link).run(store.port))
        rows.append({"gbps": each, "virtual_s": predicted, "measured_s": median(measured)})
    return rows


def _too_slow_to_compute(num_new: int, num_before: int) -> float:
    return 0.0 if num_new <= 32 else 1e3


def _decode_s(content: Content, offer: ChunkOffer) -> float:
    """Seconds to decode a chunk at the default level, the median of three."""
    codec = create_codec("hier", dtype=content.dtype, profile=content.profile)
    out = np.empty((NUM_PLANES, offer.num_tokens, NUM_CHANNELS), np.uint16)
    data = content.streams[0][: offer.prefix_bytes[content.profile.default_level]]
    times = []
    for _ in range(4):
        started_s = time.perf_counter()
        codec.decode(data, out)
        times.append(time.perf_counter() - started_s)
    return median(times[1:])
