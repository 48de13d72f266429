"""Servers that share a store: a conversation moves from one to another, and nothing crosses.

For each store two servers; in the case of Redis two more come up on the same store afterwards, of
another model and of another dtype.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.remote.mooncake_server import MooncakeServer, mooncake_missing
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.updates.weight_models import strange, variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# An answer fills a page.
FIRST_TOKENS, ANSWER_TOKENS, SECOND_TOKENS = 1014, 16, 300
REUSABLE = (FIRST_TOKENS + ANSWER_TOKENS - 1) // PAGE  # pages that the first turn leaves
SECRET = "hunter2"


class Store(NamedTuple):
    """A store that runs, and its URL for servers."""

    name: str
    url: str


@contextmanager
def redis_store(folder: Path) -> Iterator[Store]:
    if redis_binary() is None:
        pytest.skip("no redis-server is installed")
    with RedisServer(folder / "redis", password=SECRET) as redis:
        secret = folder / "secret"
        secret.write_text(f"{SECRET}\n")
        yield Store("redis", f"redis://127.0.0.1:{redis.port}?password-file={secret}")


@contextmanager
def mooncake_store(folder: Path) -> Iterator[Store]:
    if mooncake_missing():
        pytest.skip(mooncake_missing())
    with MooncakeServer(folder / "mooncake") as mooncake:
        yield Store("mooncake", mooncake.url)


@contextmanager
def folder_store(folder: Path) -> Iterator[Store]:
    shared = folder / "shared"
    shared.mkdir()
    yield Store("folder", f"file://{shared}?size=1GB")


class Pair:
    """Two servers on one store."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        # The first never waits for pages, so it may sleep; two that spin share two cores badly.
        self.one = make_server(store, folder, "one", ["--sleep-on-idle"])
        self.two = make_server(store, folder, "two")
        try:
            start([self.one, self.two])
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.one.kill()
        self.two.kill()

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*/log"))


def make_server(store: Store, folder: Path, name: str, args: Any = (), **how: Any) -> Server:
    (folder / name).mkdir()
    own = [*hier_args(folder / name, disk_gb=0), "--hier-kv-remote-url", store.url]
    # What is stored is waited for, whatever it costs: two or three servers share the cores here.
    own += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
    return Server(
        [*own, *args], log_path=folder / name / "log", stop="kill", start_timeout_s=300.0, **how
    )


def start(servers: list[Server]) -> None:
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready()
        eventually(partial(is_connected, server))


def eventually(is_so: Any, timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_connected(server: Server) -> bool:
    return bool(state(server)["remote"]["breaker_state"] == 0)


def uploads(server: Server) -> int:
    host = state(server)["host"]
    return int(host.get("remote_written_pages", 0) + host.get("remote_duplicate_pages", 0))


def promoted(server: Server) -> int:
    return int(state(server)["host"].get("remote_promoted_pages", 0))


def has_uploaded(server: Server, num_pages: int) -> bool:
    return uploads(server) >= num_pages


# A prompt of so many tokens has no whole page that one server computes and another may find: of
# other numbers of tokens computed at once other processors make other roundings.
ONE_MORE_TOKENS = (REUSABLE + 1) * PAGE - 8


def begin(server: Server, seed: int) -> list[int]:
    """A first turn whose pages reach the store; returns the prompt of the second."""
    first, second = real_prompts([FIRST_TOKENS, SECOND_TOKENS], seed=seed)
    settled(server)  # or pages of a turn before would be counted among these
    before = uploads(server)
    answer = ask(server, first, ANSWER_TOKENS)
    eventually(partial(has_uploaded, server, before + REUSABLE))
    return [*first, *answer["output_ids"], *second]


@pytest.fixture(scope="module", params=[redis_store, mooncake_store, folder_store])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("stores")
    with request.param(folder) as store:
        made = Pair(store, folder)
        yield made
        made.kill()


def test_a_conversation_moves_to_another_server(pair: Pair) -> None:
    prompt = begin(pair.one, seed=1)[:ONE_MORE_TOKENS]
    moved = ask(pair.two, prompt)
    assert by_tier(moved)["remote"] >= 0.95 * REUSABLE * PAGE, (by_tier(moved), state(pair.two))
    stayed = ask(pair.one, prompt)
    assert by_tier(stayed)["device"] >= 0.95 * REUSABLE * PAGE
    assert tokens_and_logprobs(moved) == tokens_and_logprobs(stayed)
    # Counted a moment after they can be loaded.
    eventually(lambda: promoted(pair.two) >= 0.95 * REUSABLE)
    eventually(lambda: state(pair.two)["cost"]["remote_samples"] >= 1)


def test_a_conversation_goes_on_after_its_server_was_killed(pair: Pair) -> None:
    prompt = begin(pair.one, seed=2)[:ONE_MORE_TOKENS]
    expected = tokens_and_logprobs(ask(pair.one, prompt))
    pair.one.kill()
    moved = ask(pair.two, prompt)
    assert by_tier(moved)["remote"] >= 0.95 * REUSABLE * PAGE, (by_tier(moved), state(pair.two))
    assert tokens_and_logprobs(moved) == expected
    assert state(pair.two)["remote"]["breaker_state"] == 0
    assert SECRET not in repr(state(pair.two))
    assert SECRET not in pair.logs()


# On one store only: it needs two servers more, and what keeps them apart is the same for all.
@pytest.mark.parametrize("pair", [redis_store], indirect=True)
def test_models_and_dtypes_on_one_store_do_not_meet(pair: Pair) -> None:
    pair.one.kill()
    prompt = next(real_prompts([FIRST_TOKENS], seed=3))
    num_pages = FIRST_TOKENS // PAGE
    settled(pair.two)
    before = uploads(pair.two)
    ask(pair.two, prompt)
    eventually(partial(has_uploaded, pair.two, before + num_pages))
    model = variant(pair.folder / "other-weights", strange(5))
    others = [
        make_server(pair.store, pair.folder, "weights", model=model),
        make_server(pair.store, pair.folder, "dtype", ["--dtype", "float16"]),
    ]
    try:
        start(others)
        fresh = [ask(server, prompt) for server in others]
        for server, answer in zip(others, fresh, strict=True):
            assert sum(by_tier(answer).values()) == 0
            assert state(server)["host"].get("remote_found_pages", 0) == 0
            eventually(partial(has_uploaded, server, num_pages))
        # Each finds its own pages in the store, and nobody else's.
        answers = []
        for server in [*others, pair.two]:
            answer = ask(server, prompt)  # a device hit: behind a prefix it is rounded otherwise
            assert by_tier(answer)["device"] == num_pages * PAGE
            answers.append(answer["output_ids"])
            server.post("/hicache/storage-backend/clear")
            flush_device(server)
            again = ask(server, prompt)
            assert by_tier(again)["remote"] == num_pages * PAGE
            assert tokens_and_logprobs(again) == tokens_and_logprobs(answer)
        assert len({tuple(ids) for ids in answers}) > 1
    finally:
        for server in others:
            server.kill()
