"""Checks of the Triton rANS kernels under the interpreter; run by test_rans_triton.py.

A process of its own, because `TRITON_INTERPRET` counts when the kernels are imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest

from sglang_ext.kernels.rans import RansError
from tests.kernels.rans.rans_cases import make_case, make_tables, mutated, same_coded

SHAPES = (
    # tiles, tokens, tiles per group, contexts
    (1, 1, 1, 0), (5, 7, 2, 3), (9, 3, 4, 0), (6, 5, 1, 2), (3, 2, 8, 0), (2, 33, 1, 1),
    (0, 4, 2, 0),
)  # fmt: skip


def check_same_bytes() -> None:
    rng = np.random.default_rng(0)
    for number, (num_tiles, num_tokens, tiles_per_group, num_contexts) in enumerate(SHAPES):
        for uniform in (False, True):
            alphabets = [int(n) for n in rng.integers(1, 255, 5)]
            tables = make_tables(alphabets, rng, float(3 * number))
            case = make_case(
                num_tiles, num_tokens, tiles_per_group, tables, rng, num_contexts, uniform
            )
            expected = case.encode("numba")
            assert same_coded(case.encode("triton"), expected)
            np.testing.assert_array_equal(case.decode(expected, "triton"), case.symbols)


def check_malformed() -> None:
    rng = np.random.default_rng(1)
    case = make_case(7, 4, 2, make_tables([3, 100], rng), rng)
    coded = case.encode()
    found = 0
    for _ in range(40):
        wrong = mutated(coded, rng)
        try:
            result = case.decode(wrong, "triton")
        except RansError:
            found += 1
        else:
            assert same_coded(case.coding(result), wrong)
    assert found > 30, found


def check_frequency_zero() -> None:
    rng = np.random.default_rng(2)
    case = make_case(6, 3, 2, make_tables([3, 5], rng), rng)
    case.symbols[4, 1, 3] = 77
    with pytest.raises(ValueError, match=r"tiles 4\.\. has frequency 0"):
        case.encode("triton")


if __name__ == "__main__":
    check_same_bytes()
    check_malformed()
    check_frequency_zero()
    print("all checks passed")
