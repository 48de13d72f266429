"""Few entropy tables for many coefficients: histograms of symbols, clustered by what they cost.

Every (coefficient, level) of a profile has its own distribution; tables are what a decoder must
keep in fast memory. Clustering (Lloyd's algorithm with the code length as distance) makes K tables
of them. Tables are integers in the profile, so no engine ever computes a probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

PROB_SUM = 4096
ALPHABET = 256
MAX_RADIUS = 126
NUM_COLUMNS = 2 * MAX_RADIUS + 2  # q from -126 to 126, then everything outside
# Bits an escape costs beside its symbol: u32 index and i16 value.
ESCAPE_BITS = 48.0
# Escapes rarer than this cost less than a table's wider radius.
_RARE = 2.0**-13
_ROUNDS = 12


@dataclass(frozen=True)
class Tables:
    """Clustered tables: freqs u16 [K, 256], radius u8 [K], class of each histogram u16 [M].

    ``bits`` is what all symbols of the histograms cost.
    """

    freqs: U16
    radius: npt.NDArray[np.uint8]
    classes: U16
    bits: float


def histograms(quotients: npt.NDArray[Any]) -> F64:
    """Histograms [n, 254] of the columns of q [T, n]; the last bin is |q| > 126."""
    num = quotients.shape[1]
    outside = np.abs(quotients) > MAX_RADIUS
    column = np.where(outside, NUM_COLUMNS - 1, quotients + MAX_RADIUS).astype(np.int64)
    flat = (column + np.arange(num) * NUM_COLUMNS).ravel()
    counts = np.bincount(flat, minlength=num * NUM_COLUMNS)
    return counts.reshape(num, NUM_COLUMNS).astype(np.float64)


def base_tables(counts: F64, num_tables: int) -> Tables:
    """At most ``num_tables`` tables for histograms [M, 254] of base symbols."""
    if not len(counts):
        return Tables(np.zeros((0, ALPHABET), np.uint16), _u8([]), _u16([]), 0.0)
    spread = counts[:, :-1] @ np.abs(np.arange(-MAX_RADIUS, MAX_RADIUS + 1.0)) + 200 * counts[:, -1]
    classes = _split_evenly(spread / counts.sum(1), num_tables)
    costs = np.zeros(0)
    for _ in range(_ROUNDS):
        pooled = _pool(counts, classes)
        freqs, radius = _fit_all(pooled)
        lengths = np.stack([_lengths(f, r) for f, r in zip(freqs, radius, strict=True)])
        matrix = counts @ lengths.T
        before, classes = classes, matrix.argmin(1)
        costs = matrix.min(1)
        if (classes == before).all():
            break
    used, classes = np.unique(classes, return_inverse=True)
    return Tables(freqs[used], radius[used], classes.astype(np.uint16), float(costs.sum()))


def refine_tables(counts: F64, num_triples: int) -> Tables:
    """Tables for histograms [M, 3 contexts, 3 symbols] of refinements.

    Each class is the first of three consecutive rows of ``freqs``; there is at least one.
    """
    if not len(counts):
        flat_rows = np.zeros((3, ALPHABET), np.uint16)
        flat_rows[:, :3] = integer_freqs([1, 1, 1])
        return Tables(flat_rows, _u8([1, 1, 1]), _u16([]), 0.0)
    total = counts.sum(2) + 1e-9
    # How peaked the zero context is, and how much weight it has, tell the sources apart.
    order = counts[:, 0, 1] / total[:, 0] + total[:, 0] / total.sum(1)
    classes = _split_evenly(order, num_triples)
    flat = counts.reshape(len(counts), 9)
    costs = np.zeros(0)
    for _ in range(_ROUNDS):
        pooled = _pool(flat, classes).reshape(-1, 3)
        freqs = np.stack([integer_freqs(row) for row in pooled + 0.5])
        lengths = -np.log2(freqs / PROB_SUM).reshape(-1, 9)
        matrix = flat @ lengths.T
        before, classes = classes, matrix.argmin(1)
        costs = matrix.min(1)
        if (classes == before).all():
            break
    used, classes = np.unique(classes, return_inverse=True)
    rows = np.zeros((3 * len(used), ALPHABET), np.uint16)
    rows[:, :3] = freqs.reshape(-1, 3, 3)[used].reshape(-1, 3)
    radius = np.ones(len(rows), np.uint8)
    return Tables(rows, radius, (3 * classes).astype(np.uint16), float(costs.sum()))


def integer_freqs(weights: npt.ArrayLike) -> U16:
    """Frequencies of at least 1, summing to 4096, under which these weights cost about least."""
    share = np.asarray(weights, np.float64)
    share = share / share.sum() * PROB_SUM
    freqs = np.maximum(np.floor(share), 1)
    while freqs.sum() > PROB_SUM:
        # Taking from the symbol that loses the fewest bits by it.
        loss = np.where(freqs > 1, share * np.log2(freqs / np.maximum(freqs - 1, 0.5)), np.inf)
        freqs[loss.argmin()] -= 1
    while freqs.sum() < PROB_SUM:
        freqs[(share * np.log2((freqs + 1) / freqs)).argmax()] += 1
    return np.asarray(freqs, np.uint16)


def _fit_all(pooled: F64) -> tuple[U16, npt.NDArray[np.uint8]]:
    fitted = [_fit(row) for row in pooled]
    return np.stack([freqs for freqs, _ in fitted]), _u8([radius for _, radius in fitted])


def _fit(counts: F64) -> tuple[U16, int]:
    """A table for one histogram: its radius leaves outside only what is rare."""
    total = counts.sum()
    tail = counts[-1]
    radius = MAX_RADIUS
    while radius > 1:
        outer = counts[MAX_RADIUS - radius] + counts[MAX_RADIUS + radius]
        if tail + outer > _RARE * total:
            break
        tail += outer
        radius -= 1
    inner = counts[MAX_RADIUS - radius : MAX_RADIUS + radius + 1]
    # Neighbours share counts where they are few, so that a table holds for other text too.
    smooth = np.convolve(np.pad(inner, 1, mode="edge"), [0.25, 0.5, 0.25], "valid")
    weight = inner / (inner + 20.0)
    weights = np.append(weight * inner + (1 - weight) * smooth, tail)
    row = np.zeros(ALPHABET, np.uint16)
    row[: 2 * radius + 2] = integer_freqs(weights + 1e-6 * total + 1e-9)
    return row, radius


def _lengths(freqs: U16, radius: int) -> F64:
    """Bits [254] of each bin of a histogram under a table."""
    bits = -np.log2(np.maximum(freqs, 1) / PROB_SUM)
    lengths = np.full(NUM_COLUMNS, bits[2 * radius + 1] + ESCAPE_BITS)
    lengths[MAX_RADIUS - radius : MAX_RADIUS + radius + 1] = bits[: 2 * radius + 1]
    return lengths


def _split_evenly(key: F64, num: int) -> npt.NDArray[np.int64]:
    """Classes by logarithm of a key, evenly between its extremes; the start of clustering."""
    logs = np.log(np.maximum(key, 1e-5))
    span = max(float(logs.max() - logs.min()), 1e-9)
    return np.minimum(np.asarray((logs - logs.min()) / span * num, np.int64), num - 1)


def _pool(counts: F64, classes: npt.NDArray[Any]) -> F64:
    """Sum of the histograms of each class that has any."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    return np.add.reduceat(counts[order], starts, axis=0)


def _u8(values: list[int]) -> npt.NDArray[np.uint8]:
    return np.array(values, np.uint8)


def _u16(values: list[int]) -> U16:
    return np.array(values, np.uint16)
