"""A small InternVL with random weights: an image is one to twelve tiles and one of the whole.

transformers has no class of this format, so its tensors are written by their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from testkit.images.tokens import add_tokens
from testkit.images.vision_model import VOCABULARY
from testkit.published_model import copy_tokenizer

IMAGE = "<image>"
_SPECIAL = {
    "<img>": VOCABULARY,
    "</img>": VOCABULARY + 1,
    "<IMG_CONTEXT>": VOCABULARY + 2,
    "<|video_pad|>": VOCABULARY + 3,
}
_TILE = 448  # SGLang's, in pixels
_PATCH = 56  # so that a tile is 16 tokens
_HIDDEN, _MIDDLE, _LAYERS = 128, 256, 4
_VISION_HIDDEN, _VISION_MIDDLE, _VISION_LAYERS = 64, 128, 2
_CONFIG = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": _TILE,
    "max_dynamic_patch": 12,
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "use_thumbnail": True,
    "torch_dtype": "float32",
    "llm_config": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "vocab_size": VOCABULARY + len(_SPECIAL), "hidden_size": _HIDDEN,
        "intermediate_size": _MIDDLE, "num_hidden_layers": _LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "float32",
    },
    "vision_config": {
        "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "image_size": _TILE,
        "patch_size": _PATCH, "hidden_size": _VISION_HIDDEN, "intermediate_size": _VISION_MIDDLE,
        "num_hidden_layers": _VISION_LAYERS, "num_attention_heads": 2, "norm_type": "layer_norm",
        "qk_normalization": False, "qkv_bias": True, "hidden_act": "gelu", "torch_dtype": "float32",
    },
}  # fmt: skip

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_internvl(folder: Path) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    copy_tokenizer(folder)
    add_tokens(folder, _SPECIAL)
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in (*_of_vision(), *_of_text()):
        if name.endswith((".ls1", ".ls2")) or ("norm" in name and name.endswith("weight")):
            weights[name] = torch.ones(shape)
        else:  # so that answers depend on every token
            weights[name] = 0.1 * torch.randn(shape, generator=random)
    save_file(weights, folder / "model.safetensors")
    return folder


def _of_vision() -> Shapes:
    """Names and shapes of the encoder's tensors, and of those between it and the text."""
    hidden, middle = _VISION_HIDDEN, _VISION_MIDDLE
    embeddings = "vision_model.embeddings"
    yield f"{embeddings}.class_embedding", (1, 1, hidden)
    yield f"{embeddings}.patch_embedding.weight", (hidden, 3, _PATCH, _PATCH)
    yield f"{embeddings}.patch_embedding.bias", (hidden,)
    yield f"{embeddings}.position_embedding", (1, (_TILE // _PATCH) ** 2 + 1, hidden)
    for layer in range(_VISION_LAYERS):
        at = f"vision_model.encoder.layers.{layer}"
        yield from _linear(f"{at}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{at}.attn.proj", hidden, hidden)
        yield from _linear(f"{at}.mlp.fc1", middle, hidden)
        yield from _linear(f"{at}.mlp.fc2", hidden, middle)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1", "ls2"):
            yield f"{at}.{name}", (hidden,)
    yield "mlp1.0.weight", (4 * hidden,)
    yield "mlp1.0.bias", (4 * hidden,)
    yield from _linear("mlp1.1", _HIDDEN, 4 * hidden)
    yield from _linear("mlp1.3", _HIDDEN, _HIDDEN)


def _of_text() -> Shapes:
    """Names and shapes of the text model's tensors."""
    vocabulary = VOCABULARY + len(_SPECIAL)
    yield "language_model.model.embed_tokens.weight", (vocabulary, _HIDDEN)
    yield "language_model.lm_head.weight", (vocabulary, _HIDDEN)
    yield "language_model.model.norm.weight", (_HIDDEN,)
    for layer in range(_LAYERS):
        at = f"language_model.model.layers.{layer}"
        yield from _linear(f"{at}.self_attn.q_proj", _HIDDEN, _HIDDEN)
        yield from _linear(f"{at}.self_attn.k_proj", _HIDDEN // 2, _HIDDEN)
        yield from _linear(f"{at}.self_attn.v_proj", _HIDDEN // 2, _HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{at}.mlp.gate_proj.weight", (_MIDDLE, _HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (_MIDDLE, _HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (_HIDDEN, _MIDDLE)
        yield f"{at}.input_layernorm.weight", (_HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (_HIDDEN,)


def _linear(name: str, num_out: int, num_in: int) -> Shapes:
    yield f"{name}.weight", (num_out, num_in)
    yield f"{name}.bias", (num_out,)
