"""Commands with arguments that cannot be, and at other servers: a sentence, no traceback."""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext import cli
from sglang_ext.cli import main
from tests.unit.cli.stub_server import QuietHandler, serving

RUN = "import sys; from sglang_ext.cli import main; sys.exit(main(sys.argv[1:]))"
# By path: status and body.
ANSWERS = {
    "plain": (200, b'{"internal_states": [{"memory_usage": {}}]}'),
    "page": (200, b"<html>"),
    "list": (200, b"[1]"),
    "deep": (200, b"[" * 200_000),
    "keyed": (401, b'{"error": "a key is wanted"}'),
    "broken": (500, b"out of order"),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of servers that are none of ours, one behind each name of `ANSWERS`."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(*ANSWERS[self.path.split("/")[1]])

        do_POST = do_GET

    with serving(Handler) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are given."""
    (tmp_path / "text").write_text("a text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 1) -> str:
    """The one line that a command ends with."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hier-kv: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("hier-kv: ")


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    "command",
    [
        ("stats",),
        ("top", "--count", "1"),
        ("steer", "--text", "text", "--locate"),
        ("warm", "text"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("folder")
def test_another_server_is_one_sentence(
    url: str, name: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, command[0], f"{url}/{name}", *command[1:])
    assert f"{url}/{name}" in text
    if name == "keyed":
        assert "a key is wanted" in text


@pytest.mark.parametrize(
    "command",
    [("stats",), ("top",), ("steer", "--text", "text", "--locate"), ("warm", "text")],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("folder")
def test_where_nobody_answers_is_said(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, command[0], "http://127.0.0.1:1", *command[1:])
    assert "http://127.0.0.1:1/" in text
    assert "refused" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("stats", "127.0.0.1:30000"), "a URL such as http://127.0.0.1:30000 is expected"),
        (("stats", "http://"), "a URL such as http://127.0.0.1:30000 is expected, got 'http://'"),
        (("stats", "http://[::1"), "a URL such as"),
        (("stats", "http://127.0.0.1:99999"), "a URL such as"),
        (("top", "http://127.0.0.1:1/ a"), "a URL such as"),
        (("steer", "http://a\udcff", "--text", "text", "--locate"), "a URL such as"),
        (("keygen", ""), "the name of a file to make is expected, got an empty text"),
        (("top", "--every", "nan"), "--every must be"),
        (("top", "--every", "inf"), "--every must be"),
        (("top", "--every", "0"), "above 0, at most 86400 s, got 0"),
        (("top", "--count", "0"), "--count must be above 0, got 0"),
        (("steer", "--text", "text"), "nothing is asked for; give one of --locate, --prefetch"),
        (("steer", "--text", "text", "--pin-s", "nan"), "--pin-s must be above 0"),
        (("steer", "--text", "text", "--returns-in-s", "-1"), "--returns-in-s must be above 0"),
        (
            ("steer", "--text", "text", "--locate", "--demote", "--ttl-s", "5"),
            "--locate and --demote, --ttl-s do not go together: it says where the pages lie",
        ),
        (
            ("steer", "--text", "text", "--unpin", "--pin-s", "5"),
            "--unpin and --pin-s do not go together: one ends pins",
        ),
        (
            ("steer", "--text", "text", "--demote", "--pin-s", "5"),
            "--demote and --pin-s do not go together: pinned pages are not demoted",
        ),
        (("steer", "--text", "text", "--prefetch", "--demote"), "--demote and --prefetch do not"),
        (("steer", "--text", "text", "--ends", "--returns-in-s", "5"), "--ends and --returns-in-s"),
        (("warm", "http://127.0.0.1:1"), "a FILE is expected"),
        (("warm", "localhost:1", "text"), "a URL such as"),
        (
            ("size", "--kv-bytes-per-token", "9", "--chats-per-hour", "2", "--block-tokens", "64"),
            "--block-tokens says how a --trace counts",
        ),
        (("calibrate", "/none", "--levels", "0"), "levels and a default below their number"),
        (("inspect", ""), "empty text"),
        (("verify", ""), "empty text"),
        (("prune", "--all", ""), "empty text"),
        (("inspect", "ftp://x"), "the URL must begin with"),
        (("prune", "folder"), "nothing is chosen"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_meant_ends_with_2_as_argparse_does(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "calibrate":
        pytest.importorskip("torch")
    assert expected in said(capsys, *arguments, status=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("steer", "--text", "bytes", "--locate"), "bytes: expected text"),
        (("steer", "--ids", "text", "--locate"), "text: expected a JSON list"),
        (("steer", "--text", "none", "--locate"), "'none': No such file or directory; correct the"),
        (("steer", "--text", ".", "--locate"), "'.': Is a directory; name a file, not a folder"),
        (("warm", "http://127.0.0.1:1", "none"), "'none': No such file or directory; correct the"),
        (("keygen", "none/key"), "'none/key': No such file or directory; correct the path"),
        (("keygen", "text/key"), "'text/key': Not a directory; correct the path"),
        (("calibrate", "/none"), "/none is no folder"),
        (("calibrate", "."), ". cannot be loaded as a model (Unrecognized model in ."),
        (
            ("size", "none", "--kv-dtype", "bfloat16", "--chats-per-hour", "2"),
            "none cannot be read as a model's config.json",
        ),
        (("calibrate", "/none", "--device", "foo"), "--device must be a device"),
        (("calibrate", "/none", "--out", "/proc/none/file"), "'/proc/none'"),
        (("keygen", "text"), "'text': File exists"),
        (
            ("size", "--kv-bytes-per-token", "9", "--trace", "none"),
            "the trace none cannot be read (No such file or directory); give",
        ),
        (("inspect", "absent"), "is no folder"),
        (("verify", "absent"), "is no folder"),
        (("prune", "absent", "--all"), "is no folder"),
        (("inspect", "redis://127.0.0.1:1"), "is it up"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_done_ends_with_1(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "calibrate":
        pytest.importorskip("torch")
    assert expected in said(capsys, *arguments)


def test_a_flag_that_a_command_has_not_is_told_with_its_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--evry=5"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: hier-kv top ")
    assert "--every SECONDS" in told
    assert told.endswith(
        "hier-kv top: error: unrecognized arguments: --evry=5 (did you mean --every?)\n"
    )


def test_a_key_that_finds_no_room_leaves_no_file(tmp_path: Path) -> None:
    """An empty one was left, so that the next try said that it exists."""
    path = tmp_path / "key"
    done = subprocess.run(
        [sys.executable, "-c", RUN, "keygen", str(path)],
        # As on a full disk: the file can be made, and not be written.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"hier-kv: {str(path)!r}: File too large")
    assert not path.exists()


def test_a_long_usage_does_not_hide_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--hier-kv-host-sise", "1", "--nothing-like-it"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 2
    assert "hier-kv doctor --help" in told
    expected = "--hier-kv-host-sise 1 --nothing-like-it (did you mean --hier-kv-host-size?)\n"
    assert told.endswith(expected)


@pytest.mark.parametrize("key", ["secret\nkey", "secret\xe9", "secret\udcff"])
@pytest.mark.parametrize("is_variable", [False, True], ids=["flag", "variable"])
@pytest.mark.parametrize(
    ("command", "flag", "variable"),
    [
        (("stats",), "--api-key", "SGLANG_HIER_KV_API_KEY"),
        (("steer", "--text", "text"), "--admin-api-key", "SGLANG_HIER_KV_ADMIN_API_KEY"),
    ],
    ids=["api", "admin"],
)
def test_a_key_that_cannot_be_sent_is_not_repeated(
    command: tuple[str, ...],
    flag: str,
    variable: str,
    is_variable: bool,
    key: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_variable:
        monkeypatch.setenv(variable, key)
    with pytest.raises(SystemExit) as ended:
        main([*command, *([] if is_variable else [flag, key])])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument {flag}: a key of printable ASCII on one line is expected" in told
    assert "secret" not in told


def test_text_from_the_input_that_is_no_utf_8_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file's is, whatever the locale."""
    taken = io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", taken)
    assert "-: expected text in UTF-8" in said(capsys, "steer", "--text", "-", "--locate")


def test_a_size_with_a_unit_is_told_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (("--hier-kv-host-size", "64GB"), "a number of GiB without a unit is expected"),
        (("--hier-kv-truncation-head", "4.5"), "a whole number without a unit is expected"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        assert ended.value.code == 2
        assert f"argument {arguments[0]}: {expected}" in capsys.readouterr().err


def test_who_reads_no_further_ends_a_command_silently(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, "keygen", str(tmp_path / "key")],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_ends_a_command_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(chosen: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_stats", interrupted)
    assert main(["stats"]) == 130
    assert capsys.readouterr().err == ""
