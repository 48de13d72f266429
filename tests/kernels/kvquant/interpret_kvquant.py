"""Checks of the Triton kvquant kernels under the interpreter; run by test_kvquant_triton.py.

A process of its own, because `TRITON_INTERPRET` counts when the kernels are imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np

from sglang_ext.kernels.kvquant import TransformArrays, Words
from tests.kernels.kvquant.kvquant_cases import (
    DTYPES,
    make_planes,
    make_transform,
    quantise_alike,
    random_transform,
    random_words,
    spoil,
)


def check(planes: Words, dtype: str, arrays: TransformArrays, level: int, **options: Any) -> int:
    """All engines agree; the number of raw rows."""
    return quantise_alike(planes, dtype, arrays, level, "triton", **options).raw.index.size


def check_shapes() -> None:
    num_raw = 0
    for i, dtype in enumerate(DTYPES):
        for j, (s, t, c, n) in enumerate(((2, 35, 24, 48), (2, 1, 16, 16), (1, 4, 80, 40))):
            outlier = 1000.0 if (i + j) % 2 else 1.0
            arrays = make_transform(s, c, n, outlier=outlier, dead=0.3)
            planes = make_planes(dtype, s, t, c, 3, outlier)
            num_raw += check(
                spoil(planes, dtype) if t > 3 else planes,
                dtype,
                arrays,
                1 + j,
                first_level=j,
                raw_tokens=j,
            )
    assert num_raw > 5


def check_random_transforms() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        s, c, n = ((1, 1, 1), (2, 5, 5), (3, 40, 20), (4, 6, 12))[seed % 4]
        bits = rng.integers(1, 24, 2)
        arrays = random_transform(rng, s, c, n, int(bits[0]), int(bits[1]), int(bits[0]) + 10)
        dtype = DTYPES[seed % len(DTYPES)]
        planes = random_words(rng, dtype, (s, 9, c), 10.0)
        check(planes, dtype, arrays, seed % 3)


if __name__ == "__main__":
    check_shapes()
    check_random_transforms()
    print("all checks passed")
