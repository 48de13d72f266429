"""Pages of SGLang's own pool with rows of an index: whole, at their position, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess
from sglang_ext.assembly.codec_setup import DTYPE_NAMES
from sglang_ext.assembly.index_setup import index_facts
from sglang_ext.assembly.window_setup import bound_ropes
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.codec.page_codec import PageCodec
from sglang_ext.device.copier import CopyError, PageCopier
from sglang_ext.device.layout import HEADER_BYTES, ROPE_BOUND
from sglang_ext.device.load_pages import PageRun
from sglang_ext.device.pools import describe_pool, describe_pools
from sglang_ext.errors import HierKVConfigError
from sglang_ext.kernels import rope as kernels
from sglang_ext.tiers.records.record import RecordMeta, parse_header, write_meta

PAGE, PAGES, LATENT, ROTARY, DIM = 64, 12, 128, 64, 128
SKIPS = [False, True, False]
ROW_BYTES = DIM + 4
PACKED = 656  # fp8 values, their scales and rotated values of one row


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's word for a process without other ranks, which its pools ask for."""
    inprocess.prepare()
    from sglang.srt.mem_cache import memory_pool

    place = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: place)


def make_pool(dtype: torch.dtype = torch.bfloat16, skips: list[bool] = SKIPS) -> Any:
    """SGLang's pool with random bytes everywhere."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    width = PACKED if dtype == torch.float8_e4m3fn else LATENT + ROTARY
    pool = DSATokenToKVPool(
        (PAGES - 1) * PAGE,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        dtype=dtype,
        qk_rope_head_dim=ROTARY,
        layer_num=len(skips),
        device="cpu",
        index_head_dim=DIM,
        enable_memory_saver=False,
        kv_cache_dim=width,
        skip_topk_layers=skips,
    )
    random = torch.Generator().manual_seed(3)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=random, dtype=torch.uint8))
    return pool


class Rig:
    """A pool of SGLang's, an arena of three slots and a copier."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sglang = make_pool(dtype)
        self.pool = describe_pool(self.sglang)
        self.layout = self.pool.layout(PAGE)
        self.slots = np.full((3, self.layout.slot_bytes), 0xEE, np.uint8)
        self.copier = PageCopier(
            self.pool, self.layout, bound_ropes(self.pool), self.slots, mode="pre", kernels=kernels
        )

    def content(self, pages: list[int]) -> list[torch.Tensor]:
        """What SGLang keeps of some pages, in its own buffers, as bytes."""
        rows = torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])
        latent = [buffer[rows].view(torch.uint8) for buffer in self.sglang.kv_buffer]
        index = [b[pages] for b in self.sglang.index_k_with_scale_buffer if b.shape[0]]
        return [*latent, *index]

    def load(self, slots: list[int], rows: np.ndarray) -> None:
        job = self.copier.prepare_load(np.array(slots), rows, PAGE)
        for layer in range(self.pool.num_layers):
            self.copier.load_layer(job, layer)


def rows_of(*pages: int) -> np.ndarray:
    return np.concatenate([page * PAGE + np.arange(PAGE) for page in pages])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pages_come_back_with_their_index_rows_and_nothing_else_changes(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    saved = rig.copier.save(rows_of(7, 2, 5), PAGE, np.array([2, 0, 1]))
    assert {page.rope_state for page in saved} == {ROPE_BOUND}
    wanted = rig.content([7, 2, 5])
    others = rig.content([0, 1, 3, 4, 6, 8, 10])
    assert not all(map(torch.equal, rig.content([9, 11, 4]), wanted))
    rig.load([2, 0, 1], rows_of(9, 11, 4))
    assert all(map(torch.equal, rig.content([9, 11, 4]), wanted))
    assert all(map(torch.equal, rig.content([7, 2, 5]), wanted))
    kept = [0, 1, 3, 6, 8, 10]
    for now, before in zip(rig.content(kept), others, strict=True):
        num = len(now) // len(kept)
        was = torch.cat([before[at * num : (at + 1) * num] for at in (0, 1, 2, 4, 5, 6)])
        assert torch.equal(now, was)


def test_a_token_takes_what_sglang_keeps_of_it() -> None:
    layout = describe_pool(make_pool()).layout(PAGE)
    needed = PAGE * (len(SKIPS) * (LATENT + ROTARY) * 2 + SKIPS.count(False) * ROW_BYTES)
    assert layout.kv_bytes == needed
    # Nothing is listed of bound pages; a slot is rounded up to blocks.
    assert layout.slot_bytes - needed < HEADER_BYTES + 64 + 4096


def test_an_index_row_is_of_the_token_that_sglang_wrote_it_for() -> None:
    """By SGLang's own layout: in a page all values, then all scales."""
    rig = Rig()
    rig.copier.save(rows_of(3), PAGE, np.array([0]))
    buffer = rig.sglang.index_k_with_scale_buffer[2]
    at = rig.layout.v_offsets[2]
    stored = rig.slots[0, at : at + PAGE * ROW_BYTES]
    keys, scales = stored[: PAGE * DIM].reshape(PAGE, DIM), stored[PAGE * DIM :].reshape(PAGE, 4)
    assert np.array_equal(keys[17], buffer[3, 17 * DIM : 18 * DIM].numpy())
    assert np.array_equal(scales[17], buffer[3, PAGE * DIM :].view(PAGE, 4)[17].numpy())


def test_rows_of_a_draft_layer_and_its_index_lie_behind_the_models_and_come_back() -> None:
    draft = make_pool(skips=[False])
    target = make_pool()
    for buffer in (*draft.kv_buffer, *draft.index_k_with_scale_buffer):
        buffer.view(torch.uint8).bitwise_not_()  # not what the model's first layer has
    both = describe_pools(target, drafts=[draft]).full
    layout = both.layout(PAGE)
    assert layout.kv_bytes == PAGE * (4 * (LATENT + ROTARY) * 2 + 3 * ROW_BYTES)
    slots = np.zeros((1, layout.slot_bytes), np.uint8)
    copier = PageCopier(both, layout, bound_ropes(both), slots, mode="pre", kernels=kernels)
    copier.save(rows_of(4), PAGE, np.array([0]))
    wanted = [pages(pool, 4) for pool in (target, draft)]
    job = copier.prepare_load(np.array([0]), rows_of(9), PAGE)
    for layer in range(both.num_layers):
        copier.load_layer(job, layer)
    for pool, before in zip((target, draft), wanted, strict=True):
        assert all(map(torch.equal, pages(pool, 9), before))
        assert all(map(torch.equal, pages(pool, 4), before))


def test_what_sglang_keeps_of_a_retracted_request_has_its_index_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode server stores such a request as if it had gone on; its last page is not full."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool, num_last = make_pool(), PAGE - 20
    wanted = [pages(pool, page) for page in (7, 2, 5)]
    kept = pool.get_cpu_copy(torch.from_numpy(rows_of(7, 2, 5))[: 2 * PAGE + num_last])
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.view(torch.uint8).bitwise_not_()  # other requests' rows
    pool.load_cpu_copy(kept, torch.from_numpy(rows_of(9, 1, 4))[: 2 * PAGE + num_last])
    for page, num_rows, before in zip((9, 1, 4), (PAGE, PAGE, num_last), wanted, strict=True):
        for now, was in zip(pages(pool, page), before, strict=True):
            # Latent rows are copied one by one, those of an index by pages.
            num = num_rows if now.dim() > 1 else len(now)
            assert torch.equal(now[:num], was[:num])


def pages(pool: Any, page: int) -> list[torch.Tensor]:
    """What a pool of SGLang's keeps of a page."""
    rows = slice(page * PAGE, (page + 1) * PAGE)
    latent = [buffer[rows].view(torch.uint8).clone() for buffer in pool.kv_buffer]
    return [*latent, *(b[page].clone() for b in pool.index_k_with_scale_buffer if b.shape[0])]


def test_a_draft_layer_of_another_dtype_is_refused() -> None:
    draft = make_pool(torch.float8_e4m3fn, [False])
    with pytest.raises(HierKVConfigError, match="a KV pool as the target model's"):
        describe_pools(make_pool(), drafts=[draft])


def test_pages_with_an_index_do_not_move() -> None:
    rig = Rig()
    rig.copier.save(rows_of(1, 2), PAGE, np.array([0, 1]))
    slots = np.array([0, 1])
    with pytest.raises(CopyError, match="bound to position 64 cannot be loaded elsewhere"):
        rig.copier.prepare_load(slots, rows_of(5, 6), 2 * PAGE)
    whole = [PageRun(slots, 0, 2 * PAGE)]
    with pytest.raises(CopyError, match="cannot be loaded elsewhere"):
        rig.copier.prepare_runs(whole, rows_of(5, 6), 0)
    part = [PageRun(slots, 1, PAGE)]
    with pytest.raises(CopyError, match="index is one of whole pages"):
        rig.copier.prepare_runs(part, rows_of(5), PAGE + 1)
    for rows in (rows_of(5, 6) + 1, np.flip(rows_of(5, 6)), np.roll(rows_of(5, 6), 1)):
        with pytest.raises(CopyError, match="whole pages of the pool"):
            rig.copier.prepare_load(slots, rows, PAGE)
        with pytest.raises(CopyError, match="whole pages of the pool"):
            rig.copier.save(rows, PAGE, slots)


def _of_several_tokens(pool: Any) -> None:
    pool.index_kpool = 2


def _of_other_pages(pool: Any) -> None:
    pool.index_page_size = 32


def _without_rows(pool: Any) -> None:
    pool.index_key_cache.buffer = [buffer[:0] for buffer in pool.index_key_cache.buffer]


def _with_a_layer_less(pool: Any) -> None:
    pool.index_key_cache.buffer = pool.index_key_cache.buffer[:-1]


def _with_a_page_less(pool: Any) -> None:
    pool.index_key_cache.buffer[0] = pool.index_key_cache.buffer[0][:-1]


@pytest.mark.parametrize(
    "spoil",
    [_of_several_tokens, _of_other_pages, _without_rows, _with_a_layer_less, _with_a_page_less],
)
def test_another_index_is_refused(spoil: Callable[[Any], None]) -> None:
    pool = make_pool()
    spoil(pool)
    with pytest.raises(HierKVConfigError, match="needs an index with a row for each token"):
        describe_pool(pool)


def test_namespaces_tell_apart_which_layers_have_rows_and_how_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def facts(skips: list[bool], fused: bool) -> Any:
        indexer = type("Indexer", (torch.nn.Module,), {"use_dsa_indexer_fusion": fused})()
        pool = make_pool(skips=skips)
        return index_facts(torch.nn.ModuleList([indexer]), pool, describe_pool(pool))

    found = [facts(SKIPS, False), facts([False] * 3, False), facts(SKIPS, True)]
    assert [each["layers"] for each in found] == [[0, 2], [0, 1, 2], [0, 2]]
    assert found[0] == facts(SKIPS, False)
    assert found[0] != found[2]
    # On a GPU prompts up to this length attend to all tokens: the rows are of other hidden states.
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "65536")
    assert facts(SKIPS, False) != found[0]
    mla = SimpleNamespace(has_index=False)
    assert index_facts(torch.nn.Identity(), None, mla) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("codec_id", ["lossless", "zstd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_codecs_leave_index_rows_as_they_are(codec_id: str, dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    (saved,) = rig.copier.save(rows_of(3), PAGE, np.array([0]))
    slot = rig.slots[0]
    slot[:HEADER_BYTES] = 0
    meta = RecordMeta(bytes(32), bytes(32), b"", PAGE, PAGE, "bound")
    write_meta(slot, meta, saved.payload_bytes)
    name = DTYPE_NAMES[rig.sglang.dtype]
    codec = PageCodec(CodedShape.of(rig.layout, name, LATENT + ROTARY), codec_id, None)
    record = codec.encode(slot)
    assert record is not None
    out = np.full(rig.layout.slot_bytes, 0xAB, np.uint8)
    assert codec.decode(record, out)
    end = HEADER_BYTES + saved.payload_bytes
    assert np.array_equal(out[HEADER_BYTES:end], slot[HEADER_BYTES:end])
    # Cut anywhere, it is no page.
    _, num_bytes = parse_header(record)
    for length in (0, 100, 100 + 2 * PAGE * ROW_BYTES, num_bytes - 1):
        write_meta(record, parse_header(record)[0], length)
        assert not codec.decode(record, out)
