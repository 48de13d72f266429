"""The gated delta rule in plain torch against a token-by-token recurrence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize, rms_norm, silu, softplus

from runtime_cpu.plugins.sglang_cpu.models import experts
from tests.unit.runtime_cpu.stub_modules import load_stub

delta_rule, gated_attention = load_stub("delta_rule"), load_stub("gated_attention")
HK, H, K, V = 2, 6, 16, 8
SLOTS = 7


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(num_tokens: int) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(num_tokens, HK, K),
        "k": torch.randn(num_tokens, HK, K),
        "v": torch.randn(num_tokens, H, V),
        "a": torch.randn(num_tokens, H),
        "b": torch.randn(num_tokens, H),
    }


def gates() -> dict[str, torch.Tensor]:
    return {"A_log": torch.empty(H).uniform_(-5.0, 0.0), "dt_bias": torch.randn(H)}


def recurrence(
    inputs: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs `[T, H, V]`, and the state in front of each token and behind the last."""
    states, found = [state], []
    rate = weights["A_log"].exp()
    for q, k, v, a, b in zip(*(inputs[name] for name in "qkvab"), strict=True):
        state, out = states[-1].clone(), torch.empty(H, V)
        for h in range(H):
            key = normalize(k[h // (H // HK)], dim=0)
            query = normalize(q[h // (H // HK)], dim=0) / K**0.5
            state[h] *= torch.exp(-rate[h] * softplus(a[h] + weights["dt_bias"][h]))
            state[h] += torch.sigmoid(b[h]) * torch.outer(v[h] - state[h] @ key, key)
            out[h] = state[h] @ query
        states.append(state)
        found.append(out)
    return torch.stack(found), states


@pytest.mark.parametrize("lengths", [[5], [64, 3, 130], [65, 128]])
def test_chunks_are_the_recurrence_and_have_its_states(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs, weights = made(int(bounds[-1])), gates()
    pool, slots = torch.randn(SLOTS, H, V, K), torch.tensor([4, 1, 6])[: len(lengths)]
    before = pool.clone()
    decay, writes = delta_rule.fused_gdn_gating_cpu(a=inputs["a"], b=inputs["b"], **weights)
    out, _, fronts = delta_rule.chunk_gated_delta_rule_cpu(
        **{name: inputs[name].unsqueeze(0) for name in "qkv"},
        g=decay,
        beta=writes,
        initial_state=pool,
        cu_seqlens=bounds,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=slots,
    )
    at = 0
    for slot, (start, end) in zip(slots.tolist(), pairwise(bounds.tolist()), strict=True):
        rows = {name: values[start:end] for name, values in inputs.items()}
        found, states = recurrence(rows, weights, before[slot])
        torch.testing.assert_close(out[0, start:end], found, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[slot], states[-1], atol=1e-4, rtol=1e-4)
        for front in states[: end - start : delta_rule.CHUNK]:
            torch.testing.assert_close(fronts[0, at], front, atol=1e-4, rtol=1e-4)
            at += 1
    assert at == fronts.shape[1]
    others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


def test_an_update_is_the_recurrence() -> None:
    inputs, weights = made(3), gates()
    pool, slots = torch.randn(SLOTS, H, V, K), torch.tensor([4, 1, 5])
    before = pool.clone()
    out = delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        **weights,
        **{name: inputs[name].unsqueeze(0) for name in "qkv"},
        a=inputs["a"],
        b=inputs["b"],
        initial_state_source=pool,
        initial_state_indices=slots,
    )
    for i, slot in enumerate(slots.tolist()):
        row = {name: values[i : i + 1] for name, values in inputs.items()}
        found, states = recurrence(row, weights, before[slot])
        torch.testing.assert_close(out[0, i], found[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pool[slot], states[-1], atol=1e-5, rtol=1e-5)
    others = [0, 2, 3, 6]
    assert torch.equal(pool[others], before[others])


def test_guesses_are_the_recurrence_and_leave_a_state_behind_each() -> None:
    steps, weights = 4, gates()
    pool, slots, rows = torch.randn(SLOTS, H, V, K), torch.tensor([4, 1]), torch.tensor([2, 0, 1])
    before, inputs = pool.clone(), made(len(slots) * steps)
    behind = torch.full((3, steps + 1, H, V, K), -7.0)
    out = delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        **weights,
        **{name: inputs[name].unsqueeze(0) for name in "qkv"},
        a=inputs["a"],
        b=inputs["b"],
        initial_state_source=pool,
        initial_state_indices=slots,
        disable_state_update=True,
        intermediate_states_buffer=behind,
        intermediate_state_indices=rows,
        retrieve_parent_token=None,
    )
    for i, slot in enumerate(slots.tolist()):
        chain = slice(i * steps, (i + 1) * steps)
        found, states = recurrence(
            {name: values[chain] for name, values in inputs.items()}, weights, before[slot]
        )
        torch.testing.assert_close(out[0, chain], found, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            behind[rows[i], :steps], torch.stack(states[1:]), atol=1e-5, rtol=1e-5
        )
    assert torch.equal(pool, before)  # what was verified is known behind it
    assert bool((behind[1] == -7).all())
    assert bool((behind[:, steps:] == -7).all())


def test_norms_and_gates_are_those_of_torch() -> None:
    x, gate, weight = torch.randn(5, V), torch.randn(5, V), torch.randn(V)
    normed = rms_norm(x, (V,), weight, 1e-3)
    found = gated_attention.fused_rmsnorm_gated_cpu(x, weight, gate, 1e-3)
    torch.testing.assert_close(found, normed * silu(gate))
    # Two heads of the queries, each with its gate behind it; one of the keys.
    q_gate, keys, of_keys = torch.randn(5, 2, 2, V), torch.randn(5, V), torch.randn(V)
    found = gated_attention.fused_qk_gemma_rmsnorm_with_gate_cpu(
        q_gate.view(5, -1), keys, weight, of_keys, 1e-3, V, 2
    )
    queries = rms_norm(q_gate[:, :, 0], (V,), 1.0 + weight, 1e-3).reshape(-1, V)
    wanted = queries, rms_norm(keys, (V,), 1.0 + of_keys, 1e-3), q_gate[:, :, 1].reshape(-1, V)
    for one, other in zip(found, wanted, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)
    gated = x.clone()
    gated_attention.fused_sigmoid_mul_cpu(gated, gate)
    torch.testing.assert_close(gated, x * gate.sigmoid())


def test_projections_are_taken_apart() -> None:
    parts = [torch.randn(5, size) for size in (2 * HK * K + H * V, H * V, H, H)]
    found = gated_attention.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat(parts[:2], 1), torch.cat(parts[2:], 1), HK, H, K, V
    )
    for one, other in zip(found, parts, strict=True):
        assert torch.equal(one.reshape(5, -1), other)
    assert found[1].shape == (5, H, V)


def test_a_shared_expert_is_added_as_its_gate_says() -> None:
    x, weight, shared, others = (torch.randn(shape) for shape in ((3, 4), (4,), (3, 4), (3, 4)))
    wanted = others + torch.sigmoid((x * weight).sum(1, keepdim=True)) * shared
    experts.fused_gate_sigmoid_mul_add(x, weight, shared, others)
    torch.testing.assert_close(others, wanted)
