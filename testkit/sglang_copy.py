"""A copy of what the plugin uses of SGLang's source, to break it in: nothing of it is imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sglang_ext.seam.contract.symbols import SYMBOLS, Symbol, Use
from sglang_ext.seam.contract.verdict import installed

_FUNCTIONS = [symbol for symbol in SYMBOLS if symbol.use is not Use.NAMED]
TWENTY = _FUNCTIONS[:: len(_FUNCTIONS) // 20][:20]
"""Names to break in turn, of all uses."""


class SglangCopy:
    """The files that the contract names, under a folder.

    Args:
        folder: where to put them.
        version: that the copy says it is; the installed one if empty.
    """

    def __init__(self, folder: Path, version: str = "") -> None:
        source = installed()
        self.folder = folder / "sglang"
        for path in {symbol.path for symbol in SYMBOLS}:
            content = source.read(path)
            assert content is not None, path
            self._write(path, content.decode())
        self._write("_version.py", f"__version__ = version = '{version or source.version}'\n")

    def rename(self, symbol: Symbol) -> None:
        """A function or class has another name."""
        self._edit_first_line(symbol, r"\b(def|class) \w+", r"\1 renamed")

    def add_parameter(self, symbol: Symbol) -> None:
        """A function takes one parameter more."""
        lines, node = self._definition(symbol)
        first = node.args.args[0]
        line, column = first.lineno - 1, first.col_offset
        lines[line] = f"{lines[line][:column]}hurry, {lines[line][column:]}"
        self._write(symbol.path, "\n".join(lines))

    def add_comments(self, symbol: Symbol) -> None:
        """The file says the same in other words."""
        lines, node = self._definition(symbol)
        lines.insert(node.body[-1].lineno - 1, "        # So it is.\n")
        self._write(symbol.path, "\n".join(["# A word before.", *lines]))

    def add_statement(self, symbol: Symbol) -> None:
        """A function does one thing more."""
        lines, node = self._definition(symbol)
        last = node.body[-1]
        lines.insert(last.lineno - 1, f"{' ' * last.col_offset}print()")
        self._write(symbol.path, "\n".join(lines))

    def _edit_first_line(self, symbol: Symbol, pattern: str, new: str) -> None:
        lines, node = self._definition(symbol)
        lines[node.lineno - 1], count = re.subn(pattern, new, lines[node.lineno - 1], count=1)
        assert count == 1, lines[node.lineno - 1]
        self._write(symbol.path, "\n".join(lines))

    def _definition(self, symbol: Symbol) -> tuple[list[str], ast.FunctionDef]:
        text = (self.folder / symbol.path).read_text()
        node: ast.AST = ast.parse(text)
        for part in symbol.name.split("."):
            node = next(one for one in ast.walk(node) if getattr(one, "name", "") == part)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        return text.splitlines(), node  # type: ignore[return-value]

    def _write(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
