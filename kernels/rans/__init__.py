"""rANS: entropy coding of small symbols with static tables, in one bitstream for CPU and GPU.

Symbols lie in tiles `[N, T, 32]`; 32 lanes with a state each share one stream of 16-bit words, so
that one AVX-512 register pair or one warp decodes them in step. The derivation and the measured
speed are in README.md; `naive.py` is the plain statement of it.
"""

from __future__ import annotations

from .api import (
    Coded,
    Engine,
    decode,
    encode,
    num_groups,
    tiles_per_group_for,
    warm_up,
)
from .tables import LANES, PROB_SUM, RansError, Tables

__all__ = [
    "LANES",
    "PROB_SUM",
    "Coded",
    "Engine",
    "RansError",
    "Tables",
    "decode",
    "encode",
    "num_groups",
    "tiles_per_group_for",
    "warm_up",
]
