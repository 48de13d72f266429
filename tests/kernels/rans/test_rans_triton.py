"""The Triton rANS kernels: under the interpreter, compiled for GPUs, and on one if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.kernels import rans
from tests.kernels.rans.rans_cases import make_case, make_tables, mutated, same_coded
from tests.kernels.run_module import run_module


def test_interpreted() -> None:
    assert "all checks passed" in run_module("tests.kernels.rans.interpret_rans")


def test_compiles_without_a_gpu() -> None:
    assert "all kernels compiled" in run_module("tests.kernels.rans.compile_rans")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_that_it_needs_a_gpu() -> None:
    rng = np.random.default_rng(0)
    case = make_case(2, 3, 1, make_tables([4], rng), rng)
    with pytest.raises(RuntimeError, match="needs a CUDA device; use 'numba'"):
        case.encode("triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_contexts", [0, 3])
@pytest.mark.parametrize("shape", [(200, 64, 32), (130, 256, 8), (33, 1500, 2), (5, 8192, 1)])
def test_on_a_gpu(shape: tuple[int, int, int], num_contexts: int) -> None:
    rng = np.random.default_rng(sum(shape))
    tables = make_tables([3, 17, 254, 2, 64, 9], rng)
    case = make_case(*shape, tables, rng, num_contexts)
    coded = case.encode("triton")
    assert same_coded(coded, case.encode("numba"))
    np.testing.assert_array_equal(case.decode(coded, "triton"), case.symbols)
    for _ in range(20):
        wrong = mutated(coded, rng)
        try:
            result = case.decode(wrong, "triton")
        except rans.RansError:
            continue
        assert same_coded(case.coding(result), wrong)
