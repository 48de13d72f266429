"""A small Kimi K3 as it is published: with an encoder of images, and a processor in code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit.images.tokens import add_tokens

PATTERN = "MMM*MMM*"  # KDA, and latent rows
_IMAGE_TOKEN = {"<|media_pad|>": 4096}
_PATCH, _MERGED = 14, 2
_IMAGES: dict[str, Any] = {
    "patch_size": _PATCH, "merge_kernel_size": [_MERGED, _MERGED], "init_pos_emb_height": 8,
    "init_pos_emb_width": 8, "vt_hidden_size": 64, "vt_intermediate_size": 128,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "qkv_hidden_size": 64,
    "mm_hidden_size": 64,
}  # fmt: skip
_PROCESSING = {
    "patch_size": _PATCH, "merge_kernel_size": _MERGED, "in_patch_limit": 1024,
    "patch_limit_on_one_side": 64, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
# As with the published weights, as far as SGLang asks it of prompts without images.
_PROCESSOR = f"""
from types import SimpleNamespace

from transformers import AutoTokenizer


class KimiK3Processor:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.media_processor = SimpleNamespace(media_proc_cfg={_PROCESSING!r})
        self.image_processor = self.media_processor

    @classmethod
    def register_for_auto_class(cls, *args):
        pass

    @classmethod
    def from_pretrained(cls, folder, *args, **kwargs):
        return cls(AutoTokenizer.from_pretrained(folder))
"""


def k3_config(common: Mapping[str, Any]) -> Any:
    """The configuration, with these fields of the text beside others.

    Each token takes all experts: two computations that differ by rounding choose the same.
    """
    from testkit.hybrids.k3_layers import KimiK3Config

    layers = list(enumerate(PATTERN, 1))
    text = {
        **common,
        "vocab_size": common["vocab_size"] + 64,
        "model_type": "kimi_linear",
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": len(PATTERN),
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [number for number, kind in layers if kind == "M"],
            "full_attn_layers": [number for number, kind in layers if kind == "*"],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "num_experts": 2,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,  # SGLang applies none on a CPU
    }
    (image_token,) = _IMAGE_TOKEN.values()
    return KimiK3Config(
        text_config=text,
        vision_config=_IMAGES,
        media_placeholder_token_id=image_token,
        **{name: common[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def k3_class() -> Any:
    """The model's class."""
    from testkit.hybrids.k3_layers import KimiK3ForConditionalGeneration

    return KimiK3ForConditionalGeneration


def add_processor(folder: Path) -> None:
    """Gives a folder with a tokenizer the processor, and the token of an image."""
    add_tokens(folder, _IMAGE_TOKEN)
    name = "processing_kimi_k3"
    (folder / f"{name}.py").write_text(_PROCESSOR)
    auto = {"auto_map": {"AutoProcessor": f"{name}.KimiK3Processor"}}
    (folder / "preprocessor_config.json").write_text(json.dumps(auto))
