"""The rooms of the tree: imports go down, and only one room names SGLang.

`ROOMS` is the picture of docs/architecture.md as a list, from the top down: a module may import
from rooms below its own, and from its own. What is imported for type checking counts, and so does
what is imported inside a function: both tie the two rooms together for whoever changes one.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Longer prefixes win. `kernels` and `tiers` are reached through links in `sglang_ext`.
ROOMS = (
    "bench",
    "testkit",
    "runtime_cpu",
    "sglang_ext.plugin",
    "sglang_ext.cli",
    "sglang_ext.simulator",
    "sglang_ext.assembly",
    "sglang_ext.seam",
    "sglang_ext.hints",
    "sglang_ext.truncation",
    "sglang_ext.provenance",
    "sglang_ext.identity",
    "sglang_ext.ranks",
    "sglang_ext.admission",
    "sglang_ext.settings",
    "sglang_ext.coded_remote",
    "sglang_ext.streaming",
    "sglang_ext.codec",
    "sglang_ext.device",
    "sglang_ext.errors",
    "sglang_ext.kernels",
    "sglang_ext.tiers.store",
    "sglang_ext.tiers.coded_host",
    "sglang_ext.tiers.protection",
    "sglang_ext.tiers.remote",
    "sglang_ext.tiers.disk",
    "sglang_ext.tiers.policy",
    "sglang_ext.tiers",  # what tiers share: their interface, the arena, the index
    "sglang_ext.tiers.records",
    "sglang_ext.tiers.access",
    "sglang_ext.tiers.compiled",
    "sglang_ext.tiers.anonymous_memory",
    "sglang_ext.tiers.errors",
    "sglang_ext.child_processes",
    "sglang_ext.compiling",
    "sglang_ext.registry",
)

# Its bare name is that of a package to install.
_SGLANGS = re.compile(r"sglang(?:\.\w+)+\Z")

MAX_FILES = 16
MAX_METHODS = 20


def _modules() -> dict[str, Path]:
    found = {}
    for top in ("bench", "testkit", "runtime_cpu", "sglang_ext", "tiers", "kernels"):
        for folder, _, files in os.walk(ROOT / top):
            for file in files:
                path = Path(folder, file)
                if path.suffix == ".py" and "stubs" not in path.parts:
                    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    name = f"sglang_ext.{name}" if top in ("tiers", "kernels") else name
                    found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imported(name: str, path: Path) -> Iterator[str]:
    """Names of what a module imports, as far as they are modules: the longest ones."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


@cache
def _imports() -> dict[str, list[str]]:
    """What each module imports; not at import, as every worker of a run collects all tests."""
    return {
        name: sorted({each for each in _imported(name, path) if each != name})
        for name, path in MODULES.items()
    }


def _room(module: str) -> int:
    fits = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    assert fits, f"{module} is in no room"
    return ROOMS.index(max(fits, key=len))


def test_the_picture_in_the_docs_has_this_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text[text.index("    bench/") : text.index("| to change | open |")]
    named, top = [], ""
    for line in picture.splitlines():
        if not line.strip():
            continue
        name = line.split()[0].removesuffix("/").removesuffix(".py")
        if line.startswith("      "):
            named.append(f"{top}.{name}")
        else:
            top = name if name in ("bench", "testkit", "runtime_cpu") else f"sglang_ext.{name}"
            top = "sglang_ext" if name == "sglang_ext" else top
            named.append(top)
    # `tiers` and `sglang_ext` head a part of the picture; a file of tiers' own stands for tiers.
    rooms = [name.replace(".tiers.host", ".tiers") for name in named]
    rooms = [name for at, name in enumerate(rooms) if name in ROOMS and name not in rooms[:at]]
    rooms.remove("sglang_ext.tiers")
    expected = [room for room in ROOMS if room in rooms]
    assert rooms == expected
    assert len(rooms) >= len(ROOMS) - 5


def test_every_room_is_there() -> None:
    inhabited = {
        _room(name) for name in MODULES if name not in ("sglang_ext", "sglang_ext._version")
    }
    assert [ROOMS[each] for each in range(len(ROOMS)) if each not in inhabited] == []


def test_imports_go_down() -> None:
    upward = {
        (name, other)
        for name, others in _imports().items()
        for other in others
        if other in MODULES and other != "sglang_ext" and name != "sglang_ext"
        if _room(other) < _room(name)
    }
    assert upward == set(), "a lower room imports a higher one"


def test_no_circle_of_modules() -> None:
    state: dict[str, bool] = {}  # False: on the way, True: done
    circles: list[list[str]] = []

    def visit(name: str, trail: list[str]) -> None:
        state[name] = False
        for other in _imports()[name]:
            if other not in MODULES:
                continue
            if name.startswith(f"{other}.") and _is_package(other):
                continue
            if state.get(other) is False:
                circles.append([*trail[trail.index(other) :], other])
            elif other not in state:
                visit(other, [*trail, other])
        state[name] = True

    for name in MODULES:
        if name not in state:
            visit(name, [name])
    assert circles == []


def _is_package(name: str) -> bool:
    return MODULES[name].name == "__init__.py"


def _names_sglang(path: Path) -> bool:
    """Whether a file imports SGLang, or has the dotted name of something in it in a text."""
    return any(
        _SGLANGS.match(name)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _names_in(node)
    )


def _names_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Constant(value=str(text)):
            yield text


def test_only_the_seam_names_sglang() -> None:
    ours = {name: path for name, path in MODULES.items() if name.startswith("sglang_ext.")}
    naming = {name for name, path in ours.items() if _names_sglang(path)}
    assert {name for name in naming if not name.startswith("sglang_ext.seam.")} == set()
    # It sees both: a text that is hooked, and an import.
    assert {"sglang_ext.seam.start.front", "sglang_ext.seam.start.ranks"} <= naming


def test_the_product_needs_no_test_tools() -> None:
    outside = ("bench", "testkit", "tests", "runtime_cpu")
    assert [
        (name, other)
        for name, others in _imports().items()
        if name.startswith("sglang_ext")
        for other in others
        if other.partition(".")[0] in outside
    ] == []


@pytest.mark.parametrize(
    "top", ["bench", "testkit", "runtime_cpu", "sglang_ext", "tiers", "kernels", "tests"]
)
def test_no_folder_is_flat(top: str) -> None:
    """A newcomer reads a folder's names at once."""
    files = Counter(
        str(Path(folder).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if name.endswith(".py")
    )
    assert {folder: num for folder, num in files.items() if num > MAX_FILES} == {}


def test_no_class_has_many_methods_without_a_reason() -> None:
    """A class is one subject; where that takes more methods, its docstring says why."""
    unexplained = [
        f"{name}.{node.name}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        if len(_methods(node)) > MAX_METHODS
        if "many methods because" not in (ast.get_docstring(node) or "").replace("\n", " ")
    ]
    assert unexplained == []


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def test_a_package_says_what_it_is() -> None:
    silent = [
        name
        for name, path in MODULES.items()
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
