"""Published request traces: reading them, and stretching them to a load.

A line is one request as a JSON object: `timestamp` (ms from the start), `input_length` and
`output_length` (tokens), `hash_ids`: one id per 512 tokens of the prompt (or another block), where
an equal id means an equal block behind an equal prefix. A name that ends in `.xz` is read through
lzma.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512
_MOST, _MOST_ID = 10**15, 1 << 48  # a block is cut into pages with numbers of their own
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A trace cannot be read; the text says where and why."""


@dataclass(frozen=True)
class Line:
    """One request of a trace.

    Attributes:
        arrival_s: seconds from the start of the trace.
        hash_ids: a non-negative id per block of tokens; the last may be partial.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: NDArray[np.int64]


def read_trace(
    path: Path, *, limit: int | None = None, block_tokens: int = BLOCK_TOKENS
) -> list[Line]:
    """Reads the first `limit` requests, all by default, of a trace with blocks of so many tokens.

    Raises:
        TraceError: no such file, or a line that is not as the module's head tells.
    """
    lines: list[Line] = []
    parents: dict[int, int] = {}
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            for number, text in enumerate(file, start=1):
                if limit is not None and len(lines) >= limit:
                    break
                if text.strip():
                    where = f"{path}, line {number}"
                    lines.append(_parse(text, where))
                    _check(lines, parents, where, block_tokens)
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        text = f"the trace {path} cannot be read ({why}); give a file with one request a line"
        raise TraceError(text) from error
    if not lines:
        raise TraceError(f"the trace {path} holds no request; give a file with one request a line")
    return lines


def _parse(text: str, where: str) -> Line:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: expected a JSON object, came {text[:40]!r}; {error}") from error
    if not isinstance(value, dict) or (missing := [name for name in _FIELDS if name not in value]):
        names = ", ".join(_FIELDS)
        what = f"no {', '.join(missing)}" if isinstance(value, dict) else text.strip()[:40]
        raise TraceError(f"{where}: expected a JSON object with {names}; came {what}")
    numbers = [value[name] for name in _FIELDS[:3]]
    ids = value["hash_ids"]
    if not all(_is_number(number) and 0 <= number <= _MOST for number in numbers):
        raise TraceError(
            f"{where}: timestamp and lengths must be numbers from 0 to 10^15; came "
            f"{str(numbers)[:80]}"
        )
    if not isinstance(ids, list) or not all(
        type(each) is int and 0 <= each <= _MOST_ID for each in ids
    ):
        raise TraceError(
            f"{where}: hash_ids must be a list of integers from 0 to 2^48; came {str(ids)[:40]}"
        )
    timestamp_ms, input_tokens, output_tokens = numbers
    return Line(timestamp_ms / 1000, int(input_tokens), int(output_tokens), np.array(ids, np.int64))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(lines: Sequence[Line], parents: dict[int, int], where: str, block_tokens: int) -> None:
    """What the last line must fulfil beside the others."""
    line = lines[-1]
    blocks = -(-line.input_tokens // block_tokens)
    if line.input_tokens == 0 or len(line.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {line.input_tokens} tokens of input must have one hash id per "
            f"{block_tokens} tokens, that is {blocks} and at least one; came {len(line.hash_ids)}"
        )
    if len(lines) > 1 and line.arrival_s < lines[-2].arrival_s:
        raise TraceError(f"{where}: timestamps must not decrease; sort the file by timestamp")
    parent = -1
    for each in line.hash_ids.tolist():
        if parents.setdefault(each, parent) != parent:
            raise TraceError(
                f"{where}: hash id {each} stands behind two different prefixes; equal ids must "
                "mean equal prefixes"
            )
        parent = each
