"""The Triton rope kernels: under the interpreter, compiled for GPUs, and on one if there is one.

By default those of most models are compiled, for three generations of GPUs; the long form has more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.kernels import rope
from sglang_ext.kernels.rope import naive
from tests.kernels.rope.rope_cases import DTYPES, RULES, make_bed, make_spec, random_rows, same_bits
from tests.kernels.run_module import run_module


def test_interpreted() -> None:
    assert "all checks passed" in run_module("tests.kernels.rope.interpret_rope")


def test_compiles_without_a_gpu() -> None:
    assert "all kernels compiled" in run_module("tests.kernels.rope.compile_rope")


def test_requests_launch_what_was_compiled_at_start() -> None:
    assert "all compiled at start" in run_module("tests.kernels.rope.launch_kinds")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype, rule: str) -> None:
    spec = make_spec(128, rule, table=dtype if rule == "eager" else torch.float32)
    positions = np.arange(512)
    bed = make_bed(naive.rotate(random_rows((512, 4, 128), dtype), positions, spec), 64)
    pool = bed.pool.cuda()
    fixes = rope.save_k(pool, bed.slots, positions, spec, bed.view)
    assert len(fixes) / pool.numel() < 0.002
    for target in (bed.loaded().cuda(), bed.loaded()):
        rope.load_k(bed.view, positions, spec, target, bed.slots, fixes)
        assert same_bits(bed.gather(target.cpu()), bed.rows)
