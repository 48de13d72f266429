"""Growth over rounds, told from noise: robust against the one round that was unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median


def slope(values: Sequence[float]) -> float:
    """Theil and Sen's: the median slope of all pairs, in units a round; 0.0 for fewer than two."""
    pairs = combinations(enumerate(values), 2)
    slopes = [(later - earlier) / (j - i) for (i, earlier), (j, later) in pairs]
    return median(slopes) if slopes else 0.0


def growth(values: Sequence[float]) -> float:
    """The last quarter's median over the first quarter's; 0.0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    part = max(1, len(values) // 4)
    return median(values[-part:]) - median(values[:part])
