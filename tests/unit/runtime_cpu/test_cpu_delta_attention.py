"""Kimi Delta Attention in plain torch against SGLang's recurrence, and what has no kernel there.

SGLang's recurrence, under Triton's interpreter, is of the long form;
`tests/e2e/models/test_states.py` compares with transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from runtime_cpu.plugins.sglang_cpu import delta_attention
from tests.kernels.run_module import run_module

H, K, SLOTS = 2, 8, 4


@pytest.mark.long
def test_chunks_and_steps_are_those_of_sglang() -> None:
    printed = run_module("tests.unit.runtime_cpu.interpret_delta_attention")
    assert "all checks passed" in printed


def test_a_row_without_a_slot_leaves_all_states_as_they_are() -> None:
    """SGLang pads batches with requests of slot -1."""
    torch.manual_seed(0)
    pool, before = torch.randn(2, SLOTS, H, K, K).unbind(0)
    pool.copy_(before)
    weights: dict[str, Any] = {"A_log": torch.zeros(H), "dt_bias": torch.zeros(H * K)}
    tokens: dict[str, Any] = {name: torch.randn(1, 2, H, K) for name in ("q", "k", "v")}
    slots, gates = torch.tensor([2, -1]), torch.randn(1, 2, H, K)
    delta_attention.fused_sigmoid_gating_delta_rule_update(
        **weights,
        **tokens,
        a=gates.view(2, H * K),
        b=torch.randn(1, 2, H),
        initial_state_source=pool,
        initial_state_indices=slots,
        is_kda=True,
    )
    others = [0, 1, 3]
    assert torch.equal(pool[others], before[others])
    assert not torch.equal(pool[2], before[2])
    pool.copy_(before)
    delta_attention.chunk_kda(
        **weights,
        **tokens,
        g=gates,
        beta=torch.randn(1, 2, H),
        initial_state=pool,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, 1, 2]),
        beta_is_raw=True,
        output_intermediate_states=False,
    )
    assert torch.equal(pool[others], before[others])


def test_the_norm_is_torch_s_times_the_sigmoid_of_its_gate() -> None:
    x, gate, weight = torch.randn(1, 5, H, K), torch.randn(5, H, K), torch.randn(K)
    found = delta_attention.norm_gated_by_sigmoid(x, weight, gate, 1e-5)
    torch.testing.assert_close(found, rms_norm(x, (K,), weight, 1e-5) * gate.sigmoid())
