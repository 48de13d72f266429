"""How commands say things: without what a terminal obeys, whoever wrote it.

Labels, names of files, keys and what servers answer are others' words. A character that is not
printable (ESC, CR, the C1 controls, what turns the direction of text, half of a character that is
no UTF-8) is a question mark here. All that commands print goes through this module.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO


def printable(text: str) -> str:
    """A text on one line, of characters that are shown and do nothing else."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def say(*lines: str, ahead: str = "") -> None:
    """Prints lines to the output.

    Args:
        lines: one each; an end of a line inside of one is none.
        ahead: control characters of our own, for a terminal.
    """
    _write(sys.stdout, ahead, lines)


def say_json(facts: Any, indent: int | None = 1) -> None:
    """Prints JSON, which is ASCII with everything else escaped."""
    say(*json.dumps(facts, indent=indent).splitlines())


def tell(*lines: str) -> None:
    """Prints lines to the error stream."""
    _write(sys.stderr, "", lines)


def complain(text: str) -> None:
    """Says on the error stream, in one line, what a command could not do."""
    tell(f"hier-kv: {' '.join(text.splitlines())}")


def _write(stream: TextIO, ahead: str, lines: tuple[str, ...]) -> None:
    encoding = stream.encoding or "utf-8"  # of a terminal that may know few characters
    text = "\n".join(map(printable, lines)).encode(encoding, "replace").decode(encoding)
    print(ahead + text, file=stream, flush=True)
