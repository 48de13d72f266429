"""What a model's pages and states will take of memory at least, from its configuration.

Before the weights load there are no pools to look at. What is said here is never more than what
the pools will have: where the configuration does not say it, nothing is.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.device.layout import PageLayout

# Of a pool's values, by SGLang's names of what is no "auto".
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def page_tokens(server_args: Any) -> int:
    """Tokens of a page. Some attention backends have pages of their own size (FA4: 128).

    What SGLang makes of an argument is not in its record, which has what was given.

    Args:
        server_args: SGLang's, resolved.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    return int(resolution_result(server_args, "page_size"))


def attention_backends(server_args: Any) -> set[str]:
    """Which attention backends write KV, a draft model's included, as far as they are named.

    Args:
        server_args: SGLang's, resolved.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    common = resolution_result(server_args, "attention_backend")
    phases = ("prefill_attention_backend", "decode_attention_backend")
    own = {resolution_result(server_args, phase) or common for phase in phases}
    drafting = resolution_result(server_args, "speculative_draft_attention_backend")
    return {str(backend) for backend in (*own, drafting) if backend}


def pool_dtype(server_args: Any, model_config: Any) -> torch.dtype | None:
    """Of the pool's values; None where only the weights' configuration says it.

    Args:
        server_args: SGLang's, resolved.
        model_config: SGLang's ``ModelConfig``.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    name = resolution_result(server_args, "kv_cache_dtype")
    if name != "auto":
        return _DTYPES.get(name)
    dtype: torch.dtype = model_config.dtype
    return None if model_config.quantization else dtype


def expected_layout(
    model_config: Any, page_size: int, num_ranks: int, item_bytes: int
) -> PageLayout:
    """Pages of the layers with full attention, or of all layers where there are no others.

    Without room for corrections and without the layers of a draft model.

    Args:
        model_config: SGLang's ``ModelConfig``.
        page_size: tokens.
        num_ranks: tensor parallel ranks that share the heads.
        item_bytes: of one value of the pool.
    """
    from sglang.srt.configs.model_config import AttentionArch

    num = _num_layers(model_config)
    if model_config.attention_arch == AttentionArch.MLA:
        k, v = model_config.kv_lora_rank + model_config.qk_rope_head_dim, 0
    else:
        heads = model_config.get_num_kv_heads(num_ranks)
        k, v = heads * model_config.head_dim, heads * model_config.v_head_dim
    rows = (k * item_bytes,) * num, (v * item_bytes,) * num
    return PageLayout(page_size, *rows, item_bytes, is_bound=True)


def window_rows(model_config: Any, num_ranks: int, item_bytes: int) -> tuple[int, int]:
    """Bytes of K and of V that a window layer has of a token.

    Arguments as above.
    """
    heads = model_config.get_swa_num_kv_heads(num_ranks)
    k, v = model_config.swa_head_dim, model_config.swa_v_head_dim
    return heads * k * item_bytes, heads * v * item_bytes


def state_bytes(model_config: Any) -> int:
    """Bytes of a sequence's state in all layers, of this rank; 0 of a model without.

    SGLang tells it in a process whose ranks are known.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model_config)
    return 0 if config is None else int(config.mamba2_cache_params.mamba_cache_per_req)


def _num_layers(model_config: Any) -> int:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config, states = model_config.hf_text_config, mambaish_config(model_config)
    if states is not None:
        return len(list(states.full_attention_layer_ids))
    if model_config.is_hybrid_swa:
        num_own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        return sum(layer < num_own for layer in model_config.full_attention_layer_ids)
    # More than the model has where it runs layers several times, or has two attentions in each.
    num_attention = getattr(model_config, "num_attention_layers", None) or 0
    return max(int(config.num_hidden_layers), int(num_attention))
