"""Commands that the documents and `--help` show, run as they stand, where they need no server.

Only what is not on this machine has a stand-in: models, folders, files, and sizes of what is
allocated. What asks a server or a store is run by `tests/e2e/start/test_quickstart.py`. What takes
minutes as it stands is run in small by tests of its own: `prebuild`, `calibrate`, `size` of chats.
"""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.cli import main
from testkit.server import TINYLM
from testkit.sglang_copy import SglangCopy
from tests.tiers.protection_cases import KEY, seals
from tests.unit.cli.disk_folder import write_folder
from tests.unit.cli.test_help import commands
from tests.unit.test_docs_commands import ours

_NO_SERVER = ("doctor", "inspect", "keygen", "prune", "size", "verify")
# In a sentence a name alone, or with one word, is what is spoken of.
_FEWEST_WORDS = 3
_WHEEL = "sglang-0.5.24-cp311-cp311-manylinux_2_34_x86_64.whl"


def examples() -> Iterator[tuple[str, ...]]:
    """What `--help` of each command shows."""
    for parser in commands().values():
        for line in re.findall(r"^  hier-kv (.*)$", str(parser.epilog), re.MULTILINE):
            yield tuple(shlex.split(line))


def shown() -> list[tuple[str, ...]]:
    """Commands that need no server and no minutes, each once."""
    found = [
        each.words[1:]
        for each in ours()
        if each.words[0] == "hier-kv" and (each.is_whole or len(each.words) > _FEWEST_WORDS)
    ]
    found = [words for words in dict.fromkeys([*found, *examples()]) if words[0] in _NO_SERVER]
    return [
        words
        for words in found
        if not words[1].startswith("redis://") and "--chats-per-hour" not in words
    ]


def test_commands_of_each_kind_are_run() -> None:
    assert {words[0] for words in shown()} == set(_NO_SERVER)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is here in the place of what is shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir(mode=0o700)
    write_folder(tmp_path / "kv")
    write_folder(tmp_path / "sealed", seals("encrypt"))
    (tmp_path / "its key").write_text(KEY.hex())
    (tmp_path / "its key").chmod(0o600)
    write_trace(tmp_path / "demo.jsonl", 64)
    write_trace(tmp_path / "requests.jsonl", 512)
    return {
        **dict.fromkeys(("/models/llama-70b", "/models/llama-8b"), str(TINYLM)),
        "tests/assets/tinylm": str(TINYLM),
        "/models/qwen/config.json": str(TINYLM / "config.json"),
        "build/demo-trace.jsonl": "demo.jsonl",
        **dict.fromkeys(("/nvme/kv", "/mnt/nvme/hier-kv"), "kv"),
    }


def write_trace(path: Path, block_tokens: int) -> None:
    """Eight prompts of eight blocks, each twice."""
    prompts = 2 * [[10 * who + block for block in range(8)] for who in range(8)]
    with path.open("w") as file:
        for number, ids in enumerate(prompts):
            line = {"timestamp": 1000 * number, "input_length": block_tokens * len(ids)}
            file.write(json.dumps(line | {"output_length": 4, "hash_ids": ids}) + "\n")


def of_command(command: tuple[str, ...]) -> dict[str, str]:
    """Stand-ins that one command has, as the word is another thing to others."""
    name = command[0]
    if name == "doctor":  # which looks for so much room
        return {"64": "0.1", "500": "1", **dict.fromkeys(("/nvme/kv", "/kv"), "empty")}
    if name == "keygen":
        return {"/etc/hier-kv.key": "key"}
    if "--key-file" in command:
        return {"/nvme/kv": "sealed", **dict.fromkeys(("FILE", "/etc/hier-kv.key"), "its key")}
    return {}


def pack_wheel(folder: Path) -> None:
    """A wheel of the release that is shown, whose source is that of the installed one."""
    copy = SglangCopy(folder, "0.5.24")
    with zipfile.ZipFile(folder / _WHEEL, "w") as wheel:
        for path in copy.folder.rglob("*.py"):
            wheel.write(path, path.relative_to(folder))


@pytest.mark.parametrize("command", shown(), ids=lambda words: " ".join(words)[:80])
def test_it_runs(
    command: tuple[str, ...],
    stand_ins: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if _WHEEL in command:
        pack_wheel(tmp_path)
    found = stand_ins | of_command(command)
    words = [found.get(word, word) for word in command if word != "--speeds"]  # 5 s
    assert main(words) == 0
    assert capsys.readouterr().out.strip()
    if command[0] == "keygen":
        Path(words[1]).unlink()
    if command[0] == "size":  # the same seconds once more
        return
    assert main([*words, "--json"]) == 0
    json.loads(capsys.readouterr().out)
