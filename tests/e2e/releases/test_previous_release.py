"""The release of SGLang before the installed one, served end to end from its wheel.

One server with much at once: two tensor parallel ranks, pages coded on disk and in a remote store,
tenants, traces. Answers are compared bit for bit with those of a device hit. `make contract` brings
the wheel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from testkit.rank_requests import ENVIRONMENT
from testkit.rank_requests import WAYS as RANKS
from testkit.releases.wheels import unpacked, wheel_of
from testkit.remote.otlp import TraceCollector
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    connected,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.openai_client import WAYS, connect, seen, through

RELEASE = "0.5.22"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
    # CI has fetched it (`make contract`): there `unpacked` says that it is gone.
    pytest.mark.skipif(
        wheel_of(RELEASE) is None and os.environ.get("CI") != "true",
        reason=f"no wheel of {RELEASE}: make contract",
    ),
]

LENGTH, REUSABLE = 600, 600 // PAGE * PAGE
HOST_PAGES = 40
FILLERS = 5
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("previous")
    with RedisServer(folder / "redis") as redis:
        # Every wait is for a state, so that codecs may take their time.
        args = [*hier_args(folder, host_pages=HOST_PAGES), *RANKS["tp"]]
        args += ["--hier-kv-prefetch-timeout-ms", "60000"]
        args += ["--hier-kv-codec", "disk=lossless,remote=lossless"]
        args += ["--hier-kv-remote-url", f"redis://127.0.0.1:{redis.port}"]
        with Server(
            [*args, *collector.args()],
            release=unpacked(RELEASE),
            log_path=folder / "log",
            env={**ENVIRONMENT, **collector.environment()},
            stop="kill",
            start_timeout_s=PATIENCE_S,
        ) as made:
            yield connected(made)


@pytest.fixture(scope="module")
def prompts() -> Iterator[list[int]]:
    return real_prompts([LENGTH] * 20, seed=22)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def tiers(answer: dict[str, Any]) -> dict[str, int]:
    """Reused tokens by tier, of the tiers that gave any."""
    return {tier: num for tier, num in by_tier(answer).items() if num}


def every_rank(server: Server, name: str, least: int) -> bool:
    ranks = state(server)["tp_ranks"]
    assert len(ranks) == 2
    return all(rank["host"].get(name, 0) >= least for rank in ranks)


def stored(server: Server, prompt: list[int], **fields: Any) -> Any:
    """Brings a new prompt to all tiers, in both ranks; its answer behind a device hit."""
    hosts = [rank["host"] for rank in state(server)["tp_ranks"]]
    wanted = {
        name: max(host.get(name, 0) for host in hosts) + LENGTH // PAGE
        for name in ("saved_pages", "written_pages", "remote_written_pages")
    }
    assert tiers(ask(server, prompt, **fields)) == {}
    for name, least in wanted.items():
        eventually(partial(every_rank, server, name, least))
    again = ask(server, prompt, **fields)
    assert tiers(again) == {"device": REUSABLE}
    return tokens_and_logprobs(again)


def assert_reused(server: Server, prompt: list[int], tier: str, expected: Any) -> None:
    answer = ask(server, prompt)
    assert tiers(answer) == {tier: REUSABLE}
    assert tokens_and_logprobs(answer) == expected


def test_it_is_that_release(server: Server) -> None:
    assert server.get("/server_info")["version"] == RELEASE


def test_ranks_reuse_from_each_tier_what_codecs_kept(
    server: Server, prompts: Iterator[list[int]]
) -> None:
    prompt = next(prompts)
    expected = stored(server, prompt)
    flush_device(server)
    assert_reused(server, prompt, "host", expected)
    for _ in range(FILLERS):
        stored(server, next(prompts))
    flush_device(server)
    assert_reused(server, prompt, "disk", expected)
    flush_device(server)
    server.post("/hicache/storage-backend/clear")
    assert_reused(server, prompt, "remote", expected)
    assert server.log().count("Rank consensus checker is enabled") == 2


def test_a_trace_says_where_a_prefix_lay(
    server: Server, prompts: Iterator[list[int]], collector: TraceCollector
) -> None:
    prompt = next(prompts)
    stored(server, prompt)
    flush_device(server)
    assert tiers(ask(server, prompt, rid="traced")) == {"host": REUSABLE}
    trace = collector.trace_of("traced", num_schedulers=2)
    loads = [span for span in trace if span.name == "hier_kv.load"]
    ranks = [span for span in trace if "hier_kv.reused.host_tokens" in span.attributes]
    assert len({span.attributes["pid"] for span in ranks}) == len(loads) == 2
    assert {span.attributes["hier_kv.reused.host_tokens"] for span in ranks} == {REUSABLE}
    assert {span.attributes["hier_kv.load.tokens"] for span in loads} == {REUSABLE}


def test_a_tenant_meets_only_what_is_its_own(server: Server, prompts: Iterator[list[int]]) -> None:
    prompt = next(prompts)
    expected = stored(server, prompt, extra_key="a")
    flush_device(server)
    others: list[dict[str, Any]] = [{}, {"extra_key": "b"}, {"extra_key": "a", "cache_salt": "b"}]
    for other in others:
        assert tiers(ask(server, prompt, **other)) == {}
    flush_device(server)
    answer = ask(server, prompt, extra_key="a")
    assert tiers(answer) == {"host": REUSABLE}
    assert tokens_and_logprobs(answer) == expected


@pytest.mark.parametrize("way", WAYS)
def test_an_openai_client_sees_reuse_by_tier(server: Server, way: str) -> None:
    with connect(server) as client:
        through(client, way, LENGTH // 2, seed=WAYS.index(way))
        settled(server)
        flush_device(server)
        usage, header = through(client, way, LENGTH // 2, seed=WAYS.index(way))
    cached, report = seen(usage)
    assert report == header == {"device": 0, "host": cached, "disk": 0, "remote": 0}
    assert cached == (usage.prompt_tokens - 1) // PAGE * PAGE > 0
