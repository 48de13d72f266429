"""Pages of SGLang's own pools in the dtypes, widths and page sizes that it has on a GPU.

The pools are made on the CPU: of memory they are the same, whatever computes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess
from sglang_ext.assembly.window_setup import bound_ropes
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import ROPE_BOUND
from sglang_ext.device.pools import describe_pool
from sglang_ext.kernels import rope as kernels

LAYERS, PAGES = 2, 6
FROM, TO = [4, 1, 2], [5, 3, 0]
LATENT, ROTARY = 512, 64


def make_mha(page_size: int, dtype: torch.dtype, *, v_dim: int = 128) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        (PAGES - 1) * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=2,
        head_dim=128,
        v_head_dim=v_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def make_mla(page_size: int, dtype: torch.dtype) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        (PAGES - 1) * page_size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# Bytes that SGLang keeps of a token in all layers, and what makes the pool.
CASES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "K and V as halves of one tensor": (LAYERS * 1024, lambda page: make_mha(page, BF16)),
    "V of fewer columns": (LAYERS * 896, lambda page: make_mha(page, BF16, v_dim=96)),
    "fp8_e4m3": (LAYERS * 512, lambda page: make_mha(page, E4M3)),
    "fp8_e5m2": (LAYERS * 512, lambda page: make_mha(page, E5M2)),
    "latent rows": (LAYERS * 1152, lambda page: make_mla(page, BF16)),
    "latent rows in fp8_e4m3": (LAYERS * 576, lambda page: make_mla(page, E4M3)),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's word for a process without other ranks, which its pools ask for."""
    inprocess.prepare()
    from sglang.srt.mem_cache import memory_pool

    place = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: place)


def content(sglang: Any, pages: list[int]) -> list[torch.Tensor]:
    """What attention reads of some pages, by SGLang's own accessors, as bytes."""
    size = sglang.page_size
    rows = torch.cat([torch.arange(size) + page * size for page in pages])
    read = [sglang.get_key_buffer(layer) for layer in range(LAYERS)]
    read += [sglang.get_value_buffer(layer) for layer in range(LAYERS)]
    return [each.view(torch.uint8)[rows] for each in read]


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_pages_come_back_and_nothing_else_changes(case: str, page_size: int) -> None:
    token_bytes, make = CASES[case]
    sglang = make(page_size)
    random = torch.Generator().manual_seed(7)
    for buffer in getattr(sglang, "kv_buffer", None) or [*sglang.k_buffer, *sglang.v_buffer]:
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=random, dtype=torch.uint8))
    pool = describe_pool(sglang)
    layout = pool.layout(page_size)
    assert layout.kv_bytes == token_bytes * page_size
    slots = np.full((len(FROM), layout.slot_bytes), 0xEE, np.uint8)
    copier = PageCopier(pool, layout, bound_ropes(pool), slots, mode="pre", kernels=kernels)

    def rows_of(pages: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.concatenate([page * page_size + np.arange(page_size) for page in pages])

    wanted, before = content(sglang, FROM), content(sglang, TO)
    assert not any(map(torch.equal, before, wanted))
    saved = copier.save(rows_of(FROM), page_size, np.arange(len(FROM)))
    assert {page.rope_state for page in saved} == {ROPE_BOUND}
    job = copier.prepare_load(np.arange(len(FROM)), rows_of(TO), page_size)
    for layer in range(pool.num_layers):
        copier.load_layer(job, layer)
    assert all(map(torch.equal, content(sglang, TO), wanted))
    assert all(map(torch.equal, content(sglang, FROM), wanted))
