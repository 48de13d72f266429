"""A context through the server's own remote tier: a real Redis, a slow link, real pages.

Pages in the shape of Mistral-7B are coded and uploaded by one page store, and fetched by another
one through a proxy that keeps a rate. How busy the link is, is measured at the proxy: bytes over
rate times the seconds from the request for them to the last one; the question what the store has
comes before.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.stats import median
from bench.stream.content import HEAD_DIM, NUM_CHANNELS, NUM_LAYERS, NUM_PLANES, Content
from bench.stream.links import GBPS
from sglang_ext.codec import create_codec
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.coded_remote.coded import coded_pages
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.layout import HEADER_BYTES, ROPE_PRE, PageLayout, write_tail
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.records.record import RecordMeta, write_meta
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig, open_engine, parse_remote_url
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from testkit.remote.proxy import Network, Proxy
from testkit.remote.redis_server import RedisServer, redis_binary

PAGE = 64
PAGES_A_CHUNK = 23
_WAIT_S = 300.0
_NONE = np.empty((0, 32), np.uint8)
_DIGEST = hashlib.sha256(b"bench stream").digest()


class _Server:
    """A server's DRAM and its way to the store."""

    def __init__(self, content: Content, port: int, num_slots: int, level: int) -> None:
        row = 2 * NUM_CHANNELS
        self.layout = PageLayout(PAGE, (row,) * NUM_LAYERS, (row,) * NUM_LAYERS, 2)
        self.shape = CodedShape.of(self.layout, content.dtype, HEAD_DIM)
        self.arena = HostArena(num_slots, self.layout.slot_bytes)
        url = parse_remote_url(f"redis://127.0.0.1:{port}?timeout=60s")
        remote = RemoteStore(open_engine(url), RemoteStoreConfig.from_url(url))
        codec = RemotePageCodec(self.shape, "hier", level, learned=content.profile)
        self.store = PageStore(
            self.arena,
            PageIndex(4096),
            None,
            PageStoreConfig(),
            remote=remote,
            open_coded=coded_pages(codec, _never_computed),
        )
        self.store.open_namespace(_DIGEST, {})
        self.space = self.store.space(_DIGEST)
        if not remote.wait_usable(_WAIT_S):
            raise CaseFailedError("Redis does not answer")

    def save(self, page: int, planes: np.ndarray) -> None:
        """Saves one page, u16 [S, P, C], and waits until it is uploaded."""
        ticket = self.store.begin_save(self.space, _hashes([page]), _NONE)
        slot = self.arena.slots[int(ticket.slots[0])]
        slot[HEADER_BYTES : self.layout.tail_offset] = planes.reshape(-1).view(np.uint8)
        tail = write_tail(slot, self.layout, rope_state=ROPE_PRE, position=page * PAGE)
        write_meta(slot, RecordMeta(_name(page), _DIGEST, b"", page * PAGE, PAGE, "pre"), tail)
        self.store.finish_save(ticket, ok=True)
        _wait(lambda: self.store.stats().get("remote_coded_pages", 0) > page)

    def fetch(self, num_pages: int, proxy: Proxy) -> dict[str, float]:
        """Fetches the context; times and bytes."""
        asked_s = time.monotonic()
        hashes = _hashes(range(num_pages))
        remote_lookup = RemoteLookup(self.space, hashes, 0, ANY)
        asked = self.store.ask_remote(remote_lookup)
        _wait(lambda: remote_lookup.done or not asked)
        if len(remote_lookup.sizes) < num_pages:
            raise CaseFailedError(f"the store has {len(remote_lookup.sizes)} of {num_pages} pages")
        start_s, start_bytes = time.monotonic(), proxy.num_bytes_down
        plan = self.store.plan(self.space, hashes, remote_sizes=remote_lookup.sizes)
        assert plan is not None
        last_s, last = start_s, start_bytes
        while not plan.done:
            if proxy.num_bytes_down > last:
                last_s, last = time.monotonic(), proxy.num_bytes_down
            time.sleep(0.002)
        done_s = time.monotonic()
        self.store.cancel_plan(plan)
        ready = self.store.ready_prefix(self.space, hashes)
        if ready != num_pages:
            raise CaseFailedError(f"{ready} of {num_pages} pages came: {self.store.stats()}")
        return {
            "ask_s": start_s - asked_s,
            "bytes": last - start_bytes,
            "stream_s": last_s - start_s,
            "ready_s": done_s - start_s,
        }


def serve(
    content: Content, gbps: Sequence[float], num_chunks: int, repeats: int
) -> list[dict[str, Any]]:
    """Streams some chunks at the default level at each bandwidth; medians. [] without a Redis."""
    if redis_binary() is None:
        return []
    level, num_pages = content.profile.default_level, num_chunks * PAGES_A_CHUNK
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="hier-kv-bench-") as folder,
        RedisServer(Path(folder)) as redis,
        Proxy(redis.port) as proxy,
    ):
        source = _Server(content, redis.port, 4, level)
        for page, planes in enumerate(_pages(content, num_pages)):
            source.save(page, planes)
        source.store.close()
        for each in gbps:
            proxy.network = Network(bytes_per_s=each * GBPS)
            found = []
            for _ in range(repeats):
                # Plans may hold half of DRAM.
                target = _Server(content, proxy.port, 2 * num_pages + 2, level)
                found.append(target.fetch(num_pages, proxy))
                target.store.close()
                share = found[-1]["bytes"] / (each * GBPS * found[-1]["stream_s"])
                found[-1]["link_busy"] = share
            row: dict[str, Any] = {name: median([one[name] for one in found]) for name in found[0]}
            rows.append({"gbps": each, **row, "samples": found})
    return rows


def _pages(content: Content, num_pages: int) -> Any:
    codec = create_codec("hier", dtype=content.dtype, profile=content.profile)
    for start in range(0, num_pages, PAGES_A_CHUNK):
        stream = content.streams[start // PAGES_A_CHUNK % len(content.streams)]
        chunk = np.empty((NUM_PLANES, 1500, NUM_CHANNELS), np.uint16)
        codec.decode(stream, chunk)
        for at in range(min(PAGES_A_CHUNK, num_pages - start)):
            yield np.ascontiguousarray(chunk[:, at * PAGE : (at + 1) * PAGE])


def _never_computed(num_new: int, num_before: int) -> float | None:
    return None


def _name(page: int) -> bytes:
    return hashlib.sha256(b"page %d" % page).digest()


def _hashes(pages: Sequence[int]) -> np.ndarray:
    return np.frombuffer(b"".join(map(_name, pages)), np.uint8).reshape(-1, 32)


def _wait(is_so: Any) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise CaseFailedError("the store did not answer in time")
        time.sleep(0.001)
