"""Sums that statistics of KV are made of, and which rows go into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.calibration import design

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

# First tokens of a sequence: their KV can be far from all other, so it is kept out of statistics.
NUM_SINKS = 4
_MAX_VALUE = 2.0**30
_MAX_SAMPLE_BYTES = 1 << 29
_MAX_SAMPLE_TOKENS = 16_000


@dataclass
class MomentSums:
    """Running sums of position-free KV and of gradients, in blocks of ``block_channels``."""

    block_channels: int
    num_rows: int = 0
    num_gradients: int = 0
    first: Any = 0.0
    second: Any = 0.0
    squares: Any = 0.0
    samples: list[F32] = field(default_factory=list)

    def add(self, rows: F32) -> None:
        """Add rows [T, S * C] of KV."""
        self.num_rows += len(rows)
        self.first = self.first + rows.sum(0, dtype=np.float64)
        self.second = self.second + self._products(rows)

    def add_gradient(self, rows: F32) -> None:
        """Add rows [T, S * C] of gradients."""
        self.num_gradients += len(rows)
        self.squares = self.squares + self._products(rows)

    def moments(self, num_channels: int) -> design.Moments:
        """The moments so far; without gradients, with the metric of the planes' variances."""
        mean = (self.first / self.num_rows).reshape(-1, self.block_channels)
        covariance = self.second / self.num_rows - mean[:, :, None] * mean[:, None, :]
        # Few rows overrate what correlates by chance.
        shrink = self.block_channels / (self.block_channels + 4.0 * self.num_rows)
        diagonal = np.diagonal(covariance, axis1=1, axis2=2)[:, :, None] * np.eye(mean.shape[1])
        covariance = (1 - shrink) * covariance + shrink * np.maximum(diagonal, 0)
        if self.num_gradients:
            metric = self.squares / self.num_gradients
        else:
            metric = design.plane_metric(covariance, num_channels)
        return design.Moments(mean, covariance, metric)

    def _products(self, rows: F32) -> F64:
        blocks = rows.reshape(len(rows), -1, self.block_channels).transpose(1, 0, 2)
        return np.asarray(np.matmul(blocks.transpose(0, 2, 1), blocks), np.float64)


def rows_of(planes: F32) -> F32:
    """Rows [T, S * C] of planes [S, T, C]."""
    return np.ascontiguousarray(planes.transpose(1, 0, 2)).reshape(planes.shape[1], -1)


def usable(rows: F32) -> F32:
    """The rows without infinities, NaN and values whose squares would drown all others."""
    return rows[(np.abs(rows) < _MAX_VALUE).all(1)]


def num_samples(row_values: int) -> int:
    """How many rows are kept to fill entropy tables."""
    return max(1, min(_MAX_SAMPLE_TOKENS, _MAX_SAMPLE_BYTES // (4 * row_values)))
