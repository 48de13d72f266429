"""Every command that the documents show is one that its program takes, as far as it is ours.

Each is given to the program's own parser, which is stopped behind that; the heads of the examples
and of what is in `deploy/` are read, too. What of it takes seconds is run besides: `hier-kv` on
files (`tests/unit/cli/test_shown_commands.py`), `hier-kv` at a server and all of the quickstart
(`tests/e2e/start/test_quickstart.py`), starts up to their arguments (`test_refusals.py` there), and
the examples (`tests/e2e/examples`). What is shown of `python -m bench` and of `make` would take
minutes to hours: it is not run, but for what make would do. What is none of ours is looked at in
`test_docs_shell.py`.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from sglang_ext.cli import main as hier_kv
from sglang_ext.settings.arguments import KNOWN, flag
from sglang_ext.settings.flags import add_flags

ROOT = Path(__file__).resolve().parents[2]
# What others' programs take is theirs to say.
OTHERS = ("curl", "docker", "kubectl", "pip", "redis-server", "mooncake_master")
_GATEWAY = ("-m", "smg")
_ROUTERS = (("-m", "sglang_router.launch_router"), _GATEWAY)
_SERVER = "sglang.launch_server"
_BEGINS = rf"(?:\.venv/bin/)?(?:hier-kv|python3?|make|{'|'.join(OTHERS)}) \S|node \d +{_SERVER}"
_BLOCK = re.compile(rf"^ {{4,}}(?=(?:{_BEGINS}|--hier-kv-\w))(.*)$", re.MULTILINE)
_IN_TEXT = re.compile(rf"`((?:{_BEGINS})[^`]*)`")
# What keys are derived with begins with the plugin's name, too.
_NO_COMMAND = re.compile(r"hier-kv (?:1 |window layers, |states, )")
_STAND_INS = {"CASE": "all", "N": "1", "S": "1"}


class Shown(NamedTuple):
    """A command, and how it is shown: in a line of its own, it can be used as it stands."""

    page: str
    words: tuple[str, ...]
    is_whole: bool


class ParsedError(Exception):
    """The parser took the command."""


def shown() -> Iterator[Shown]:
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages += [
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("kernels/*/*.md"),
        *ROOT.glob("runtime_cpu/*.md"),
    ]
    for page in [*sorted(pages), *heads()]:
        text = re.sub(r" *\\\n *", " ", text_of(page))
        found = [(line, True) for line in _BLOCK.findall(text)]
        found += [(line, False) for line in _IN_TEXT.findall(text) if not _NO_COMMAND.match(line)]
        for line, is_whole in found:
            yield Shown(str(page.relative_to(ROOT)), words_of(line), is_whole)


def heads() -> list[Path]:
    """Files that say in their first lines, or in comments, how they are run."""
    deployed = [ROOT / "deploy" / name for name in ("Dockerfile", "kubernetes.yaml")]
    return [*sorted(ROOT.glob("examples/*.py")), *deployed]


def text_of(page: Path) -> str:
    """What a page shows; of a program its docstring, and comments of what knows no other."""
    text = page.read_text()
    if page.suffix == ".py":
        return ast.get_docstring(ast.parse(text), clean=False) or ""
    if page in heads():
        return "\n".join(re.findall(r"^ *#(?: (.*))?$", text, re.MULTILINE))
    return text


def words_of(line: str) -> tuple[str, ...]:
    """A command's words: what may be left out is there, and what stands for more is not."""
    bare = line
    if "'" not in line:
        bare = re.sub(r"\[(-[^]]*)\]", r"\1", bare)
        bare = re.sub(r"\([^)]*\)", "x", re.sub(r"\s\.\.\.", "", bare))
    words = shlex.split(bare, comments=True)
    if words[0] == "node":
        words = words[2:]
    words = [_STAND_INS.get(word, word) for word in words]
    return (words[0].removeprefix(".venv/bin/"), *words[1:])


def ours() -> list[Shown]:
    return [each for each in shown() if not is_of_others(each.words)]


def gateways() -> list[Shown]:
    return [each for each in shown() if each.words[1:3] == _GATEWAY]


def starts() -> list[Shown]:
    """What is shown of SGLang's server in lines of its own: the words behind its name."""
    found = []
    for each in ours():
        given = each.words
        if _SERVER in given:
            given = given[given.index(_SERVER) + 1 :]
        elif not given[0].startswith("--hier-kv-"):
            continue
        if each.is_whole:
            found.append(each._replace(words=given))
    return found


def is_of_others(words: tuple[str, ...]) -> bool:
    return words[0] in OTHERS or words[1:3] in _ROUTERS


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs end when their parser has taken what it was given."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse(parser, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)


def is_taken(words: tuple[str, ...]) -> bool:
    """Whether a program takes a command of these words."""
    program, *given = words
    try:
        if program == "hier-kv":
            hier_kv(given)
        elif program == "make":
            return makes(given)
        elif program.startswith("python"):
            run_python(given)
        elif program == _SERVER or program.startswith("--hier-kv-"):
            check_server(given if program == _SERVER else list(words))
        else:
            return False
    except ParsedError:
        return True
    except SystemExit as end:
        return not end.code  # --help
    raise AssertionError(f"{words} was not parsed")


def run_python(given: list[str]) -> None:
    """As Python would, up to what the program's parser says."""
    if given[0] == "-c":
        compile(given[1], "command", "exec")
        raise ParsedError
    name, *rest = given[1:] if given[0] == "-m" else given
    if name == "pytest":
        raise ParsedError
    if name == "mkdocs" or name == _SERVER or name == "runtime_cpu/launch.py":
        check_server(rest)
    name = name.removesuffix(".py").replace("/", ".")
    path = source_of(name)
    if "parse_args" not in path.read_text():
        assert not [word for word in rest if word.startswith("-")], f"{name} has no flags"
        raise ParsedError
    argv, sys.argv = sys.argv, [str(path), *rest]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(name, run_name="__main__")
    finally:
        sys.argv = argv


def source_of(name: str) -> Path:
    """The file that `python -m` runs."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise SystemExit(f"no module {name}")
    return Path(spec.origin)


def check_server(given: list[str]) -> NoReturn:
    """The plugin's flags by its parser, SGLang's by the list of those that it has."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_flags(parser)
    _, others = parser.parse_known_args(given)
    known = {f"--{flag(name)}" for name in KNOWN} | {"--help"}
    unknown = {word for word in others if word.startswith("--")} - known
    raise SystemExit(f"no such flags: {unknown}") if unknown else ParsedError


def makes(given: list[str]) -> bool:
    """Whether the Makefile has the targets and the variables."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))
    names = {word.partition("=")[0] if "=" in word else "" for word in given} - {""}
    return names <= variables and {word for word in given if "=" not in word} <= targets


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    "command", ours(), ids=lambda each: f"{each.page}: {' '.join(each.words)}"[:120]
)
def test_its_program_takes_it(command: Shown) -> None:
    # In a sentence what a command is about may be left out.
    tried = [command.words]
    if not command.is_whole:
        tried += [(*command.words, "x"), (*command.words, "x", "x")]
    if not any(word.startswith("-") for word in command.words):
        tried += [(*command.words, "--help")]
    assert any(is_taken(words) for words in tried)


def makes_shown() -> list[tuple[str, ...]]:
    return [*dict.fromkeys(each.words for each in ours() if each.words[0] == "make")]


def what_make_would_do(*words: str) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", makes_shown(), ids=" ".join)
def test_make_would_do_it_and_uses_each_variable(words: tuple[str, ...]) -> None:
    told = what_make_would_do(*words[1:])
    assert told.strip()
    for at, word in enumerate(words):
        name, is_set, _ = word.partition("=")
        if is_set:
            without = (*words[1:at], f"{name}=", *words[at + 1 :])
            assert what_make_would_do(*without) != told, f"{name} is not used"


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    "line",
    [
        *("hier-kv stats --no-such-flag", "hier-kv no-such-command", "hier-kv prune"),
        *("make no-such-target", "make serve NO_SUCH=1", "--hier-kv-no-such 1"),
        *(
            "python -m bench no-such-case",
            "python -m bench.no_such",
            "python -m bench.policies --x",
        ),
        f"python -m {_SERVER} --enable-hier-kv --no-such-flag",
        f"python -m {_SERVER} --enable-hier-kv --hier-kv-host-size",
    ],
)
def test_what_no_program_takes_is_found(line: str) -> None:
    assert not is_taken(words_of(line))


def test_the_documents_show_commands_of_each_kind() -> None:
    found = ours()
    assert len({command.words for command in found}) > 80
    assert {command.words[0] for command in found} >= {"hier-kv", "python", "make", _SERVER}
    assert any(command.words[0].startswith("--hier-kv-") for command in found)
