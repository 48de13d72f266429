"""A small GLM-4.5 with a draft layer in the same checkpoint (MTP, NEXTN), and random weights.

As published, but for sizes: K and V of every head, norms of Q and K, half of each head rotated,
layers without experts in front of those with any. Each token takes all experts: two computations
that differ by rounding choose the same. The draft layer is made as that of `nextn.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit.drafts.nextn import add_draft_layer
from testkit.published_model import write_random_model

LAYERS, KV_HEADS, HEAD_DIM = 6, 2, 64
_HIDDEN, _HEADS, _INNER, _EXPERT_INNER, _EXPERTS, _DENSE, _VOCAB = 256, 4, 512, 64, 4, 4, 4096
_CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu",
    "vocab_size": _VOCAB, "hidden_size": _HIDDEN, "intermediate_size": _INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "attention_bias": True,
    "use_qk_norm": True, "tie_word_embeddings": False, "first_k_dense_replace": _DENSE,
    "n_routed_experts": _EXPERTS, "n_shared_experts": _INNER // _EXPERT_INNER,
    "num_experts_per_tok": _EXPERTS, "moe_intermediate_size": _EXPERT_INNER, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_PROJECTIONS = {"q": _HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}


def write_drafted_glm_model(folder: Path) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
    """
    write_random_model(folder, _CONFIG, _shapes())
    add_draft_layer(folder, _CONFIG, sharp=("q_norm.weight",))
    return folder


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (_VOCAB, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (_HIDDEN,)
        for name, width in _PROJECTIONS.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (width, _HIDDEN)
            yield f"{prefix}.self_attn.{name}_proj.bias", (width,)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * HEAD_DIM)
        if layer < _DENSE:
            yield from _mlp(f"{prefix}.mlp", _INNER)
            continue
        yield f"{prefix}.mlp.gate.weight", (_EXPERTS, _HIDDEN)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (_EXPERTS,)
        yield from _mlp(f"{prefix}.mlp.shared_experts", _INNER)
        for expert in range(_EXPERTS):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", _EXPERT_INNER)


def _mlp(prefix: str, inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{prefix}.gate_proj.weight", (inner, _HIDDEN)
    yield f"{prefix}.up_proj.weight", (inner, _HIDDEN)
    yield f"{prefix}.down_proj.weight", (_HIDDEN, inner)
