"""The examples, as a reader runs them, against real servers; checked is what they print.

Two servers with devices that hold a part of each example, and one Redis for both; for SGLang's own
benchmark one without the plugin, too.

Those that import SGLang run in copies of a process that has done so. The long form has them as a
reader has, and more chats behind a router.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.remote.router import Router, router_missing
from testkit.requests import flush_device
from testkit.server import ROOT, Server
from tests.e2e.hier_server import PAGE, connected, hier_args, settled
from tests.long_form import FACTOR
from tests.scripts import run_script

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]

DEVICE_TOKENS = 2560
NUM_AGENTS = 4
IMPORT_SGLANG = ("sglang_program.py", "bench_serving.py")
TIERS = ("device", "host", "disk", "remote")
SIDES = ("without", "with")  # the plugin
_LINE = re.compile(
    r"^(.*): (\d+) prompt tokens, device (\d+), host (\d+), disk (\d+), remote (\d+)$", re.MULTILINE
)


class Printed(NamedTuple):
    """A line of an example: what it is about, and counts of tokens."""

    what: str
    prompt: int
    by_tier: dict[str, int]

    @property
    def reused(self) -> int:
        return sum(self.by_tier.values())


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("examples")
    with RedisServer(folder / "redis") as redis:
        args = ["--max-total-tokens", str(DEVICE_TOKENS)]
        # Of the bundled model, which knows no tools: SGLang holds all that it writes to the tool's
        # schema, in which it would else write spaces until it may write no more.
        args += ["--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace"]
        args += ["--hier-kv-remote-url", f"redis://127.0.0.1:{redis.port}"]
        both = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            all_args = [*hier_args(folder / name, disk_gb=0), *args]
            all_args += ["--hier-kv-prefetch-policy", "wait_complete"]
            both.append(Server(all_args, log_path=folder / f"{name}.log", stop="kill"))
        try:
            for server in both:
                server.start()
            for server in both:
                connected(server.wait_ready())
            yield both
        finally:
            for server in both:
                server.kill()


def output(example: str, url: str, *args: str) -> str:
    """What an example prints, as a program of its own."""
    fork = example in IMPORT_SGLANG and not FACTOR
    done = run_script(ROOT / "examples" / example, "--url", url, *args, timeout_s=300, fork=fork)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(example: str, url: str, *args: str) -> list[Printed]:
    """Runs an example; returns its lines with counts."""
    return lines_of(output(example, url, *args))


def lines_of(text: str) -> list[Printed]:
    lines = [
        Printed(what, int(prompt), dict(zip(TIERS, map(int, counts), strict=True)))
        for what, prompt, *counts in _LINE.findall(text)
    ]
    assert lines, text
    return lines


def test_a_program_that_forks(servers: list[Server]) -> None:
    *_, total = lines = run("sglang_program.py", servers[0].url, "--chars", "2500")
    first = [line for line in lines if line.what.startswith("pass 1,")]
    # All but the first question of a fork finds what the fork shares on the device.
    assert all(line.by_tier["device"] > line.prompt // 4 for line in first)
    assert total.what == "pass 2, all"
    assert total.by_tier["host"] > 0
    assert total.reused > 0.8 * total.prompt


def test_agents_that_say_when_they_return(servers: list[Server]) -> None:
    names = ("hinted_return_pages", "hinted_ends_pages", "pinned_pages")
    before = Counter(settled(servers[0])["host"])
    text = output("agents.py", servers[0].url, "--chars", "1800")
    assert text.count("read_section(") == 2 * NUM_AGENTS, text
    *_, total = lines_of(text)
    assert total.what == "all"
    # Of three requests the last has what the first two had, beside the handbook's contents.
    assert total.reused > total.prompt // 4
    assert total.by_tier["host"] > 0, text
    after = settled(servers[0])["host"]
    assert [name for name in names if after.get(name, 0) <= before[name]] == []


def test_documents_that_are_asked_about_again(servers: list[Server]) -> None:
    *lines, total = run("documents.py", servers[0].url, "--questions", "10")
    seen: set[str] = set()
    for line in lines:
        document = line.what.rpartition(" in ")[2]
        if document in seen:  # all but the question, and what is left of its page
            assert line.reused >= line.prompt - 2 * PAGE, line
        seen.add(document)
    assert len(seen) > 3
    assert total.by_tier["host"] > 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ["--max-total-tokens", str(DEVICE_TOKENS), "--page-size", str(PAGE)]
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server([*args, "--enable-cache-report"], log_path=log, stop="kill") as server:
        yield server


def test_sglangs_own_benchmark(servers: list[Server], plain: Server) -> None:
    sizes = {"groups": 6, "prompts": 2, "shared-tokens": 500, "question-tokens": 40}
    sizes |= {"answer-tokens": 4, "turns": 2, "concurrency": 2}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    text = output("bench_serving.py", servers[0].url, "--without", plain.url, *flags)
    found = re.findall(
        r"^(.*), (.*): (\d+) prompt tokens, device (\d+), host (\d+), storage (\d+); \d+ ms to the",
        text,
        re.MULTILINE,
    )
    counts = {(what, side): tuple(map(int, each)) for what, side, *each in found}
    assert len(counts) == 4, text
    reused = Counter[str]()
    for what in ("shared prefixes", "conversations"):
        (prompt, *without), (same_prompt, *tiers) = (counts[what, side] for side in SIDES)
        assert same_prompt == prompt
        assert without[1:] == [0, 0], text
        assert prompt // 4 < sum(tiers) < prompt, text
        reused += Counter(dict(zip(SIDES, (sum(without), sum(tiers)), strict=True)))
    # How much of the shared prefixes has left the device when the next question comes is chance.
    assert counts["conversations", "with"][2] > 0, text
    assert reused["without"] < reused["with"], text


needs_router = pytest.mark.skipif(bool(router_missing()), reason=router_missing())
CHATS = ("--chats", "10", "--turns", "2", "--chars", "500")


@needs_router
def test_a_chat_behind_a_router_that_comes_to_the_other_server(
    servers: list[Server], tmp_path: Path
) -> None:
    with Router([server.url for server in servers], "round_robin", tmp_path) as router:
        # In turns, and three of them, so that each comes to the other server the next time.
        run("shared_store.py", router.url, "--chats", "3", "--turns", "1")
        forget_devices(servers)
        *chats, total = run("shared_store.py", router.url, "--chats", "3", "--turns", "1")
    assert [chat.what for chat in chats] == [f"turn 1, chat {number}" for number in (1, 2, 3)]
    assert all(chat.by_tier["remote"] >= chat.prompt // PAGE * PAGE - PAGE > 0 for chat in chats)
    assert total.by_tier["remote"] == sum(chat.by_tier["remote"] for chat in chats)


@pytest.mark.long
@needs_router
def test_chats_behind_a_router(servers: list[Server], tmp_path: Path) -> None:
    urls = [server.url for server in servers]
    with Router(urls, "cache_aware", tmp_path) as router:
        run("shared_store.py", router.url, *CHATS)
        forget_devices(servers)
        *_, total = run("shared_store.py", router.url, *CHATS)
    assert total.reused > 0.6 * total.prompt
    forget_devices(servers)
    with Router(urls, "random", tmp_path) as router:
        *_, total = run("shared_store.py", router.url, *CHATS)
    assert total.reused > 0.6 * total.prompt
    # Of ten chats one comes to the server that does not have it, but for 1 in 1,000,000 runs.
    assert total.by_tier["remote"] > 0


def forget_devices(servers: list[Server]) -> None:
    for server in servers:
        settled(server)
        flush_device(server)


@needs_router
def test_a_router_hands_hints_on_but_not_those_of_chats(
    servers: list[Server], tmp_path: Path
) -> None:
    """Should it do better one day: docs/routers.md says that it does not."""
    over = {"custom_params": {"hier_kv_hints": {"ends": True}}, "max_tokens": 2, "model": "m"}
    words = " ".join(f"number {number}" for number in range(100))
    with Router([servers[0].url], "cache_aware", tmp_path) as router:

        def num_more(path: str, **prompt: Any) -> int:
            before = settled(servers[0])["host"].get("hinted_ends_pages", 0)
            post(f"{router.url}{path}", {**over, **prompt})
            return int(settled(servers[0])["host"].get("hinted_ends_pages", 0) - before)

        assert num_more("/v1/completions", prompt=f"said {words}") > 0
        chat = [{"role": "user", "content": f"asked {words}"}]
        assert num_more("/v1/chat/completions", messages=chat) == 0


def post(url: str, body: dict[str, Any]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with opener.open(request, timeout=60.0) as answer:
        answer.read()
