"""Commands of the documents, as they stand there, against a server that one of them starts.

All of docs/quickstart.md, and what all pages show of `hier-kv`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_ext.cli import main
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.server import ROOT, TINYLM, Server
from tests.e2e.hier_server import settled
from tests.unit.cli.test_shown_commands import examples
from tests.unit.test_docs_commands import ours

pytestmark = pytest.mark.e2e

_COMMAND = re.compile(r"^    (\S.*)$", re.MULTILINE)
# What these do takes minutes, or other files; `tests/unit/cli/test_shown_commands.py` runs them.
_ELSEWHERE = ("size", "calibrate", "prebuild")
_ASK = ("stats", "top", "steer", "warm")
_OWN_FOLDER = ("doctor", "prune")  # refused while a server holds it


def commands_behind(heading: str) -> list[str]:
    """The commands below a heading, up to the end of the page."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    return _COMMAND.findall(text.partition(f"## {heading}\n")[2])


class World(NamedTuple):
    """The server that the page starts.

    Attributes:
        server: still running.
        folder: in the place of build/quickstart.
        asking: the commands behind its start.
    """

    server: Server
    folder: Path
    asking: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    dev, serve, *asking = commands_behind("Without one")
    assert dev == "make dev"  # which made the environment that this runs in
    make, target, *settings = shlex.split(serve)
    given = dict(setting.split("=", 1) for setting in settings)
    assert (make, target, given["PORT"]) == ("make", "serve", "30000")
    folder = tmp_path_factory.mktemp("world") / "quickstart"
    args = shlex.split(given["ARGS"].replace("build/quickstart", str(folder)))
    with Server(args, log_path=folder.with_name("server.log"), stop="kill") as server:
        yield World(server, folder, asking)


def test_every_command_does_what_the_page_says(world: World) -> None:
    printed: list[str] = []
    for command in world.asking:
        mine = command.replace("build/quickstart", str(world.folder))
        mine = mine.replace("http://127.0.0.1:30000", world.server.url)
        done = subprocess.run(
            mine, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "/generate" in mine:
            printed.append(done.stdout)
    assert "reused" in done.stdout  # the last one is `hier-kv stats`
    first, again, restored = (
        json.loads(answer)["meta_info"]["cached_tokens_details"] for answer in printed
    )
    assert not (first or {}).get("hier_kv")
    assert again["hier_kv"]["device"] > 1024
    assert restored["hier_kv"]["device"] == 0
    assert restored["hier_kv"]["host"] > 1024


def test_a_curl_of_the_hints_page_is_answered(world: World) -> None:
    text = (ROOT / "docs" / "hints.md").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^    (curl .*)$", text, re.MULTILINE)
    mine = command.replace("http://127.0.0.1:30000", world.server.url)
    done = subprocess.run(
        f"{mine} -s --fail-with-body", shell=True, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    (scheduler,) = json.loads(done.stdout)["schedulers"]
    assert scheduler["pages"] == 0, "a few words are no whole page"


def test_the_client_of_its_page_prints_what_was_reused(world: World) -> None:
    text = (ROOT / "docs" / "client-report.md").read_text()
    (block,) = re.findall(r"^    from openai import OpenAI\n(?:    .*\n)+", text, re.MULTILINE)
    program = textwrap.dedent(block).replace("http://localhost:30000", world.server.url)
    long_one = program.replace(
        '"..."', repr("What to do when it rains, and when it does not. " * 40)
    )
    assert long_one != program
    program, long_one = (
        each.replace('model="default"', 'model="default", max_tokens=2')
        for each in (program, long_one)
    )
    printed = []
    for each in (program, long_one, long_one):
        done = subprocess.run(
            [sys.executable, "-c", each], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == "0 None\n", "nothing is reused of a few words"
    assert "'device': " in printed[-1]


def shown() -> list[tuple[str, ...]]:
    """What pages show of `hier-kv` in lines of their own, and `--help` of a server, each once."""
    words = [each.words[1:] for each in ours() if each.is_whole and each.words[0] == "hier-kv"]
    words = [each for each in words if each[0] not in _ELSEWHERE and "--contract" not in each]
    words += [each for each in examples() if each[0] in _ASK]
    # It would go on.
    return [*dict.fromkeys((*each, "--count", "1") if each[0] == "top" else each for each in words)]


@pytest.fixture
def stand_ins(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """What is here in the place of what the pages name."""
    monkeypatch.chdir(tmp_path)
    Path("system.txt").write_text("You are a helpful assistant. " * 40)
    Path("handbook.txt").write_text("What to do when it rains. " * 60)
    for name in ("documents.jsonl", "prompts.jsonl"):
        Path(name).write_text(json.dumps({"text": "On the sea. " * 60}))
    Path("empty").mkdir(mode=0o700)
    settled(world.server)
    shutil.copytree(world.folder / "kv", "copy")
    found = {
        "http://127.0.0.1:30000": world.server.url,
        "/nvme/kv": str(world.folder / "kv"),
        "/kv": "empty",
        "/etc/hier-kv.key": "key",
        "/models/llama-70b": str(TINYLM),
        "/models/llama-8b": str(TINYLM),
        "64": "0.1",
        "500": "1",
    }
    if redis_binary() is None:
        yield found
        return
    with RedisServer(tmp_path / "redis") as redis:
        yield found | {"redis://cache:6379": f"redis://127.0.0.1:{redis.port}"}


@pytest.mark.parametrize("command", shown(), ids=lambda words: " ".join(words)[:80])
def test_a_command_of_another_page_runs(
    command: tuple[str, ...], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if command[1].startswith("redis://") and command[1] not in stand_ins:
        pytest.skip("no redis-server is installed")
    if command[0] in _OWN_FOLDER:
        stand_ins = stand_ins | {"/nvme/kv": "copy"}
    words = [stand_ins.get(word, word) for word in command if word != "--speeds"]  # 5 s
    if "--key-file" in words:  # which may be left out, and the server has none
        at = words.index("--key-file")
        del words[at : at + 2]
    assert main(words) == 0
    assert capsys.readouterr().out.strip()
    if command[0] == "keygen":
        Path(words[1]).unlink()
    assert main([*words, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_pages_show_commands_of_each_kind() -> None:
    assert {words[0] for words in shown()} >= {
        *("doctor", "inspect", "keygen", "prune", "stats", "steer", "top", "verify", "warm")
    }
