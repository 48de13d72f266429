"""How far a long command is: a bar on a terminal, lines elsewhere; on the error stream."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from sglang_ext.cli.printing import printable
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
        self._stream = _Stream()
        self._is_silent = not (has_lines or self._stream.is_terminal)

    def __call__(self, num_bytes: int) -> None:
        """Counts bytes."""
        self._done += num_bytes
        self._tell()

    def skip(self, num_bytes: int) -> None:
        """Takes bytes out of the total: there is nothing to be done to them."""
        self._total = max(1, self._total - num_bytes)
        self._tell()

    def _tell(self) -> None:
        step = self._done * self._stream.num_steps // self._total
        if self._done and step > self._shown and not self._is_silent:
            self._shown = step
            self._show()

    def end(self) -> None:
        """Takes the bar away."""
        if self._shown:
            self._stream.take_away()

    def _show(self) -> None:
        share = min(1.0, self._done / self._total)
        text = f"{self._verb} {amount(self._done)} of {amount(self._total)} ({share:.0%})"
        self._stream.show(share, text)


class Sizes:
    """Says how far a simulation of sizes is, at its beginning, too, and how long it may take.

    Args:
        num: of sizes.
    """

    def __init__(self, num: int) -> None:
        self._what = f"simulated {{:.0%}} of {num} {'size' if num == 1 else 'sizes'}"
        self._begin: tuple[float, float] | None = None  # time and share, once loops are compiled
        self._shown = 0
        self._stream = _Stream()

    def __call__(self, share: float) -> None:
        """So much is done, of 1."""
        if self._begin is None and share > 0:
            self._begin = (time.monotonic(), share)
        step = int(share * self._stream.num_steps)
        if self._begin is not None and step > self._shown:
            self._shown = step
            begin_s, begin = self._begin
            text = self._what.format(share)
            if share > begin:  # the first share is where the measure begins
                left_s = (time.monotonic() - begin_s) / (share - begin) * (1 - share)
                text += f", about {left_s:,.0f} s left"
            self._stream.show(share, text)

    def found(self, text: str) -> None:
        """One size is known: a line that stays, above the bar."""
        self._stream.say(text)

    def __enter__(self) -> Self:
        text = self._what.format(0) + " (a first run compiles loops: about a minute)"
        self._stream.show(0.0, text)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.take_away()


class _Stream:
    """The error stream, asked once whether it is a terminal."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.num_steps = 100 if self.is_terminal else _LINES

    def show(self, share: float, text: str) -> None:
        if self.is_terminal:
            bar = "#" * round(share * _WIDTH)
            text = f"\r[{bar:{_WIDTH}}] {printable(text)}\x1b[K"
        self._write(text, end="" if self.is_terminal else "\n")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.take_away()
        self._write(printable(text), end="\n")

    def take_away(self) -> None:
        """Removes the bar; lines stay."""
        if self.is_terminal:
            self._write("\r\x1b[K", end="")

    def _write(self, text: str, end: str) -> None:
        print(text, end=end, file=sys.stderr, flush=True)  # noqa: T201
