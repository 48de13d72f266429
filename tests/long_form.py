"""Short and long forms of tests: one switch, ``HIER_KV_LONG``, for what the default run leaves out.

``pytest --long``, ``make test LONG=1`` and ``make soak`` set it. Then all tests run with all their
cases; a default run leaves out those with the mark ``long``, and of a test with the mark
``sampled("a", "b*")`` all cases but those whose id is among these patterns. What counts rounds,
seeds or cases takes more of them; ``HIER_KV_LONG=10`` is for ten times as many.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

# 0: a default run. Else how often the numbers of the long forms are taken.
FACTOR = int(os.environ.get("HIER_KV_LONG") or "0")


def count(default: int, long: int) -> int:
    """How many rounds, seeds or cases: `FACTOR` times `long` in the long forms."""
    return FACTOR * long if FACTOR else default


def either(default: T, long: T) -> T:
    """What a default run takes, or the long forms."""
    return long if FACTOR else default
