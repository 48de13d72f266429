"""Qwen3.5 as it is published: with experts, and with an encoder of images, which nothing here uses.

Its weights are random and small, in the format of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.hybrids.state_model import COMMON, StateModel, write_model

_LAYERS = 4
_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 65536, "shortest_edge": 1024},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _config() -> Any:
    """Each token takes all experts: two computations that differ by rounding choose the same."""
    from transformers import Qwen3_5MoeConfig

    text = {
        **COMMON,
        "num_hidden_layers": _LAYERS,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    images = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return Qwen3_5MoeConfig(
        text_config=text,
        vision_config=images,
        image_token_id=10,
        video_token_id=11,
        vision_start_token_id=12,
        vision_end_token_id=13,
        tie_word_embeddings=False,
    )


IMAGE_MODEL = StateModel(
    _config, "Qwen3_5MoeForConditionalGeneration",
    page_values=1 * 2 * 64 * 2 * 64,
    conv_values=3 * 3 * (3 * 4 * 32), matrix_values=3 * 4 * 32 * 32,
)  # fmt: skip


def write_image_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights, tokenizer and image processor into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    write_model(folder, IMAGE_MODEL, seed=seed)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # As published. SGLang's default is others, whose weights nobody would fill.
    config["vision_config"]["deepstack_visual_indexes"] = []
    path.write_text(json.dumps(config, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    return folder
