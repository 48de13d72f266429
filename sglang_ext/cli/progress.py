"""How far a long command is: a bar on a terminal, lines elsewhere; on the error stream."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from sglang_ext.cli.server_stats import amount

_WIDTH = 30
_LINES = 10  # at most, where it is no terminal


class Progress:
    """Counts bytes towards a total."""

    def __init__(self, verb: str, total: int, *, has_lines: bool = True) -> None:
        """Shows nothing yet.

        Args:
            verb: what was done to the bytes.
            total: of them.
            has_lines: whether to write lines where there is no terminal.
        """
        self._verb = verb
        self._total = max(1, total)
        self._done = 0
        self._shown = 0
        self._is_terminal = sys.stderr.isatty()
        self._is_silent = not (has_lines or self._is_terminal)

    def __call__(self, num_bytes: int) -> None:
        """Counts bytes."""
        self._done += num_bytes
        steps = 100 if self._is_terminal else _LINES
        step = self._done * steps // self._total
        if step > self._shown and not self._is_silent:
            self._shown = step
            self._show()

    def end(self) -> None:
        """Takes the bar away."""
        if self._is_terminal and self._shown:
            _take_away()

    def _show(self) -> None:
        share = min(1.0, self._done / self._total)
        _print(share, f"{self._verb} {amount(self._done)} of {amount(self._total)} ({share:.0%})")


class Sizes:
    """Says how far a simulation of sizes is, at its beginning, too, and how long it may take.

    Args:
        num: of sizes.
    """

    def __init__(self, num: int) -> None:
        self._what = f"simulated {{:.0%}} of {num} {'size' if num == 1 else 'sizes'}"
        self._begin: tuple[float, float] | None = None  # time and share, once loops are compiled
        self._shown = 0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, share: float) -> None:
        """So much is done, of 1."""
        if self._begin is None and share > 0:
            self._begin = (time.monotonic(), share)
        step = int(share * (100 if self._is_terminal else _LINES))
        if self._begin is not None and step > self._shown:
            self._shown = step
            begin_s, begin = self._begin
            each_s = (time.monotonic() - begin_s) / max(share - begin, 1e-9)
            _print(share, f"{self._what.format(share)}, about {each_s * (1 - share):,.0f} s left")

    def __enter__(self) -> Self:
        _print(0.0, self._what.format(0) + " (a first run compiles loops: about a minute)")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            _take_away()


def _print(share: float, text: str) -> None:
    if sys.stderr.isatty():
        bar = "#" * round(share * _WIDTH)
        print(f"\r[{bar:{_WIDTH}}] {text}\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def _take_away() -> None:
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201
