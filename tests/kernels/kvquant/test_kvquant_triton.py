"""The Triton kvquant kernels: interpreted, compiled for GPUs not at hand, and run on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_ext.kernels import kvquant
from tests.kernels.kvquant.kvquant_cases import DTYPES, make_planes, make_transform
from tests.kernels.run_module import run_module


def test_interpreted(tmp_path: Path) -> None:
    assert "all checks passed" in run_module(
        "tests.kernels.kvquant.interpret_kvquant", TRITON_CACHE_DIR=str(tmp_path)
    )


def test_compiles_for_gpus_not_at_hand(tmp_path: Path) -> None:
    assert "all kernels compiled" in run_module(
        "tests.kernels.kvquant.compile_kvquant", TRITON_CACHE_DIR=str(tmp_path)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: str) -> None:
    for s, t, c, n in ((4, 300, 256, 64), (2, 65, 576, 576), (2, 1, 16, 16)):
        arrays = make_transform(s, c, n)
        planes = make_planes(dtype, s, t, c, 3)
        found = kvquant.quantise(planes, dtype, arrays, 2, raw_tokens=2)
        again = kvquant.quantise(planes, dtype, arrays, 2, raw_tokens=2, engine="triton")
        assert np.array_equal(found.tiles, again.tiles)
        assert np.array_equal(found.raw.index, again.raw.index)
        outs = [np.zeros_like(planes), np.ones_like(planes)]
        kvquant.dequantise(found.tiles, dtype, arrays, 2, outs[0], raw=found.raw)
        kvquant.dequantise(found.tiles, dtype, arrays, 2, outs[1], raw=found.raw, engine="triton")
        assert np.array_equal(outs[0], outs[1])
