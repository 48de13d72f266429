"""Small models with rows of an index beside the latent row of a token, and random weights.

An index chooses the few tokens that a token attends to: fewer than a prompt has, so a wrong row of
it changes the answer. As in GLM-5, of whose layers some take the choice of the one before them and
have no rows of their own, or as in DeepSeek V3.2, where each layer has an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit.published_model import write_random_model

TOP_K = 48
LATENT, ROTARY, INDEX_HEADS, INDEX_DIM = 128, 64, 4, 128
LAYERS = 6
_HIDDEN, _HEADS, _INNER, _QUERY, _PLAIN, _VALUE, _VOCAB = 256, 4, 512, 96, 32, 64, 4096
_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "vocab_size": _VOCAB, "hidden_size": _HIDDEN,
    "intermediate_size": _INNER, "num_hidden_layers": LAYERS, "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS, "q_lora_rank": _QUERY, "kv_lora_rank": LATENT,
    "qk_nope_head_dim": _PLAIN, "qk_rope_head_dim": ROTARY, "v_head_dim": _VALUE,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "first_k_dense_replace": LAYERS, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "index_topk": TOP_K,
    "index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    # SGLang has no other rotation of such a model on a CPU.
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip
_SHARED = ["full", "shared", "shared", "full", "shared", "full"]
CONFIGS: dict[str, dict[str, Any]] = {
    "glm": {
        **_COMMON, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "indexer_types": _SHARED, "indexer_rope_interleave": True,
    },
    "deepseek": {
        **_COMMON, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    },
}  # fmt: skip
_ATTENTION = {
    "q_a_proj": (_QUERY, _HIDDEN),
    "q_b_proj": (_HEADS * (_PLAIN + ROTARY), _QUERY),
    "kv_a_proj_with_mqa": (LATENT + ROTARY, _HIDDEN),
    "kv_b_proj": (_HEADS * (_PLAIN + _VALUE), LATENT),
    "o_proj": (_HIDDEN, _HEADS * _VALUE),
}
_INDEXER = {
    "wq_b": (INDEX_HEADS * INDEX_DIM, _QUERY),
    "wk": (INDEX_DIM, _HIDDEN),
    "weights_proj": (INDEX_HEADS, _HIDDEN),
}
_MLP = {
    "gate_proj": (_INNER, _HIDDEN),
    "up_proj": (_INNER, _HIDDEN),
    "down_proj": (_HIDDEN, _INNER),
}


def index_layers(name: str) -> list[int]:
    """The layers of a model that have rows of an index."""
    kinds = CONFIGS[name].get("indexer_types", ["full"] * LAYERS)
    return [layer for layer, kind in enumerate(kinds) if kind == "full"]


def token_bytes(name: str) -> int:
    """What SGLang keeps of a token: latent rows in bfloat16, index rows in fp8 with a scale."""
    return LAYERS * (LATENT + ROTARY) * 2 + len(index_layers(name)) * (INDEX_DIM + 4)


def write_index_model(folder: Path, name: str) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        name: a key of `CONFIGS`.
    """
    return write_random_model(folder, CONFIGS[name], _shapes(index_layers(name)))


def _shapes(with_index: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (_VOCAB, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (_HIDDEN,)
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_a_layernorm.weight", (_QUERY,)
        yield f"{attention}.kv_a_layernorm.weight", (LATENT,)
        yield from ((f"{attention}.{name}.weight", shape) for name, shape in _ATTENTION.items())
        yield from ((f"{prefix}.mlp.{name}.weight", shape) for name, shape in _MLP.items())
        if layer in with_index:
            index = f"{attention}.indexer"
            yield from ((f"{index}.{name}.weight", shape) for name, shape in _INDEXER.items())
            yield from ((f"{index}.k_norm.{name}", (INDEX_DIM,)) for name in ("weight", "bias"))
