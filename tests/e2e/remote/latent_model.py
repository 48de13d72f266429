"""A small model with one latent row a token (MLA) and random weights.

MiniCPM 3's architecture: SGLang absorbs its up-projection, so that attention on a CPU sees one head
of the latent row's width, as kernels for MLA do. Its configuration is written as DeepSeek V2's,
which has the same fields and which transformers knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from testkit.published_model import write_random_model

LAYERS, LATENT, ROTARY = 3, 128, 32
_HIDDEN, _HEADS, _INNER, _QUERY, _PLAIN, _VOCAB = 256, 4, 512, 96, 32, 4096
_VALUE = _HIDDEN // _HEADS
CONFIG = {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
    "vocab_size": _VOCAB, "hidden_size": _HIDDEN, "intermediate_size": _INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
    "q_lora_rank": _QUERY, "kv_lora_rank": LATENT, "qk_nope_head_dim": _PLAIN,
    "qk_rope_head_dim": ROTARY, "v_head_dim": _VALUE, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "scale_emb": 1.0, "scale_depth": 1.4, "dim_model_base": _HIDDEN,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
_ATTENTION = {
    "q_a_proj": (_QUERY, _HIDDEN),
    "q_b_proj": (_HEADS * (_PLAIN + ROTARY), _QUERY),
    "kv_a_proj_with_mqa": (LATENT + ROTARY, _HIDDEN),
    "kv_b_proj": (_HEADS * (_PLAIN + _VALUE), LATENT),
    "o_proj": (_HIDDEN, _HEADS * _VALUE),
}
_MLP = {
    "gate_proj": (_INNER, _HIDDEN),
    "up_proj": (_INNER, _HIDDEN),
    "down_proj": (_HIDDEN, _INNER),
}


def write_latent_model(folder: Path) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it."""
    shapes = ((f"{name}.weight", shape) for name, shape in _shapes())
    return write_random_model(folder, CONFIG, shapes)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("model.embed_tokens", (_VOCAB, _HIDDEN)), ("lm_head", (_VOCAB, _HIDDEN)))
    yield "model.norm", (_HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}", (_HIDDEN,)
        yield f"{prefix}.self_attn.q_a_layernorm", (_QUERY,)
        yield f"{prefix}.self_attn.kv_a_layernorm", (LATENT,)
        yield from ((f"{prefix}.self_attn.{name}", shape) for name, shape in _ATTENTION.items())
        yield from ((f"{prefix}.mlp.{name}", shape) for name, shape in _MLP.items())
