"""The running server and all that a real Redis does to it: no request fails, no answer is wrong.

One server for all of them, and plain SGLang for the answers. Each test leaves Redis sound and the
breaker closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.faults.prompts import PAGE_TOKENS, PROMPT_PAGES, Answer, PromptSource, References, ask
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import host_gb

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]

PASSWORD = "hunter2"
CALL_S = 2.0  # longest time of a call of the store
WAIT_MS = "60000"  # longest time that a request waits for the store
REUSED = PROMPT_PAGES * PAGE_TOKENS


class World:
    """The server, its store, and what it should answer."""

    def __init__(self, folder: Path) -> None:
        self.prompts = PromptSource(7).take(12)
        self.redis = RedisServer(folder / "redis", password=PASSWORD)
        self.redis.kill()  # down when the server starts
        secret = folder / "secret"
        secret.write_text(PASSWORD)
        url = f"redis://127.0.0.1:{self.redis.port}?password-file={secret}&timeout={CALL_S:g}s"
        room = ("--max-total-tokens", "16384")
        remote = ["--hier-kv-host-size", host_gb(200), "--hier-kv-remote-url", url]
        # What it would cost is not the question here: on a busy machine computing may be faster.
        remote += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", WAIT_MS]
        self.server = Server(
            [*room, "--enable-hier-kv", *remote], log_path=folder / "server.log", stop="kill"
        )
        sleeps = ("--page-size", str(PAGE_TOKENS), "--sleep-on-idle")
        plain = Server([*room, *sleeps], stop="kill")
        try:
            self.server.start()
            plain.start().wait_ready()
            self.references = References(plain)
            self.references.learn(self.prompts, [])
            plain.kill()
            self.server.wait_ready()
        except BaseException:
            self.kill()
            raise
        finally:
            plain.kill()

    def kill(self) -> None:
        self.server.kill()
        self.redis.kill()

    # ---- requests ----

    def ask(self, prompt: list[int]) -> Answer:
        """Fails the test when the request fails, is answered wrongly or not at all."""
        answer = ask(self.server, prompt)
        assert self.references.agree(prompt, answer)
        return answer

    def remote_tokens(self, prompt: list[int]) -> int:
        return self.ask(prompt).by_tier.get("remote", 0)

    def store(self, *prompts: list[int]) -> None:
        """Brings prompts to where they are in the store and nowhere else."""
        for prompt in prompts:
            self.eventually(partial(self._is_stored, prompt))
        self.forget()

    def _is_stored(self, prompt: list[int]) -> bool:
        """Whether a prompt was in the store, or came there; a busy machine may drop some of it."""
        sent, dropped = self.sent(), self.count("remote_upload_dropped_pages")
        if self.remote_tokens(prompt) == REUSED:
            return True
        tried = sent + dropped + PROMPT_PAGES
        self.eventually(lambda: self.sent() + self.count("remote_upload_dropped_pages") >= tried)
        if self.sent() >= sent + PROMPT_PAGES:
            return True
        self.forget()
        return False

    def sent(self) -> int:
        return self.count("remote_written_pages") + self.count("remote_duplicate_pages")

    def forget(self) -> None:
        """Empties device and DRAM."""
        flush_device(self.server)
        self.server.post("/hicache/storage-backend/clear")
        flush_device(self.server)

    # ---- the store ----

    def state(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("/server_info")["internal_states"][0]["hier_kv"]
        return dict(found[part])

    def count(self, name: str) -> int:
        return int(self.state("host").get(name, 0))

    def remote(self, name: str) -> int:
        return int(self.state("remote").get(name, 0))

    @property
    def is_open(self) -> bool:
        return self.remote("breaker_state") != 0

    def recover(self) -> None:
        """Waits for the breaker, and sees that pages come from the store again."""
        if not self.redis.process.is_running:
            self.redis.start()
        self.eventually(lambda: not self.is_open)
        prompt = self.prompts[-1]
        self.store(prompt)
        assert self.remote_tokens(prompt) == REUSED
        self.forget()

    @staticmethod
    def eventually(is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("remote-faults"))
    yield made
    made.kill()


@pytest.fixture
def world(running: World) -> World:
    """Device and DRAM are empty, and Redis is up, whatever the test before left, or if none ran."""
    running.forget()
    if not running.redis.process.is_running:
        running.recover()
    return running


def test_a_store_that_is_down_at_start_is_found_when_it_comes_up(running: World) -> None:
    """The first of the tests on this server."""
    world = running
    assert world.is_open
    assert world.remote_tokens(world.prompts[0]) == 0
    world.eventually(lambda: world.remote("error_unavailable") >= 1)
    assert world.remote("probes") >= 1
    world.eventually(lambda: world.count("remote_upload_dropped_pages") >= PROMPT_PAGES)
    world.forget()
    world.recover()
    assert world.remote("breaker_closed") >= 1


def test_a_store_that_is_killed_and_restarted(world: World) -> None:
    world.store(world.prompts[1])
    opened = world.remote("breaker_opened")
    world.redis.kill()
    for prompt in world.prompts[1:4]:  # each brings a look-up and an upload that fail
        assert world.remote_tokens(prompt) == 0
    world.eventually(lambda: world.is_open)
    assert world.remote("breaker_opened") == opened + 1
    refused = world.count("remote_lookups")
    assert world.remote_tokens(world.prompts[4]) == 0
    assert world.count("remote_lookups") == refused  # not even asked for
    world.forget()
    closed = world.remote("breaker_closed")
    world.recover()
    assert world.remote("breaker_closed") == closed + 1


def test_a_store_that_is_stuck(world: World) -> None:
    world.store(world.prompts[1])
    timeouts = world.remote("error_timeout")
    world.redis.process.freeze()
    try:
        for prompt in world.prompts[1:4]:
            world.ask(prompt)
        world.eventually(lambda: world.remote("error_timeout") > timeouts)
    finally:
        world.redis.process.thaw()
    world.forget()
    world.recover()


def test_a_store_that_is_full_is_still_read(world: World) -> None:
    world.store(world.prompts[1])
    world.redis.call("CONFIG", "SET", "maxmemory", "1mb")
    dropped = world.count("remote_upload_dropped_pages") + PROMPT_PAGES
    try:
        world.ask(world.prompts[6])  # was never asked before
        world.eventually(lambda: world.count("remote_upload_dropped_pages") >= dropped)
        world.eventually(lambda: world.remote("error_full") >= 1)
        assert not world.is_open
        assert world.remote_tokens(world.prompts[1]) == REUSED
    finally:
        world.redis.call("CONFIG", "SET", "maxmemory", "0")
    world.forget()
    world.eventually(lambda: world.remote("put_full") >= 1)
    world.eventually(partial(puts_again, world))  # not for a while after the store said so
    world.recover()


def puts_again(world: World) -> bool:
    """Whether the pages of a prompt that is computed go to the store, or are refused at once."""
    sent, refused = world.sent(), world.remote("put_full")
    world.forget()
    world.ask(world.prompts[6])
    world.eventually(lambda: world.sent() > sent or world.remote("put_full") > refused)
    return world.sent() > sent


def test_values_that_were_overwritten_are_misses(world: World) -> None:
    redis = world.redis
    redis.call("FLUSHALL")
    world.store(world.prompts[1])
    names = redis.call("KEYS", "hkv:*")
    assert isinstance(names, list)
    for name in names:
        assert isinstance(name, bytes)
        redis.call("SETRANGE", name, 5000, b"\xa5" * 700)
    rejected = world.remote("get_rejected")
    assert world.remote_tokens(world.prompts[1]) == 0
    assert world.remote("get_rejected") > rejected
    world.eventually(lambda: world.count("remote_failed_pages") >= PROMPT_PAGES)
    # The computed pages take the place of the damaged ones.
    world.eventually(lambda: not world.is_open)
    world.forget()
    world.store(world.prompts[1])
    assert world.remote_tokens(world.prompts[1]) == REUSED
    for name in names:  # no header is left, or that of another page
        redis.call("SET", name, b"garbage" * 40_000)  # type: ignore[arg-type]
    world.forget()
    assert world.remote_tokens(world.prompts[1]) == 0
    assert world.remote("error_rejected_bad_magic") > 0
    redis.call("FLUSHALL")
    world.forget()
    world.recover()


def test_connections_that_are_lost_in_the_middle(world: World) -> None:
    world.store(*world.prompts[1:5])
    lost = world.remote("error_unavailable")
    done = threading.Event()

    def cut() -> None:
        while not done.wait(0.002):
            world.redis.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def one_was_lost() -> bool:
        for prompt in world.prompts[1:5]:
            world.ask(prompt)
            world.forget()
        return world.remote("error_unavailable") > lost

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        world.eventually(one_was_lost)
    finally:
        done.set()
        cutter.join()
    world.forget()
    world.recover()


def test_a_password_that_is_wrong_opens_the_breaker_at_once(world: World) -> None:
    world.store(world.prompts[1])
    opened = world.remote("breaker_opened")
    redis = world.redis
    redis.call("CONFIG", "SET", "requirepass", "another")
    redis.password = "another"
    try:
        redis.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert world.remote_tokens(world.prompts[1]) == 0
        world.eventually(lambda: world.remote("error_auth") >= 1 and world.is_open)
        assert world.remote("breaker_opened") == opened + 1
    finally:
        redis.call("CONFIG", "SET", "requirepass", PASSWORD)
        redis.password = PASSWORD
    world.forget()
    world.recover()


def test_nothing_was_held_and_nothing_leaked(world: World) -> None:
    host = world.state("host")
    assert host["planned_pages"] == 0
    assert host.get("remote_failures", 0) == 0
    assert world.remote("error_internal") == 0
    assert PASSWORD not in world.server.log()
