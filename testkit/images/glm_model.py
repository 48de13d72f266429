"""A small GLM-4.1V with random weights: as Qwen2.5-VL, its rotation is of three axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.images.tokens import add_tokens
from testkit.images.vision_model import VOCABULARY
from testkit.published_model import class_of_transformers, copy_tokenizer, seeded

IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_SPECIAL = {
    text: VOCABULARY + at
    for at, text in enumerate((
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
        "<|image|>", "<|video|>",
    ))
}  # fmt: skip
_IMAGES = {
    "image_processor_type": "Glm4vImageProcessor",
    "processor_class": "Glm4vProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 1024 * 28 * 28},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_glm4v(folder: Path) -> Path:
    """Writes it into a new folder; returns it. A token stands for 28 pixels' square."""
    import torch

    with seeded(0):
        model = class_of_transformers("Glm4vForConditionalGeneration")(_config())
    model.to(torch.float32).save_pretrained(folder)
    copy_tokenizer(folder)
    add_tokens(folder, _SPECIAL)
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    return folder


def _config() -> Any:
    rope = {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }  # fmt: skip
    text = {
        "vocab_size": VOCABULARY + len(_SPECIAL), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "rope_parameters": rope, "partial_rotary_factor": 0.5,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
        "initializer_range": 0.1,  # answers that depend on every token
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": 128, "image_size": 336, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "initializer_range": 0.1,
    }  # fmt: skip
    names = {
        "image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>",
        "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>",
        "image": "<|image|>", "video": "<|video|>",
    }  # fmt: skip
    return class_of_transformers("Glm4vConfig")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{name}_token_id": _SPECIAL[text] for name, text in names.items()},
    )
