"""An exact integer transform and quantiser for KV-cache planes, and its symbols.

Bits become integers on a grid per channel, the integers are transformed by an integer matrix per
block, and the coefficients are rounded to steps.  Everything between the bits and the coefficients,
and back, is defined to the last bit, so that engines may compute it as they like.  See README.md.

All functions are pure and may run on several threads.
"""

from __future__ import annotations

from .api import ENGINES, Engine, check_raw, dequantise, no_raw_rows, quantise, warm_up
from .spec import (
    LANES,
    WORDS,
    KvQuantError,
    Layout,
    Quantised,
    RawRows,
    TransformArrays,
    Words,
)
from .symbols import (
    Escapes,
    Layers,
    Symbols,
    base_symbols,
    base_tiles,
    contexts,
    refine,
    refinement,
    split,
    spread,
)

__all__ = [
    "ENGINES",
    "LANES",
    "WORDS",
    "Engine",
    "Escapes",
    "KvQuantError",
    "Layers",
    "Layout",
    "Quantised",
    "RawRows",
    "Symbols",
    "TransformArrays",
    "Words",
    "base_symbols",
    "base_tiles",
    "check_raw",
    "contexts",
    "dequantise",
    "no_raw_rows",
    "quantise",
    "refine",
    "refinement",
    "split",
    "spread",
    "warm_up",
]
