"""A small Qwen3-VL with random weights: its first layers are given of an image's tokens more.

Beside what the encoder makes of an image in the end, what two of its layers made of it is added
behind the model's first two layers. Its rotation is of three axes that take turns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.images.vision_model import (
    NUM_LAYERS,
    SPECIAL,
    TOKEN_IDS,
    VOCABULARY,
    write_qwen_vl,
)
from testkit.published_model import class_of_transformers, seeded

_VIDEOS = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 14}
_VIDEOS |= {"temporal_patch_size": 2, "merge_size": 2}


def write_qwen3_vl(folder: Path) -> Path:
    """Writes it into a new folder; returns it. A token stands for 28 pixels' square."""
    with seeded(0):
        model = class_of_transformers("Qwen3VLForConditionalGeneration")(_config())
    write_qwen_vl(folder, model, "Qwen3VLProcessor")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(_VIDEOS))
    return folder


def _config() -> Any:
    rope = {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        "vocab_size": VOCABULARY + len(SPECIAL), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
        "initializer_range": 0.1,  # answers that depend on every token
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": 128, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1], "initializer_range": 0.1,
    }  # fmt: skip
    return class_of_transformers("Qwen3VLConfig")(
        text_config=text,
        vision_config=vision,
        **TOKEN_IDS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
