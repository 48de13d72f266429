"""What an operator is owed: no password shown, nothing readable by others, no log that kills."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from sglang_ext.cli import main
from testkit.ports import free_port
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.server import Server
from tests.e2e.hier_server import (
    NUM_TOKENS,
    ask,
    connected,
    hier_args,
    real_prompts,
    settled,
    state,
)

pytestmark = pytest.mark.e2e

SECRET = "hunter2-of-the-store"


class World(NamedTuple):
    """A server that ran some requests.

    Attributes:
        server: still running.
        folder: of what it makes.
        log_is_full: whether its event log lies on a file system that is full.
    """

    server: Server
    folder: Path
    log_is_full: bool


def _small_file_system(folder: Path) -> bool:
    """Mounts 16 kB of memory there; False where this user may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "none", str(folder)]
    if not shutil.which("mount"):
        return False
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if redis_binary() is None:
        pytest.skip("no redis-server is installed")
    folder = tmp_path_factory.mktemp("operator")
    small = folder / "small"
    log_is_full = _small_file_system(small)
    try:
        with RedisServer(folder / "redis", password=SECRET) as redis:
            made = folder / "made"
            made.mkdir(mode=0o755)
            args = hier_args(made, host_pages=60)
            args[args.index("--hier-kv-event-log") + 1] = str(small / "events.jsonl")
            args += ["--hier-kv-remote-url", f"redis://127.0.0.1:{redis.port}"]
            args += ["--enable-metrics", "--max-total-tokens", "8192"]
            env = {"SGLANG_HIER_KV_REMOTE_PASSWORD": SECRET}
            log = folder / "server.log"
            with Server(args, log_path=log, stop="kill", env=env, start_timeout_s=300.0) as server:
                connected(server)
                for prompt in real_prompts([900] * 12, seed=5):
                    ask(server, prompt)
                settled(server)
                yield World(server, made, log_is_full)
    finally:
        if log_is_full:
            subprocess.run(["umount", "-l", str(small)], check=False)


def test_the_stores_password_is_shown_nowhere(world: World) -> None:
    server = world.server
    assert state(server)["remote"]["breaker_state"] == 0, "the password was not used"
    shown = {
        "log": server.log(),
        "/server_info": repr(server.get("/server_info")),
        "/get_server_info": repr(server.get("/get_server_info")),
        "/metrics": repr(server.get("/metrics")),
        "ps": repr(
            [[p.name(), p.cmdline()] for p in server.tree() if p.status() != psutil.STATUS_ZOMBIE]
        ),
    }
    assert "launch_command" in shown["/server_info"]
    assert "redis://" in shown["/server_info"]
    assert [where for where, text in shown.items() if SECRET in text] == []


def test_nothing_that_was_made_is_for_others(world: World) -> None:
    paths = [path for path in world.folder.rglob("*") if not path.is_symlink()]
    assert any(path.name.startswith("seg-") for path in paths)
    assert any(path.name == "truncation.key" for path in paths)
    opened = {
        str(p): oct(p.stat().st_mode) for p in paths if stat.S_IMODE(p.stat().st_mode) & 0o077
    }
    assert opened == {}


def test_a_full_file_system_under_the_event_log_ends_nothing(world: World) -> None:
    if not world.log_is_full:
        pytest.skip("this user mounts no file systems")
    assert state(world.server)["host"]["event_log_dropped_lines"] > 0
    assert len(ask(world.server, [7] * 200)["output_ids"]) == NUM_TOKENS
    assert os.path.getsize(world.folder.parent / "small" / "events.jsonl") <= 16384


def test_stats_and_top_say_what_the_server_counts(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    found = settled(world.server)
    assert main(["stats", world.server.url, "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert shown["host"]["saved_pages"] == found["host"]["saved_pages"] > 0
    assert main(["top", world.server.url, "--count", "2", "--every", "0.01"]) == 0
    text = capsys.readouterr().out
    saved = f"{found['host']['saved_pages']:,}"
    assert f"{saved} saved" in text  # at the first look, and then with rates
    assert f"{saved} (+0.0/s) saved" in text
    assert text.count("  remote  ") == 2


def test_stats_of_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for url, status, expected in (
        (f"http://127.0.0.1:{free_port()}", 1, "gives no state of an SGLang server"),
        ("here", 2, "a URL such as http://127.0.0.1:30000 is expected, got 'here'"),
    ):
        assert main(["stats", url]) == status
        assert expected in capsys.readouterr().err
