"""Qwen3.5 as it is published, dense and with experts: with an encoder of images.

Its weights are random and small, in the format of transformers. An image's tokens lie on three axes
of the rotation; a token stands for 28 pixels' square.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from testkit.hybrids.state_model import COMMON, StateModel, write_model
from testkit.images.tokens import add_tokens
from testkit.images.vision_model import SPECIAL, TOKEN_IDS, TOKEN_SIDE, VOCABULARY
from testkit.published_model import class_of_transformers

_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 1024 * TOKEN_SIDE**2, "shortest_edge": TOKEN_SIDE**2},
    "patch_size": TOKEN_SIDE // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _config(name: str, num_groups: int = 1, **fields: Any) -> Any:
    """The configuration of a class of transformers, with these fields of the text beside others.

    Args:
        name: of the class.
        num_groups: of three layers with a state and one with full attention.
        fields: see above.
    """
    text = {
        **COMMON,
        **fields,
        "vocab_size": VOCABULARY + len(SPECIAL),
        "num_hidden_layers": 4 * num_groups,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * num_groups,
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
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
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 64,
        "patch_size": TOKEN_SIDE // 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "initializer_range": 0.1,
    }  # fmt: skip
    return class_of_transformers(name)(
        text_config=text,
        vision_config=images,
        **TOKEN_IDS,
        tie_word_embeddings=False,
    )


def _kind(name: str, num_groups: int = 1, **fields: Any) -> StateModel:
    num_states = 3 * num_groups
    return StateModel(
        partial(_config, f"{name}Config", num_groups, **fields), f"{name}ForConditionalGeneration",
        page_values=num_groups * 2 * 64 * 2 * 64,
        conv_values=num_states * 3 * (3 * 4 * 32), matrix_values=num_states * 4 * 32 * 32,
    )  # fmt: skip


# Each token takes all experts: two computations that differ by rounding choose the same.
IMAGE_MODEL = _kind(
    "Qwen3_5Moe",
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=2,
    num_experts_per_tok=2,
)
DENSE_IMAGE_MODEL = _kind("Qwen3_5", intermediate_size=256)
# Of which each of two pipeline stages has layers of both kinds.
DEEP_IMAGE_MODEL = _kind("Qwen3_5", 2, intermediate_size=256)


def write_image_model(folder: Path, kind: StateModel = IMAGE_MODEL, *, seed: int = 0) -> Path:
    """Writes configuration, weights, tokenizer and image processor into a new folder; returns it.

    Args:
        folder: made here.
        kind: with experts or dense.
        seed: of the weights.
    """
    write_model(folder, kind, seed=seed)
    add_tokens(folder, SPECIAL)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # As published. SGLang's default is others, whose weights nobody would fill.
    config["vision_config"]["deepstack_visual_indexes"] = []
    path.write_text(json.dumps(config, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    return folder
