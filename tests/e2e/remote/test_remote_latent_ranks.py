"""Servers of two tensor parallel ranks of a model with MLA: each page is stored once, for both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.offline.survey import examine, find_segments
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, parse_header
from sglang_ext.tiers.records.seals import CHECKSUMS
from sglang_ext.tiers.store import PutShare
from testkit.rank_requests import ENVIRONMENT, WAYS
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import PAGE, ask, by_tier, real_prompts, state, tokens_and_logprobs
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
SHARES = (PutShare(0, 2), PutShare(1, 2))
# Where a value's name has the digit that says whose share its page is in: the low half of the first
# of the page hash's last 8 bytes, behind `hkv:1:NAMESPACE:`.
DIGIT = len("hkv:1:") + 64 + len(":") + 2 * 24 + 1


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

    def server(self, name: str) -> Server:
        disk = ["--hier-kv-disk-dir", str(self.folder / name / "disk"), "--hier-kv-disk-size", "1"]
        disk += ["--hier-kv-disk-segment-size", "0.03"]
        return make_server(
            self.store, self.folder, name, [*WAYS["tp"], *disk], env=ENVIRONMENT, model=self.model
        )

    def stored(self) -> dict[bytes, Stored]:
        """The store's pages, by their hashes."""
        names = self.redis.call("KEYS", "*")
        assert isinstance(names, list)
        return dict(page_of(self.redis.call("GET", name)) for name in names)  # type: ignore[arg-type]

    def on_disk(self, name: str, rank: int) -> dict[bytes, Stored]:
        """The pages that a rank of a server left on disk, by their hashes."""
        io, found = FileIO(), {}
        for segment in find_segments(io, self.folder / name / "disk" / f"dp0-tp{rank}-of-2")[1]:
            content = segment.path.read_bytes()
            for block in examine(io, segment, CHECKSUMS).pages.block.tolist():
                page_hash, page = page_of(content[block * BLOCK_BYTES :])
                found[page_hash] = page
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
    """Whether both ranks have found the store."""
    return all(rank["remote"]["breaker_state"] == 0 for rank in state(server)["tp_ranks"])


def is_put(server: Server, num_pages: int) -> bool:
    """Whether both ranks have so many pages in DRAM and on disk, and each page was put once."""
    saved, on_disk = counts(server, "saved_pages"), counts(server, "written_pages")
    put = sum(counts(server, "remote_written_pages"))
    return saved == on_disk == [num_pages] * 2 and put == num_pages


def test_each_page_is_stored_once_and_found_by_all_ranks(world: World) -> None:
    first, second = real_prompts([FIRST_TOKENS, SECOND_TOKENS], seed=7)
    with world.server("one") as server:
        eventually(partial(is_connected, server))
        prompt = [*first, *ask(server, first, ANSWER_TOKENS)["output_ids"], *second]
        eventually(partial(is_put, server, REUSABLE))
        in_store = world.stored()
        hashes = page_hashes(prompt)
        assert {row.tobytes() for row in hashes} == set(in_store)
        shares = [int(share.has(hashes).sum()) for share in SHARES]
        # As many values and bytes as one rank has pages.
        assert world.redis.call("DBSIZE") == len(in_store) == sum(shares) == REUSABLE
        assert counts(server, "remote_written_pages") == shares
        assert counts(server, "remote_left_pages") == shares[::-1]
        assert 0 < shares[0] < REUSABLE
        assert len({page.meta.namespace for page in in_store.values()}) == 1
        expected = tokens_and_logprobs(ask(server, prompt))  # a device hit
    # What both ranks computed and what one of them put are the same bits.
    assert world.on_disk("one", 0) == world.on_disk("one", 1) == in_store

    with world.server("two") as server:
        eventually(partial(is_connected, server))
        moved = ask(server, prompt)
        assert by_tier(moved)["remote"] == REUSABLE * PAGE, (by_tier(moved), state(server))
        assert tokens_and_logprobs(moved) == expected
        assert counts(server, "remote_promoted_pages") == [REUSABLE] * 2
        assert server.log().count("Rank consensus checker is enabled") == 2
        assert "keep KV in different ways" not in server.log()
        _check_that_one_ranks_puts_may_fail(world, server)


def _check_that_one_ranks_puts_may_fail(world: World, server: Server) -> None:
    """Redis takes no more values of rank 1's share: misses on both ranks, and the same answer."""
    pattern = "?" * DIGIT + "[02468ace]*"
    world.redis.call("ACL", "SETUSER", "default", "resetkeys", "%R~*", f"%W~{pattern}")
    prompts = real_prompts([FIRST_TOKENS] * 50, seed=11)
    prompt = next(each for each in prompts if SHARES[1].has(page_hashes(each)[:1]))
    put = counts(server, "remote_written_pages")
    cold = ask(server, prompt)
    hashes = page_hashes([*prompt, *cold["output_ids"]][:-1])
    num_pages = [int(share.has(hashes).sum()) for share in SHARES]
    eventually(lambda: counts(server, "remote_written_pages") == [put[0] + num_pages[0], put[1]])
    eventually(lambda: counts(server, "remote_upload_dropped_pages") == [0, num_pages[1]])
    flush_device(server)
    server.post("/hicache/storage-backend/clear")
    again = ask(server, prompt)
    assert sum(by_tier(again).values()) == 0
    assert tokens_and_logprobs(again) == tokens_and_logprobs(cold)
