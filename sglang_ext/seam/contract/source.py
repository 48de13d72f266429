"""Reads names out of SGLang's source, from a folder or a wheel, without importing any of it."""

from __future__ import annotations

import ast
import hashlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PACKAGE = "sglang"
_NAMED = 3  # parameters of each kind


class ContractError(ValueError):
    """There is no SGLang to look at."""


class Shape(NamedTuple):
    """What a name is, as far as the contract goes; the same on all versions of Python.

    Attributes:
        signature: parameters without their types, and what it is; empty unless it is a function.
        body: digest of its lines, without comments and docstring; empty unless it is a function.
    """

    signature: str
    body: str

    def against(self, expected: Shape) -> str:
        """What of its signature is not as expected, in a few words: it may have 60 parameters."""
        if not self.signature:
            return "is not a function"
        (kind, given), (known_kind, known) = map(_parameters, (self.signature, expected.signature))
        names, known_names = ({one.strip("*="): None for one in each} for each in (given, known))
        groups = {
            "missing": [name for name in known_names if name and name not in names],
            "new": [name for name in names if name and name not in known_names],
        }
        found = [f"{what}: {at_most(group, _NAMED)}" for what, group in groups.items() if group]
        if kind != known_kind:
            found.append(f"{kind or 'plain'} instead of {known_kind or 'plain'}")
        if not found:
            moved = [one for one, other in zip_longest(given, known) if one and one != other]
            found.append(f"in another place or with another default: {at_most(moved, _NAMED)}")
        return f"takes other parameters ({'; '.join(found)})"


class SGLangSource:
    """The files of one SGLang release.

    Args:
        place: the package's folder, a folder that holds it, or a wheel.

    Raises:
        ContractError: there is none.
    """

    def __init__(self, place: Path) -> None:
        self._wheel: zipfile.ZipFile | None = None
        self._folder = place
        self._modules: dict[str, ast.Module | None] = {}
        self._attributes: dict[ast.ClassDef, set[str]] = {}
        if not place.exists():
            raise ContractError(
                f"a folder or wheel of SGLang was expected at {place}, found nothing; download one "
                "(pip download --no-deps sglang==VERSION), or give another path."
            )
        if place.is_file():
            if not zipfile.is_zipfile(place):
                raise ContractError(
                    f"a folder or wheel of SGLang was expected at {place}, found another file; "
                    "download it again, or give another path."
                )
            self._wheel = zipfile.ZipFile(place)
        elif not (place / "srt").is_dir():
            self._folder = place / _PACKAGE
        self.version = self._find_version()

    def read(self, path: str) -> bytes | None:
        """A file of the package; None when there is none."""
        try:
            if self._wheel is not None:
                return self._wheel.read(f"{_PACKAGE}/{path}")
            return (self._folder / path).read_bytes()
        except (KeyError, OSError):
            return None

    def digest(self, path: str) -> str:
        """Of a file; empty when there is none."""
        content = self.read(path)
        return "" if content is None else hashlib.sha256(content).hexdigest()

    def shape(self, path: str, name: str) -> Shape | None:
        """What a name in a file is; None when it is not there."""
        module = self._module(path)
        if module is None:
            return None
        node: ast.AST = module
        *holders, last = name.split(".")
        for holder in holders:
            found = _find(_statements(node), holder)
            if not isinstance(found, ast.ClassDef):
                return None
            node = found
        found = _find(_statements(node), last)
        if found is None and isinstance(node, ast.ClassDef) and last in self._assigned(node):
            return Shape("", "")
        if isinstance(found, _Function):
            content = self.read(path) or b""
            return Shape(_signature(found), _body_digest(found, content.decode("utf-8", "replace")))
        return None if found is None else Shape("", "")

    def _module(self, path: str) -> ast.Module | None:
        if path not in self._modules:
            content = self.read(path)
            try:
                self._modules[path] = None if content is None else ast.parse(content)
            except (SyntaxError, ValueError):  # written for a newer Python, or not Python
                self._modules[path] = None
        return self._modules[path]

    def _assigned(self, holder: ast.ClassDef) -> set[str]:
        if holder not in self._attributes:
            self._attributes[holder] = _assigned_attributes(holder)
        return self._attributes[holder]

    def _find_version(self) -> str:
        content = self.read("_version.py") or b""
        found = re.search(rb"^__version__ = version = ['\"]([^'\"]+)", content, re.MULTILINE)
        if self.read("srt/server_args.py") is None:
            raise ContractError(
                f"an SGLang package with its source was expected at {self._folder}, found none; "
                "install SGLang from its wheel, unpacked and not compiled alone, or name the "
                "folder `sglang`, one that holds it, or a wheel."
            )
        return found[1].decode() if found else "unknown"


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under its conditions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            if isinstance(child, ast.If | ast.Try | ast.With):
                yield from _statements(child)
        elif isinstance(child, ast.ExceptHandler):
            yield from _statements(child)


def _find(statements: Iterable[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement that defines a name; a function or class wins over later assignments."""
    found = None
    for statement in statements:
        if isinstance(statement, _Function | ast.ClassDef):
            # Even behind `Name = make("Name", Name)` the name stands for its class.
            matches, weak = statement.name == name, False
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in statement.names]
            matches, weak = name in names, True
        else:
            matches, weak = name in _targets(statement), True
        if matches and not (weak and isinstance(found, _Function | ast.ClassDef)):
            found = statement
    return found


def _targets(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _assigned_attributes(holder: ast.ClassDef) -> set[str]:
    """Attributes that a class's methods assign to `self`."""
    return {
        node.attr
        for node in ast.walk(holder)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def at_most(words: Sequence[str], number: int) -> str:
    """So many of them, and how many more there are."""
    shown, more = ", ".join(words[:number]), len(words) - number
    return f"{shown} and {more} more" if more > 0 else shown


def _parameters(signature: str) -> tuple[str, list[str]]:
    """What a function is, and its parameters."""
    kind, _, inner = signature.partition("(")
    return kind.strip(), inner.removesuffix(")").split(", ")


def _signature(function: _Function) -> str:
    given, parts = function.args, list[str]()
    plain = [*given.posonlyargs, *given.args]
    defaults = len(plain) - len(given.defaults)
    for place, parameter in enumerate(plain):
        parts.append(parameter.arg + ("=" if place >= defaults else ""))
        if given.posonlyargs and place == len(given.posonlyargs) - 1:
            parts.append("/")
    if given.vararg is not None:
        parts.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        parts.append("*")
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(parameter.arg + ("=" if default is not None else ""))
    if given.kwarg is not None:
        parts.append(f"**{given.kwarg.arg}")
    kinds = [
        one.id
        for one in function.decorator_list
        if isinstance(one, ast.Name) and one.id in ("staticmethod", "classmethod", "property")
    ]
    kinds += ["async"] if isinstance(function, ast.AsyncFunctionDef) else []
    return " ".join([*kinds, f"({', '.join(parts)})"])


def _body_digest(function: _Function, text: str) -> str:
    body = function.body
    has_docstring = (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )
    first = body[1:] if has_docstring else body
    lines = text.splitlines()[first[0].lineno - 1 : function.end_lineno] if first else []
    stripped = [line.strip() for line in lines]
    kept = [line for line in stripped if line and not line.startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
