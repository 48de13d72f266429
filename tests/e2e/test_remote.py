"""Two servers, one store: a conversation begun on one goes on at the other after the first died."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.remote.redis_server import RedisServer, redis_binary
from bench.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    state,
    tokens_and_logprobs,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]


def _uploaded(server: Server, num_pages: int) -> bool:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        host = state(server)["host"]
        if host.get("remote_written_pages", 0) + host.get("remote_duplicate_pages", 0) >= num_pages:
            return True
        time.sleep(0.1)
    return False


def test_a_conversation_moves_to_another_server(tmp_path: Path) -> None:
    first_turn, second_turn = real_prompts([1000, 300])
    with RedisServer(tmp_path / "redis", password="hunter2") as redis:
        secret = tmp_path / "secret"
        secret.write_text("hunter2\n")
        url = f"redis://127.0.0.1:{redis.port}?password-file={secret}"
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        args = [[*hier_args(f, disk_gb=0), "--hier-kv-remote-url", url] for f in folders]
        with Server(args[0], log_path=folders[0] / "log", stop="kill") as one:
            answer = ask(one, first_turn, 40)
            prompt = [*first_turn, *answer["output_ids"], *second_turn]
            reusable = (len(first_turn) + 39) // PAGE
            assert _uploaded(one, reusable)
            expected = tokens_and_logprobs(ask(one, prompt))
            assert "hunter2" not in repr(state(one))
        with Server(args[1], log_path=folders[1] / "log", stop="kill") as two:
            moved = ask(two, prompt)
            found = state(two)
        assert by_tier(moved)["remote"] >= 0.95 * reusable * PAGE, (by_tier(moved), found)
        assert tokens_and_logprobs(moved) == expected
        assert found["remote"]["breaker_state"] == 0
        assert found["host"]["remote_promoted_pages"] >= 0.95 * reusable
    for folder in folders:
        assert "hunter2" not in (folder / "log").read_text()
