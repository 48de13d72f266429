"""What the CPU runtime computes of an index in plain torch, against what is written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runtime_cpu.plugins.sglang_cpu.attention import attend_to_chosen
from runtime_cpu.plugins.sglang_cpu.sparse import kernels

DIM, PAGE, HEADS = 128, 64, 4
POOL = SimpleNamespace(index_page_size=PAGE, index_head_dim=DIM)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_transform_is_hadamards() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = random(3, 2, DIM)
    assert torch.allclose(kernels.rotate_activation(x), x @ matrix / DIM**0.5, atol=1e-5)


def test_values_are_quantised_with_scales_that_are_powers_of_two() -> None:
    x = 30 * random(5, 2 * DIM)
    values, scale = kernels.act_quant(x, DIM, "ue8m0")
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 2)
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    back = values.float().reshape(5, 2, DIM) * scale.unsqueeze(-1)
    assert torch.allclose(back.reshape(x.shape), x, rtol=0.07, atol=0.3)
    _, exact = kernels.act_quant(x, DIM)
    assert torch.allclose(exact, x.reshape(5, 2, DIM).abs().amax(-1) / 448)


def test_rows_lie_in_pages_as_sglang_reads_them() -> None:
    pages = torch.zeros(5, PAGE * (DIM + 4), dtype=torch.uint8)
    loc = torch.cat((torch.arange(3 * PAGE, 4 * PAGE), torch.arange(PAGE, PAGE + 6)))
    keys, scale = kernels.act_quant(random(len(loc), DIM), DIM, "ue8m0")
    kernels.store(pool=POOL, buf=pages, loc=loc, index_k=keys, index_k_scale=scale)
    assert torch.equal(pages[3, 2 * DIM : 3 * DIM], keys[2].view(torch.uint8))
    assert torch.equal(
        pages[1, PAGE * DIM :].view(torch.float32)[5:7],
        torch.stack((scale[-1, 0], torch.tensor(0.0))),
    )
    num = len(loc)
    found = kernels.gather(POOL, pages, torch.tensor([3, 1]), torch.tensor([num]), num, num)
    assert torch.equal(found[0], keys.view(torch.uint8))
    assert torch.equal(found[1].contiguous().view(torch.float32), scale)


@pytest.mark.parametrize(("num_new", "total"), [(1, 200), (70, 200), (30, 30), (5, 9)])
def test_the_best_tokens_before_each_are_chosen_in_order(num_new: int, total: int) -> None:
    query, query_scale = kernels.act_quant(random(num_new, HEADS, DIM), DIM, "ue8m0")
    weights = random(num_new, HEADS, 1, seed=1) * query_scale
    keys, scales = kernels.act_quant(random(total, DIM, seed=2), DIM, "ue8m0")
    found = kernels.choose(
        query, weights, keys.view(torch.uint8), scales.view(torch.uint8).view(total, 4), 24
    )
    assert found.shape == (num_new, 24)
    for row in range(num_new):
        seen = total - num_new + row + 1
        products = (query[row].float() @ keys[:seen].float().T).relu()
        scores = (products * weights[row]).sum(0) * scales[:seen, 0]
        num = min(24, seen)
        chosen, rest = found[row, :num].tolist(), found[row, num:].tolist()
        assert chosen == sorted(set(chosen))
        assert set(rest) <= {-1}
        # Sums are rounded in another order, so of two that are close either may be chosen.
        assert torch.allclose(scores[chosen].sort().values, scores.topk(num).values.flip(0))


def test_only_what_was_chosen_is_attended_to() -> None:
    query, keys = random(6, HEADS, 48), random(40, 1, 48, seed=1)
    values, output = keys[..., :32], torch.empty(6, HEADS, 32)
    chosen = torch.tensor([[0, 5, 9, -1], *[[3, 8, 20, 39]] * 5], dtype=torch.int32)
    attend_to_chosen(query, keys, values, output, chosen, scale=0.2)
    for row, (tokens, num) in enumerate(zip(chosen.tolist(), [3, *[4] * 5], strict=True)):
        rows = tokens[:num]
        shares = (query[row] @ keys[rows, 0].T * 0.2).softmax(-1)
        assert torch.allclose(output[row], shares @ values[rows, 0], atol=1e-5)
