"""Servers of two tensor parallel ranks of a model with MLA: one keeps each page, for both."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.offline.survey import examine, find_segments
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, parse_header
from sglang_ext.tiers.records.seals import CHECKSUMS
from testkit.rank_requests import ENVIRONMENT, JITTER_MS, WAYS, make_requests, send_in_halves
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    NUM_TOKENS,
    PAGE,
    ask,
    by_tier,
    real_prompts,
    state,
    tokens_and_logprobs,
)
from tests.e2e.remote.latent_model import write_latent_model
from tests.e2e.remote.test_remote import SECRET, Store, eventually, make_server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]

# The second turn fills no page: both servers compute as many tokens of it.
FIRST_TOKENS, ANSWER_TOKENS, SECOND_TOKENS = 700, 20, 40
REUSABLE = (FIRST_TOKENS + ANSWER_TOKENS - 1) // PAGE
# DRAM of some 50 pages, and a device of 32, of the server whose store is late.
SMALL = ("--hier-kv-host-size", "0.0033", "--max-total-tokens", "2048")
LATE = {ENV_JITTER: str(JITTER_MS)}
NUM_REQUESTS, MIXED_TOKENS = 50, 320


class Stored(NamedTuple):
    """A page as it lies somewhere."""

    meta: RecordMeta
    payload: bytes


class World:
    """A store, and the folder of the servers on it."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self.redis, self.folder = redis, folder
        self.model = write_latent_model(folder / "model")
        secret = folder / "secret"
        secret.write_text(f"{SECRET}\n")
        self.store = Store("redis", f"redis://127.0.0.1:{redis.port}?password-file={secret}")

    def server(self, name: str, *args: str, env: dict[str, str] | None = None) -> Server:
        """A server on the folder of the one before it."""
        disk = ["--hier-kv-disk-dir", str(self.folder / "disk"), "--hier-kv-disk-size", "1"]
        disk += ["--hier-kv-disk-segment-size", "0.03"]
        every = [*WAYS["tp"], *disk, *args]
        env = {**ENVIRONMENT, **(env or {})}
        return make_server(self.store, self.folder, name, every, env=env, model=self.model)

    def stored(self) -> dict[bytes, Stored]:
        """The store's pages, by their hashes."""
        names = self.redis.call("KEYS", "*")
        assert isinstance(names, list)
        return dict(page_of(self.redis.call("GET", name)) for name in names)  # type: ignore[arg-type]

    def on_disk(self) -> dict[bytes, Stored]:
        """The pages that the ranks left on disk, by their hashes; each is there once."""
        io, found = FileIO(), {}
        for segment in find_segments(io, self.folder / "disk" / "dp0-tp0-of-2")[1]:
            content = segment.path.read_bytes()
            for block in examine(io, segment, CHECKSUMS).pages.block.tolist():
                page_hash, page = page_of(content[block * BLOCK_BYTES :])
                assert page_hash not in found
                found[page_hash] = page
        assert not list((self.folder / "disk").glob("dp0-tp1-of-2*"))
        return found


def page_of(content: bytes) -> tuple[bytes, Stored]:
    """A record at the start of some bytes: its page's hash, and what it holds."""
    record = np.frombuffer(content, np.uint8)
    meta, num_bytes = parse_header(record)
    return meta.page_hash, Stored(meta, record[HEADER_BYTES : HEADER_BYTES + num_bytes].tobytes())


def page_hashes(prompt: list[int]) -> np.ndarray:
    """Hashes of a prompt's whole pages, u8 `[N, 32]`: SGLang's chain."""
    digests = [b""]
    for start in range(0, len(prompt) - PAGE + 1, PAGE):
        tokens = np.array(prompt[start : start + PAGE], "<u4").tobytes()
        digests.append(hashlib.sha256(digests[-1] + tokens).digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with RedisServer(tmp_path / "redis", password=SECRET) as redis:
        yield World(redis, tmp_path)


def counts(server: Server, name: str) -> list[int]:
    """A counter of both ranks."""
    hosts = [rank["host"] for rank in state(server)["tp_ranks"]]
    assert len(hosts) == 2
    return [host.get(name, 0) for host in hosts]


def is_connected(server: Server) -> bool:
    """Whether the rank that keeps the pages has found the store; the other one has none."""
    first, second = state(server)["tp_ranks"]
    assert second["remote"] is None
    return bool(first["remote"]["breaker_state"] == 0)


def is_stored_once(server: Server, num_pages: int) -> bool:
    """Whether rank 0 has so many pages in DRAM, on disk and in the store, and rank 1 has none."""
    names = ("saved_pages", "host_pages", "written_pages", "remote_written_pages")
    return all(counts(server, name) == [num_pages, 0] for name in names)


def has_counted_once(server: Server, name: str) -> bool:
    """Whether rank 0 alone has counted all pages, once."""
    return counts(server, name) == [REUSABLE, 0]


def test_one_rank_keeps_each_page_and_all_load_it(world: World) -> None:
    first, second = real_prompts([FIRST_TOKENS, SECOND_TOKENS], seed=7)
    with world.server("one") as server:
        eventually(partial(is_connected, server))
        prompt = [*first, *ask(server, first, ANSWER_TOKENS)["output_ids"], *second]
        eventually(partial(is_stored_once, server, REUSABLE))
        in_store = world.stored()
        assert {row.tobytes() for row in page_hashes(prompt)} == set(in_store)
        assert world.redis.call("DBSIZE") == len(in_store) == REUSABLE
        expected = tokens_and_logprobs(ask(server, prompt))  # a device hit
        _check_restored(server, prompt, "host", expected)
        eventually(lambda: counts(server, "loaded_pages") == [REUSABLE] * 2)
        for name in ("requested_tokens", "reused_host_tokens", "missed_never_stored_tokens"):
            assert counts(server, name)[0] > 0 == counts(server, name)[1]
        capacity = counts(server, "host_capacity_pages")
        assert capacity[0] > 0 == capacity[1]
    assert world.on_disk() == in_store

    with world.server("two", *SMALL, env=LATE) as server:
        eventually(partial(is_connected, server))
        _check_restored(server, prompt, "disk", expected)
        server.post("/hicache/storage-backend/clear")
        _check_restored(server, prompt, "remote", expected)
        # Both were fetched once, and are counted a moment after they can be loaded.
        for name in ("promoted_pages", "remote_promoted_pages"):
            eventually(partial(has_counted_once, server, name))
        _check_mixed(server)
        assert server.log().count("Rank consensus checker is enabled") == 2
        assert "Found rank divergence" not in server.log()


def _check_restored(server: Server, prompt: list[int], tier: str, expected: Any) -> None:
    """What all ranks load from a tier of one of them answers as a device hit did."""
    flush_device(server)
    moved = ask(server, prompt)
    assert by_tier(moved)[tier] == REUSABLE * PAGE, (by_tier(moved), state(server))
    assert tokens_and_logprobs(moved) == expected


def _check_mixed(server: Server) -> None:
    """Requests and aborts at once, in DRAM of few pages; then answers are still a device hit's."""
    reused: Counter[str] = Counter()
    for served in send_in_halves(server, make_requests(NUM_REQUESTS, seed=1), "mixed", NUM_TOKENS):
        reused.update(served.by_tier)
    assert reused["host"] + reused["disk"] + reused["remote"] > 0, reused
    assert counts(server, "evicted_pages")[0] > 0
    loaded = counts(server, "loaded_pages")
    assert loaded[0] == loaded[1]
    for prompt in real_prompts([MIXED_TOKENS] * 3, seed=5):
        ask(server, prompt)
        on_device = ask(server, prompt)
        flush_device(server)
        again = ask(server, prompt)
        assert by_tier(on_device)["device"] == by_tier(again)["host"] > 0
        assert tokens_and_logprobs(again) == tokens_and_logprobs(on_device)
