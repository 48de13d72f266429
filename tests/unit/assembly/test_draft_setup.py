"""A draft model's KV pool as the last layers of the target's pages."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.assembly.draft_setup import check_planes, count_loads_of, live_models
from sglang_ext.assembly.parts.served_kv import served_kv
from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.pools import HybridPools, describe_pool, describe_pools
from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.namespace import digest_model
from sglang_ext.settings.config import HierKVConfig

ROWS = 9


class MHATokenToKVPool(SimpleNamespace):
    """By its name one of SGLang's."""

    counter: Any = None

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.counter = counter


def pool(layers: int, *, heads: int = 2, rows: int = ROWS, dtype: Any = torch.bfloat16) -> Any:
    buffers = {
        name: [torch.zeros(rows, heads, 4, dtype=dtype) for _ in range(layers)]
        for name in ("k_buffer", "v_buffer")
    }
    return MHATokenToKVPool(dtype=dtype, **buffers)


def runner(kv_pool: Any) -> Any:
    return SimpleNamespace(token_to_kv_pool=kv_pool, model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "layout", [{"use_hnd": True, "kv_cache_layout": "hnd"}, {"kv_cache_layout": "vectorized_5d"}]
)
def test_a_pool_that_is_not_token_by_token_is_refused(layout: dict[str, Any]) -> None:
    other = pool(1)
    other.__dict__.update(layout)
    with pytest.raises(HierKVConfigError, match=f"NHD.* got {layout['kv_cache_layout']}; unset"):
        describe_pool(other)


def test_the_drafts_layers_follow_in_the_same_rows() -> None:
    draft = pool(2, heads=1)
    target = pool(3)
    both = describe_pools(target, drafts=[draft]).full
    assert both.num_layers == 5
    assert [each.data_ptr() for each in both.k[3:]] == [k.data_ptr() for k in draft.k_buffer]
    assert [each.data_ptr() for each in both.v[3:]] == [v.data_ptr() for v in draft.v_buffer]
    layout = both.layout(8)
    assert layout.k_row_bytes == (16, 16, 16, 8, 8)
    assert layout.k_offsets[:3] == describe_pool(target).layout(8).k_offsets


class HybridLinearKVPool(SimpleNamespace):
    """By its name one of SGLang's."""


def test_beside_states_the_full_layers_of_a_drafts_pool_are_taken() -> None:
    draft = pool(1)
    target = HybridLinearKVPool(full_kv_pool=pool(3))
    pools = describe_pools(target, drafts=[HybridLinearKVPool(full_kv_pool=draft)])
    both = pools.full
    assert (both.num_layers, pools.num_draft_layers) == (4, 1)
    assert [each.data_ptr() for each in both.k[3:]] == [k.data_ptr() for k in draft.k_buffer]


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (pool(1, rows=ROWS + 1), f"{ROWS} rows.*{ROWS + 1} rows"),
        (pool(1, dtype=torch.float16), "bfloat16.*float16"),
    ],
)
def test_a_pool_of_other_rows_or_values_is_refused(draft: Any, words: str) -> None:
    with pytest.raises(HierKVConfigError, match=words):
        describe_pools(pool(3), drafts=[draft])


def test_where_one_checkpoint_alone_asks_for_fp8_the_argument_for_both_is_named() -> None:
    """SGLang takes "auto" for fp8 where a model's checkpoint says so, and a draft's may not."""
    with pytest.raises(HierKVConfigError) as caught:
        describe_pools(pool(3, dtype=torch.uint8), drafts=[pool(1)])
    assert "(torch.uint8), got torch.bfloat16; give --kv-cache-dtype, which both" in str(
        caught.value
    )
    with pytest.raises(HierKVConfigError) as caught:
        describe_pools(pool(3), drafts=[pool(1, dtype=torch.float16)])
    assert "--kv-cache-dtype" not in str(caught.value)


class SWAKVPool(SimpleNamespace):
    """By its name one of SGLang's."""


def of_fp8(layers: int, values: torch.dtype) -> Any:
    """A pool of bytes, as SGLang has all of fp8."""
    made = pool(layers, dtype=torch.uint8)
    made.dtype = values
    return made


def test_bytes_of_one_fp8_are_no_values_of_another() -> None:
    one, other = torch.float8_e4m3fn, torch.float8_e5m2
    both = describe_pools(of_fp8(3, one), drafts=[of_fp8(1, one)]).full
    assert (both.dtype, both.format, both.num_layers) == (torch.uint8, str(one), 4)
    with pytest.raises(HierKVConfigError, match=rf"\({one}\), got {other}; give --kv-cache-dtype"):
        describe_pools(of_fp8(3, one), drafts=[of_fp8(1, other)])
    layers = {layer: (layer // 2, bool(layer % 2)) for layer in range(6)}
    full, window = of_fp8(3, one), of_fp8(3, other)
    mixed = SWAKVPool(full_kv_pool=full, swa_kv_pool=window, layers_mapping=layers, page_size=8)
    with pytest.raises(HierKVConfigError, match=f"mha in {one} and mha in {other}"):
        describe_pools(mixed)


def window_pools(num_draft_heads: int, dtype: Any) -> HybridPools:
    """Three full and three window layers of one shape, and a draft's layer behind the full ones."""
    layers = {layer: (layer // 2, bool(layer % 2)) for layer in range(6)}
    full, window = (pool(3, dtype=dtype) for _ in range(2))
    target = SWAKVPool(full_kv_pool=full, swa_kv_pool=window, layers_mapping=layers, page_size=8)
    return describe_pools(target, drafts=[pool(1, heads=num_draft_heads, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_no_codec_is_given_the_blocks_that_a_draft_of_another_width_makes(dtype: Any) -> None:
    """A codec sees planes, and what is between them is lost: blocks may lie there."""
    codecs = HierKVConfig(codec="remote=lossless"), HierKVConfig(codec="zstd")
    for config in (HierKVConfig(), *codecs):
        check_planes(window_pools(2, dtype), config)
        check_planes(describe_pools(pool(3, dtype=dtype), drafts=[pool(1, dtype=dtype)]), config)
    check_planes(window_pools(1, dtype), HierKVConfig())
    for config in codecs:
        with pytest.raises(HierKVConfigError, match=r"needs --hier-kv-codec none where window"):
            check_planes(window_pools(1, dtype), config)


def test_blocks_and_codecs_are_looked_at_as_the_server_starts() -> None:
    layers = {layer: (layer // 2, bool(layer % 2)) for layer in range(6)}
    target = SWAKVPool(
        full_kv_pool=pool(3), swa_kv_pool=pool(3), layers_mapping=layers, page_size=8
    )
    allocator = SimpleNamespace(get_kvcache=lambda: target)
    model = SimpleNamespace(
        _hier_kv_draft_runners=(runner(pool(1, heads=1)),),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        model=None,
    )
    ctx = SimpleNamespace(
        params=SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=8),
        tp_worker=SimpleNamespace(model_runner=model),
        is_hybrid_swa=True,
        is_hybrid_ssm=False,
    )
    with pytest.raises(HierKVConfigError, match="got lossless; leave it out or choose another"):
        served_kv(ctx, HierKVConfig(codec="lossless"))


def test_a_draft_waits_for_the_whole_load() -> None:
    draft, counter = pool(2), LoadCounter(5)
    count_loads_of([runner(draft)], counter)
    assert (draft.counter.num_layers, draft.counter.consumer_index) == (5, -1)
    draft.counter.wait_until(0)  # nothing is loaded
    index = counter.update_producer()
    assert draft.counter.consumer_index == index
    waited = threading.Thread(target=draft.counter.wait_until, args=(0,))
    waited.start()
    for _ in range(4):
        counter.complete(index)
    assert waited.is_alive()
    counter.complete(index)
    waited.join(60)
    assert not waited.is_alive()


def test_the_drafts_weights_are_in_the_digest() -> None:
    model, draft = torch.nn.Linear(2, 2), runner(pool(1))
    assert live_models(model, []) is model
    before = digest_model(live_models(model, [draft]))
    with torch.no_grad():
        draft.model.bias.add_(1)
    assert digest_model(live_models(model, [draft])) != before


@pytest.mark.parametrize("name", ["k_scale", "v_scale_float"])
def test_what_scales_the_drafts_kv_is_in_the_digest(name: str) -> None:
    """In fp8 K and V are divided by it; a module may have it as a number alone."""
    model, draft = torch.nn.Linear(2, 2), runner(pool(1))
    digests = {digest_model(live_models(model, [draft]))}
    for scale in (1.0, 0.5):
        setattr(draft.model, name, scale)
        digests.add(digest_model(live_models(model, [draft])))
    assert len(digests) == 3
