"""What a stranger meets: `--help` with examples that can be pasted, `--json`, and what is missing.

Runs where neither torch nor SGLang is, too.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.cli import main, make_parser
from sglang_ext.cli.doctor import next_steps
from tests.unit.cli.stub_server import QuietHandler, serving

STATE = {
    "internal_states": [
        {
            "hier_kv": {
                "host": {"host_pages": 1, "host_capacity_pages": 2, "save_queue": 0},
                "disk": {},
                "cost": {},
                "remote": None,
                "page_size": 64,
                "slot_bytes": 4096,
                "kv_bytes_per_page": 4096,
                "rope": "pre",
                "codec": "none",
                "tp_rank": 0,
                "dp_rank": 0,
            }
        }
    ]
}
STEERED = {"schedulers": [{"pages": 40, "host": 3, "disk": 37, "prefetching": True}]}
# Neither is here, whatever the environment has.
WITHOUT = "import sys; sys.modules.update(torch=None, sglang=None, transformers=None); "
RUN = "from sglang_ext.cli import main; sys.exit(main(sys.argv[1:]))"


def commands() -> dict[str, argparse.ArgumentParser]:
    [found] = [
        action.choices
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(found)


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a Python that finds neither torch nor SGLang."""
    command = [sys.executable, "-c", WITHOUT + RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def url() -> Iterator[str]:
    """Of something that answers as a server does."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps(STATE).encode())

        def do_POST(self) -> None:
            self.answer(200, json.dumps(STEERED).encode())

    with serving(Handler) as url:
        yield url


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", commands())
def test_help_has_examples_that_are_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = commands()[name].format_help()
    examples = re.findall(rf"^  (hier-kv {name} .*)$", text.partition("example")[2], re.MULTILINE)
    assert examples
    for example in examples:
        _, *words = shlex.split(example)
        assert make_parser().parse_args(words).command == name
    assert "--json" in text
    if name in ("stats", "top", "inspect", "prune"):
        assert "powers of 1,024" in " ".join(text.split())
    sizes = text.replace("GB/s", "")
    assert "GB" not in sizes.replace("size=1GB", ""), "sizes are in GiB, here as in what it prints"


def test_top_prints_a_document_for_each_look(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "top", url, "--count", "2", "--every", "0.01", "--json")
    looks = [json.loads(line) for line in text.splitlines()]
    assert [look["schedulers"][0]["host"]["host_pages"] for look in looks] == [1, 1]
    assert looks[0]["time"] <= looks[1]["time"]


def test_steer_says_where_the_pages_were(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a")
    asked = ("steer", url, "--text", str(tmp_path / "a.txt"), "--prefetch")
    assert json.loads(printed(capsys, *asked, "--json")) == STEERED
    together = ("--text", str(tmp_path / "a.txt"), "--unpin", "--demote", "--ttl-s", "60")
    assert printed(capsys, "steer", url, *together)
    assert printed(capsys, *asked) == (
        "scheduler 0: 40 whole pages, 3 in DRAM, 37 on disk; "
        "those on disk are being brought to DRAM\n"
    )


def test_keygen_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "key")
    assert json.loads(printed(capsys, "keygen", path, "--json")) == {"key_file": path}


def test_doctor_says_what_to_install_and_looks_at_the_rest() -> None:
    done = alone("doctor", "--json", "--hier-kv-host-size", "0.01")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    sglang, *others = told["checks"]
    assert sglang["state"] == "refused"
    assert "pip install 'sglang-hier-kv[sglang]'" in sglang["text"]
    assert [(each["name"], each["state"]) for each in others if each["name"] == "settings"] == [
        ("settings", "ok")
    ]
    assert told["next"] == ["# mend what is refused above (sglang), and look again"]
    done = alone("doctor", "--hier-kv-host-size", "0.01")
    assert f"next:\n  {told['next'][0]}\n" in done.stdout


def test_calibrate_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b " * 9000)
    done = alone("calibrate", str(tmp_path), "--text", str(tmp_path / "text"))
    assert done.returncode == 1
    assert done.stderr == (
        "hier-kv: calibrate needs torch, which is not installed here; run it where SGLang is, or "
        "pip install 'sglang-hier-kv[sglang]'.\n"
    )


def test_prebuild_says_what_to_install_before_it_compiles() -> None:
    done = alone("prebuild", "--codec", "none")
    assert done.returncode == 1
    assert done.stdout == ""  # a line for each part that is compiled
    assert "prebuild needs torch, which is not installed here" in done.stderr
    assert done.stderr.endswith("pip install 'sglang-hier-kv[sglang]'.\n")


def test_doctor_ends_with_the_commands_that_come_next(capsys: pytest.CaptureFixture[str]) -> None:
    def after(*arguments: str) -> list[str]:
        return next_steps(make_parser().parse_args(["doctor", *arguments]), [])

    served, sized, start, stats = after()
    assert served.startswith("hier-kv doctor --model-path MODEL ")
    assert sized.startswith("hier-kv size MODEL --chats-per-hour 2000 ")
    assert start == "python -m sglang.launch_server --model-path MODEL --enable-hier-kv"
    assert stats.startswith("hier-kv stats http://127.0.0.1:30000 ")
    *_, start, stats = after("--port", "31000", "--host", "0.0.0.0")
    assert start.endswith(" --enable-hier-kv --host 0.0.0.0 --port 31000")
    assert stats.startswith("hier-kv stats http://127.0.0.1:31000 ")
    given = ["--model-path", "/my models/a", "--hier-kv-host-size", "2", "--hier-kv-disk-dir", "/d"]
    start, _ = after(*given)
    assert start == (
        "python -m sglang.launch_server --model-path '/my models/a' --enable-hier-kv "
        "--hier-kv-host-size 2 --hier-kv-disk-dir /d"
    )


def test_size_shows_how_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size"]) == 2
    example = capsys.readouterr().err.partition("--kv-bytes-per-token: ")[2]
    assert make_parser().parse_args(shlex.split(example)[1:]).command == "size"
