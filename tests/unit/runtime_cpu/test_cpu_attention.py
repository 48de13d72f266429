"""The CPU runtime's attention of new tokens against the sum written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cpu.plugins.sglang_cpu.attention import (
    attend,
    attend_in_chunks,
    attend_with_sinks,
)
from runtime_cpu.plugins.sglang_cpu.windows import parse_windows


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    num_new, num_keys = len(query), len(keys)
    at, key = torch.arange(num_keys - num_new, num_keys)[:, None], torch.arange(num_keys)
    seen = key <= at
    if window is not None:
        seen &= key >= at - window
    copies = query.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(copies, 1).movedim(0, 1) for x in (keys, values))
    scores = query.double().movedim(0, 1) @ k.transpose(1, 2) * scale
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).movedim(0, 1)


@settings(max_examples=120, deadline=None)
@given(
    num_new=st.integers(1, 300),
    prefix=st.integers(0, 300),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2)]),
    window=st.one_of(st.none(), st.integers(1, 320)),
    seed=st.integers(0, 99),
)
def test_equals_the_sum_written_out(
    num_new: int, prefix: int, heads: tuple[int, int], window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(num: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num, num_heads, 16, generator=generator)

    query = random(num_new, heads[0])
    keys, values = (random(prefix + num_new, heads[1]) for _ in range(2))
    output = torch.full_like(query, torch.nan)
    attend(query, keys, values, output, window=window, scale=0.2)
    wanted = reference(query, keys, values, window, 0.2)
    torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    num_new=st.integers(1, 160),
    prefix=st.integers(0, 100),
    chunk=st.integers(1, 170),
    seed=st.integers(0, 99),
)
def test_of_a_chunk_nothing_before_it_is_seen(
    num_new: int, prefix: int, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_new, 4, 16, generator=generator)
    keys, values = (torch.randn(prefix + num_new, 2, 16, generator=generator) for _ in range(2))
    # Token by token, the sum written out over what is left of its chunk.
    wanted = []
    for row in range(num_new):
        at = prefix + row
        seen = slice(at // chunk * chunk, at + 1)
        wanted.append(reference(query[row : row + 1], keys[seen], values[seen], None, 0.2))
    output = torch.full_like(query, torch.nan)
    first = prefix // chunk * chunk
    attend_in_chunks(query, keys[first:], values[first:], output, chunk=chunk, scale=0.2)
    torch.testing.assert_close(output.double(), torch.cat(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 63])
def test_a_sink_takes_its_share_of_every_tokens_attention(window: int | None) -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(40, 4, 24), torch.randn(90, 2, 24), torch.randn(90, 2, 16)
    sinks, output = torch.randn(4), torch.empty(40, 4, 16)
    attend_with_sinks(query, keys, values, output, sinks, window=window, scale=0.2)
    for row in range(40):
        at = 50 + row
        first = 0 if window is None else max(0, at - window)
        k, v = (x[first : at + 1].repeat_interleave(2, 1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", query[row], k) * 0.2
        shares = torch.cat([scores, sinks[:, None]], 1).softmax(-1)[:, :-1]
        wanted = torch.einsum("ht,thd->hd", shares, v)
        torch.testing.assert_close(output[row], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 63])
def test_a_pool_of_another_type_is_converted(window: int | None) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(40, 2, 32), torch.randn(200, 2, 32).bfloat16()
    values = torch.randn(200, 2, 32).bfloat16()
    output = torch.empty_like(query)
    attend(query, keys, values, output, window=window, scale=None)
    wanted = reference(query, keys, values, window, 32**-0.5)
    torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=1e-5)


def test_windows_of_a_dummy_model() -> None:
    assert parse_windows("") == (0, 1)
    assert parse_windows("63:8") == (63, 8)


@pytest.mark.parametrize("value", ["63", "63:0", "a:8", "-1:8"])
def test_other_windows_are_refused_in_a_sentence(value: str) -> None:
    with pytest.raises(ValueError, match=f"as WINDOW:EVERY, for instance 128:8, got '{value}'"):
        parse_windows(value)
