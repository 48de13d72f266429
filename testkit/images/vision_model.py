"""A small model that sees images (Qwen2.5-VL), with random weights, and pictures to show it.

Its attention is plain, its rotation of three axes: where a token is depends on the images before.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from testkit.images.tokens import add_tokens
from testkit.published_model import copy_tokenizer, seeded

NUM_LAYERS = 4
VOCABULARY = 4096  # of the bundled tokenizer; what stands for images is behind it
SPECIAL = {
    "<|vision_start|>": VOCABULARY,
    "<|vision_end|>": VOCABULARY + 1,
    "<|image_pad|>": VOCABULARY + 2,
    "<|video_pad|>": VOCABULARY + 3,
}
# As configurations of transformers name them.
TOKEN_IDS = {
    f"{name}_token_id": SPECIAL[token]
    for name, token in (
        ("vision_start", "<|vision_start|>"), ("vision_end", "<|vision_end|>"),
        ("image", "<|image_pad|>"), ("video", "<|video_pad|>"),
    )
}  # fmt: skip
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
# As that of the published model.
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}" + IMAGE + "{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Pixels of an image's side that one of its tokens stands for.
TOKEN_SIDE = 28
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": TOKEN_SIDE**2,
    "max_pixels": 1024 * TOKEN_SIDE**2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_vision_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights, tokenizer and image processor into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    with seeded(seed):
        model = Qwen2_5_VLForConditionalGeneration(_config())
    return write_qwen_vl(folder, model, "Qwen2_5_VLProcessor")


def write_qwen_vl(folder: Path, model: Any, processor: str) -> Path:
    """Writes a model of Qwen's with what its images need; returns its folder.

    Args:
        folder: made here.
        model: of transformers.
        processor: the class that makes its input.
    """
    import torch

    model.to(torch.float32).save_pretrained(folder)
    copy_tokenizer(folder)
    add_tokens(folder, SPECIAL)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    images = {**_PROCESSOR, "processor_class": processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def picture(seed: int, *, width: int = 8, height: int = 8) -> str:
    """A picture of random colours, as a data URL.

    Args:
        seed: of its colours.
        width: in tokens.
        height: in tokens.
    """
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    large = colours.repeat(TOKEN_SIDE, axis=0).repeat(TOKEN_SIDE, axis=1)
    file = io.BytesIO()
    Image.fromarray(large).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _config() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": VOCABULARY + len(SPECIAL),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,  # answers that depend on every token
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6],
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
        "out_hidden_size": 128, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [1],
        "tokens_per_second": 2, "in_channels": 3, "initializer_range": 0.1,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        **TOKEN_IDS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
