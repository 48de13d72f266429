"""What others wrote, printed by commands: no terminal obeys it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.cli.printing import complain, printable, say, say_json, tell
from tests.unit.cli.stub_server import QuietHandler, serving

# ESC, CR, a C1 control, BEL, NUL, DEL, what turns the direction of text, and an end of a line.
NASTY = "a\x1b]0;title\x07\x1b[2J\rb\x9b31m\0\x7f\u202ec\u2066d\u2028e"
UNREADABLE = os.fsdecode(b"\xff")
NASTY_NAME = f"a\x1b[2J\rb\x9b31m\u202ec\u2066d{UNREADABLE}"


def server_state() -> dict[str, Any]:
    """A scheduler's state in which all that is no number is hostile, the names of counts too."""
    counts = [
        "host_pages",
        "host_capacity_pages",
        "spill_queue_pages",
        "save_queue",
        "requested_tokens",
    ]
    host = dict.fromkeys((*counts, f"reject_{NASTY}", f"missed_{NASTY}_tokens"), 1)
    sizes = {"page_size": 64, "slot_bytes": 4096, "kv_bytes_per_page": 4096}
    names = dict.fromkeys(("rope", "codec", "tp_rank", "dp_rank"), f"{NASTY}\n")
    disk_counts = ("used_bytes", "max_bytes", "records_written", "records_read")
    disk: dict[str, Any] = dict.fromkeys((*disk_counts, "records_salvaged"), 1)
    disk |= {"mode": NASTY, "errors": {NASTY: 1}}
    remote = {NASTY: 1, f"error_{NASTY}": 1}
    return {"host": host, "disk": disk, "cost": {}, "remote": remote, **sizes, **names}


STATE = {"internal_states": [{"hier_kv": server_state()}]}
STEERED = {"schedulers": [{"pages": 1, "host": NASTY, "disk": NASTY}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server that says such things: its state, what it did, and why it refuses."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_refused = "refused" in self.path or self.path.endswith(("/generate", "/v1/x"))
            said: Any = {"error": {"message": NASTY + "\n"}}
            if not is_refused:
                said = STATE if self.path.endswith("/server_info") else STEERED
            if "text" in self.path:
                is_refused, said = True, None
            body = NASTY.encode("utf-8", "replace") if said is None else json.dumps(said).encode()
            self.answer(500 if is_refused else 200, body)

        do_POST = do_GET

    with serving(Handler) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are given; with a folder and a text of hostile names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text")
    (tmp_path / f"{NASTY_NAME}.txt").write_bytes(b"\xff")
    strange = tmp_path / NASTY_NAME
    strange.mkdir()
    (strange / "seg-00000001.hkv").write_bytes(b"x" * 9999)
    (tmp_path / "kv" / ("ab" * 8)).mkdir(parents=True)
    (tmp_path / "kv" / ("ab" * 8) / f"seg-{NASTY_NAME}.hkv").write_bytes(b"x")
    return tmp_path


def assert_harmless(text: str) -> None:
    """Fails for what is neither shown nor the end of a line."""
    assert [each for each in text if each != "\n" and not each.isprintable()] == []


@pytest.mark.parametrize("json_", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "URL"),
        ("stats", "URL/refused"),
        ("stats", "URL/text"),
        ("top", "URL", "--count", "2", "--every", "0.01"),
        ("top", "URL/refused", "--count", "1"),
        ("steer", "URL", "--text", "text", "--locate"),
        ("steer", "URL/refused", "--text", "text", "--locate"),
        ("steer", "URL", "--text", f"{NASTY_NAME}.txt", "--locate"),
        ("warm", "URL", "text"),
        ("warm", "URL", f"{NASTY_NAME}.txt"),
        ("warm", "URL", f"{NASTY_NAME}.absent"),
        ("warm", "URL/refused", "text"),
        ("inspect", NASTY_NAME),
        ("verify", NASTY_NAME),
        ("prune", NASTY_NAME, "--all"),
        ("inspect", "kv"),
        ("verify", "kv"),
        ("inspect", f"file:///tmp/{NASTY_NAME}"),
        ("keygen", f"{NASTY_NAME}.txt"),
        ("keygen", f"{NASTY_NAME}.key"),
        ("size", NASTY_NAME, "--chats-per-hour", "2"),
        ("size", "--kv-bytes-per-token", "9", "--trace", f"{NASTY_NAME}.txt"),
        ("doctor", "--hier-kv-host-size", "0.01", "--hier-kv-event-log", NASTY_NAME),
        ("doctor", "--contract", NASTY_NAME),
    ],
    ids=lambda words: "-".join(map(printable, words)).replace("URL", "url"),
)
@pytest.mark.usefixtures("folder")
def test_no_command_passes_on_what_a_terminal_obeys(
    url: str, arguments: tuple[str, ...], json_: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [each.replace("URL", url, 1) for each in arguments]
    if "--contract" in words:
        pytest.importorskip("sglang")
    main([*words, *(["--json"] if json_ else [])])
    captured = capsys.readouterr()
    assert captured.out or captured.err
    assert_harmless(captured.out)
    assert_harmless(captured.err)


def test_what_is_refused_is_repeated_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stats", "http://127.0.0.1:1", NASTY])
    told = capsys.readouterr().err
    assert "usage: hier-kv stats" in told
    assert_harmless(told)


def test_each_line_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a label could say what looks like another line of the command's."""
    say(f"one{NASTY}{UNREADABLE}\ntwo", "three", ahead="\x1b[H")
    tell("four\nfive")
    complain("six\nseven")
    say_json({"label": NASTY})
    captured = capsys.readouterr()
    lines = captured.out.removeprefix("\x1b[H").split("\n")
    assert lines[0].startswith("onea?]0;title??[2J?b?31m")
    assert lines[0].endswith("?two")
    assert lines[1] == "three"
    assert json.loads("".join(lines[2:]))["label"] == NASTY
    assert captured.err == "four?five\nhier-kv: six seven\n"
    assert_harmless(captured.out.removeprefix("\x1b[H"))


def test_a_terminal_that_knows_few_characters_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    say(f"caf\N{LATIN SMALL LETTER E WITH ACUTE} {UNREADABLE}")
    assert written.getvalue() == b"caf? ?\n"
