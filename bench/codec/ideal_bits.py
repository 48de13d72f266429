"""What no entropy coder can go below: the information of symbols under their tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_ext.codec.calibration.design import Transform, coefficients
from sglang_ext.kernels.rans.tables import Tables

_U8 = NDArray[np.uint8]


def arithmetic_bits(
    symbols: _U8, cdfs: NDArray[np.uint32], tables: NDArray[np.int32], rules: _U8 | None = None
) -> float:
    """Bits of symbols under the tables of `kernels.ac`; arguments as `ac.encode`'s."""
    rules = np.zeros(symbols.shape[1], np.uint8) if rules is None else rules
    bits = 16.0 - np.log2(np.maximum(np.diff(cdfs.astype(np.int64), axis=1), 2.0**-40))
    return float(sum(bits[tables[n][rules], row].sum() for n, row in enumerate(symbols)))


def rans_bits(
    symbols: _U8, classes: NDArray[np.uint16], tables: Tables, context: _U8 | None = None
) -> float:
    """Bits of symbols under tables of `kernels.rans`; arguments as `rans.encode`'s.

    Infinite if a symbol has frequency 0 in its table.
    """
    with np.errstate(divide="ignore"):
        bits = 12 - np.log2(tables.freqs.astype(np.float64))
    total = 0.0
    for tile in range(symbols.shape[0]):  # one at a time: indices are eight times the symbols
        rows = classes[tile].astype(np.int64)
        total += float(bits[rows if context is None else rows + context[tile], symbols[tile]].sum())
    return total


def transform_bits(transform: Transform, rows: NDArray[np.float32], step: float) -> float:
    """Bits per value at a step if every coefficient had its own table, of these very rows."""
    total = 0.0
    for values in coefficients(transform, rows):
        quotients = np.rint(values / step)
        quotients -= quotients.min(0)
        width = int(quotients.max()) + 1
        codes = quotients.astype(np.int64) + np.arange(values.shape[1]) * width
        counts = np.bincount(codes.ravel()).astype(np.float64)
        counts = counts[counts > 0]
        total += values.size * np.log2(len(rows)) - float((counts * np.log2(counts)).sum())
    return total / rows.size
