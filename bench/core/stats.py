"""Medians and their bootstrap confidence intervals, the same on every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_RESAMPLES = 4_000
_SEED = 12


def median(values: Sequence[float]) -> float:
    """The median; an error for no values."""
    return float(np.median(np.asarray(values, np.float64)))


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, interpolated."""
    return float(np.percentile(np.asarray(values, np.float64), percent))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    sample = np.asarray(values, np.float64)
    picks = np.random.default_rng(_SEED).integers(0, len(sample), (_RESAMPLES, len(sample)))
    medians = np.median(sample[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def summary(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, 95 % interval and number of values, rounded for a report."""
    low, high = median_interval(values)
    return {
        "median": round(median(values), digits),
        "ci95": [round(low, digits), round(high, digits)],
        "n": len(values),
    }


def verdict(value: float, interval: tuple[float, float], target: float, *, at_most: bool) -> str:
    """What a median and its interval say; an interval around the target decides nothing."""
    low, high = interval
    if low <= target <= high:
        return "inconclusive"
    return "ok" if (value <= target) == at_most else "missed"
