"""The commands of docs/quickstart.md, as they stand there, against the server that they start."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from testkit.server import ROOT, Server

pytestmark = pytest.mark.e2e

_COMMAND = re.compile(r"^    (\S.*)$", re.MULTILINE)


def commands_behind(heading: str) -> list[str]:
    """The commands below a heading, up to the end of the page."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    return _COMMAND.findall(text.partition(f"## {heading}\n")[2])


def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    dev, serve, *asking = commands_behind("Without one")
    assert dev == "make dev"  # which made the environment that this runs in
    make, target, *settings = shlex.split(serve)
    given = dict(setting.split("=", 1) for setting in settings)
    assert (make, target, given["PORT"]) == ("make", "serve", "30000")
    folder = tmp_path / "quickstart"
    args = shlex.split(given["ARGS"].replace("build/quickstart", str(folder)))
    printed: list[str] = []
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        for command in asking:
            mine = command.replace("build/quickstart", str(folder))
            mine = mine.replace("http://127.0.0.1:30000", server.url)
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
