"""Text for people: aligned tables, and progress on one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TextIO

_PLAIN_INTERVAL_S = 5.0
_LINE_CHARS = 100


@dataclass
class Table:
    """Rows under a title; numbers are aligned to the right.

    Attributes:
        title: one line.
        columns: head of each column.
        rows: cells as text or numbers; floats are printed with three digits that count.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)

    def render(self) -> str:
        """The table as text, without a final newline."""
        cells = [[_cell(value) for value in row] for row in self.rows]
        numeric = [
            any(isinstance(row[at], (int, float)) for row in self.rows)
            for at in range(len(self.columns))
        ]
        widths = [
            max(len(str(head)), *(len(row[at]) for row in cells)) if cells else len(str(head))
            for at, head in enumerate(self.columns)
        ]
        lines = [self.title, _line([str(head) for head in self.columns], widths, numeric)]
        lines.append("  ".join("-" * width for width in widths))
        lines += [_line(row, widths, numeric) for row in cells]
        return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(aligned).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format_number(value)
    return str(value)


def format_number(value: float) -> str:
    """A number with three digits that count, and never in exponents."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


class Progress:
    """Says how far long work is: one line that changes on a terminal, a line now and then else.

    Used from one thread.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._started_s = time.monotonic()
        self._last_s = float("-inf")
        self._stage = ""
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done()

    def stage(self, text: str) -> None:
        """Names what is done now; shown at once."""
        self._stage = text
        self._show(text, force=True)

    def update(self, text: str) -> None:
        """Says how far the present stage is."""
        self._show(f"{self._stage}: {text}" if self._stage else text, force=False)

    def done(self) -> None:
        """Clears the line."""
        if self._on_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _show(self, text: str, *, force: bool) -> None:
        now_s = time.monotonic()
        if not (force or self._on_terminal) and now_s - self._last_s < _PLAIN_INTERVAL_S:
            return
        self._last_s = now_s
        line = f"[{now_s - self._started_s:5.0f} s] {text}"[:_LINE_CHARS]
        if self._on_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
