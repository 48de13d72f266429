"""Small models whose window layers have K and V of other shapes than the full ones, random weights.

Gemma 4 with what its published sizes have between them: heads of other sizes and numbers in window
and full layers, V made of K in the full ones, embeddings a layer, and last layers that read the KV
of earlier ones. MiMo V2 with K wider than V and sinks in its window layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.published_model import PublishedModel, copy_tokenizer, seeded

WINDOW = 128
_NAMES = {"s": "sliding_attention", "f": "full_attention"}
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # answers that depend on every token
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ShapedModel(PublishedModel):
    """An architecture, and what SGLang keeps of it.

    Attributes:
        full_values: K and V of a token in all full layers that have KV of their own.
        window_values: the same of the window layers.
        publish: completes a folder that transformers wrote to what is published.
    """

    full_values: int
    window_values: int
    publish: Callable[[Path], None]


def _gemma() -> Any:
    """Seven layers with KV of their own, two of them full; three that read it."""
    from transformers import Gemma4Config

    pattern = "sssfssf" + "ssf"
    text = {
        **_COMMON,
        "num_hidden_layers": len(pattern),
        "layer_types": [_NAMES[kind] for kind in pattern],
        "num_key_value_heads": 4,
        "head_dim": 32,
        "global_head_dim": 48,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 4096,
        "tie_word_embeddings": True,
    }
    images = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "position_embedding_size": 64,
    }  # fmt: skip
    return Gemma4Config(
        text_config=text, vision_config=images,
        boi_token_id=4096, eoi_token_id=4097, image_token_id=4098, video_token_id=4099,
        boa_token_id=4100, eoa_token_index=4101, audio_token_id=4102,
    )  # fmt: skip


def _publish_gemma(folder: Path) -> None:
    """SGLang wants what prepares images and sound, which nothing here uses."""
    parts = {
        "processor_class": "Gemma4Processor",
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor"},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    }
    (folder / "processor_config.json").write_text(json.dumps(parts))
    _fill_sharing_layers(folder)
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["extra_special_tokens"] = {
        "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))


def _fill_sharing_layers(folder: Path) -> None:
    """Weights of K and V, which nobody uses, for the layers that read the KV of others.

    Published weights have them and transformers writes none. SGLang has room for them, and would
    leave there what was in memory.
    """
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text())["text_config"]
    path = folder / "model.safetensors"
    tensors, kinds = load_file(path), text["layer_types"]
    for layer in range(len(kinds) - text["num_kv_shared_layers"], len(kinds)):
        own = f"layers.{kinds.index(kinds[layer])}.self_attn."
        for name in [name for name in tensors if own in name]:
            if ".k_" in name or ".v_" in name:
                tensors[name.replace(own, f"layers.{layer}.self_attn.")] = tensors[name].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _mimo() -> Any:
    """Four full layers and five with a window; keys of 48 values and values of 32."""
    from transformers import MiMoV2FlashConfig

    pattern = "fsfssfssf"
    return MiMoV2FlashConfig(
        **_COMMON,
        num_hidden_layers=len(pattern),
        layer_types=[_NAMES[kind] for kind in pattern],
        mlp_layer_types=["dense"] * len(pattern),
        num_key_value_heads=2,
        head_dim=48,
        v_head_dim=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )


# As with the published weights; of transformers' own class SGLang cannot read the rotations.
_MIMO_CONFIG = """
from transformers import PretrainedConfig


class MiMoV2FlashConfig(PretrainedConfig):
    model_type = "mimo_v2_flash"
"""


def _publish_mimo(folder: Path) -> None:
    """The published names, which transformers reads and does not write, and their class."""
    (folder / "configuration_mimo_v2_flash.py").write_text(_MIMO_CONFIG)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")  # which are transformers' defaults
    config |= {
        "auto_map": {"AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig"},
        "hybrid_layer_pattern": [int(kind == _NAMES["s"]) for kind in config["layer_types"]],
        "moe_layer_freq": [0] * config["num_hidden_layers"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": WINDOW - 1,
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": config["rms_norm_eps"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(config))


SHAPED_MODELS = {
    "gemma": ShapedModel(
        _gemma,
        "Gemma4ForConditionalGeneration",
        full_values=2 * 2 * 2 * 48,
        window_values=5 * 2 * 4 * 32,
        publish=_publish_gemma,
    ),
    "mimo": ShapedModel(
        _mimo,
        "MiMoV2FlashForCausalLM",
        full_values=4 * 2 * (48 + 32),
        window_values=5 * 4 * (48 + 32),
        publish=_publish_mimo,
    ),
}


def write_shaped_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        name: a key of `SHAPED_MODELS`.
        seed: of the weights.
    """
    import torch

    kind = SHAPED_MODELS[name]
    config = kind.make_config()
    config.dtype = torch.bfloat16
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed):
        model = kind.model_class()(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    kind.publish(folder)
    return folder
