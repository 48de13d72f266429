"""On CUDA no load waits for a compiler: the kernels are compiled when the server starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.assembly.parts.kernel_choice import choose_kernels  # noqa: E402
from sglang_ext.device.rope_discovery import LayerRope  # noqa: E402
from sglang_ext.kernels.rope import RopeSpec, gpu  # noqa: E402

HEADS = 2


def spec(rotary_dim: int) -> RopeSpec:
    table = np.ones((32, rotary_dim // 2), np.float32)
    return RopeSpec(table, table, rotary_dim, 0, False, "eager")


def test_on_cuda_the_kernels_of_every_kind_of_layer_are_compiled_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        gpu,
        "warm_up",
        lambda pool, spec, size: asked.append((pool.dtype, tuple(pool.shape), spec, size)),
    )
    shape = (8, HEADS, 16)
    k, v = ([torch.zeros(shape) for _ in range(3)] for _ in "kv")
    pool = SimpleNamespace(k=k, v=v, device=torch.device("cuda"))
    one, other = spec(16), spec(8)
    ropes = [LayerRope(one, True), LayerRope(other, True), LayerRope(one, True)]
    words = torch.zeros(shape, dtype=torch.int32)  # rows of an index may be as long
    window = SimpleNamespace(k=[torch.zeros(8, 1, 12), torch.zeros(shape)], v=[words])
    pools: Any = SimpleNamespace(full=pool, window_parts=lambda: [window])
    config: Any = SimpleNamespace(kernels="auto")
    of_window = [LayerRope(None, True), LayerRope(None, True)]
    assert choose_kernels(config, pools, [ropes, of_window], 64) is gpu
    kinds = [(shape, one), (shape, other), (shape, None), ((8, 1, 12), None)]
    floats = [(torch.float32, *kind, 64) for kind in kinds]
    assert asked == [*floats, (torch.int32, shape, None, 64)]
    assert "kernels of 5 kinds of layers compiled in" in caplog.text
