"""How far a long command is: a bar on a terminal, lines elsewhere; on the error stream."""

from __future__ import annotations

import sys

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
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201

    def _show(self) -> None:
        share = min(1.0, self._done / self._total)
        text = f"{self._verb} {amount(self._done)} of {amount(self._total)} ({share:.0%})"
        if self._is_terminal:
            bar = "#" * round(share * _WIDTH)
            print(f"\r[{bar:{_WIDTH}}] {text}\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201
        else:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
