"""A transform's matrices as the CPU kernels want them."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from .spec import F32, F64, I16, I32, TransformArrays
from .words import COLUMNS


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One matrix `[n, n]` (term, column) per block, cut into panels of 32 columns.

    Attributes:
        panels: i16, flat `[B, ceil(n / 32), ceil(n / 2), 32, 2]`, two terms of a column together.
        norms: f64 `[B]`, the largest Euclidean norm of a column; infinite if the block's matrix
            does not fit int16.
    """

    panels: I16
    norms: F64

    @classmethod
    def of(cls, matrix: I32) -> PackedMatrix:
        """Pack a matrix."""
        num_blocks, n, _ = matrix.shape
        num_panels, num_pairs = -(-n // COLUMNS), -(-n // 2)
        panels = np.zeros((num_blocks, num_panels, num_pairs, COLUMNS, 2), np.int16)
        norms = np.empty(num_blocks)
        for b in range(num_blocks):
            if np.abs(matrix[b].astype(np.int64)).max() > 32767:
                norms[b] = np.inf
                continue
            norms[b] = np.sqrt(np.square(matrix[b].astype(np.float64)).sum(0).max())
            padded = np.zeros((2 * num_pairs, COLUMNS * num_panels), np.int16)
            padded[:n, :n] = matrix[b]
            parts = padded.reshape(num_pairs, 2, num_panels, COLUMNS)
            panels[b] = parts.transpose(2, 0, 3, 1)
        return cls(panels.reshape(-1), norms)


@dataclass(frozen=True, eq=False)
class PackedTransform:
    """What `cpu.py` reads; see `TransformArrays`.

    Attributes:
        forward: (channel, coefficient).
        inverse: (coefficient, channel).
        scale: f32 `[B, n]`, 2^-grid_exp.
    """

    forward: PackedMatrix
    inverse: PackedMatrix
    scale: F32


_LOCK = Lock()  # guards _PACKED
_PACKED: WeakKeyDictionary[TransformArrays, PackedTransform] = WeakKeyDictionary()


def packed(arrays: TransformArrays) -> PackedTransform:
    """The packed form of a transform; made at the first call, as large as half its matrices."""
    with _LOCK:
        found = _PACKED.get(arrays)
        if found is None:
            found = PackedTransform(
                PackedMatrix.of(arrays.forward),
                PackedMatrix.of(arrays.inverse),
                np.ldexp(np.float32(1), -arrays.grid_exp.astype(np.int32)).astype(np.float32),
            )
            _PACKED[arrays] = found
        return found
