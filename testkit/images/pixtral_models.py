"""Small models with the encoder of Pixtral: a Mistral 3, and a Pixtral in the format of LLaVA.

An image is a row of tokens for each row of its patches, with a token of the text between rows.
Their weights are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.images.tokens import add_tokens
from testkit.images.vision_model import VOCABULARY
from testkit.published_model import class_of_transformers, copy_tokenizer, seeded

_SPECIAL = {"[IMG]": VOCABULARY, "[IMG_BREAK]": VOCABULARY + 1, "[IMG_END]": VOCABULARY + 2}
IMAGE = "[IMG]"
_LONGEST = 448  # of an image's sides, in pixels
_TEXT = {
    "vocab_size": VOCABULARY + len(_SPECIAL), "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "sliding_window": None, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.1,  # answers that depend on every token
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 32, "num_channels": 3, "image_size": _LONGEST, "initializer_range": 0.1,
}  # fmt: skip


def write_mistral3(folder: Path) -> Path:
    """Writes a Mistral 3 into a new folder; returns it. A token stands for 28 pixels' square."""
    return _write(folder, "Mistral3", patch=14, merge=2, spatial_merge_size=2)


def write_pixtral(folder: Path) -> Path:
    """Writes a Pixtral into a new folder; returns it. A token stands for 28 pixels' square."""
    return _write(folder, "Llava", patch=28, merge=1, vision_feature_select_strategy="full")


def _write(folder: Path, name: str, *, patch: int, merge: int, **fields: Any) -> Path:
    import torch

    config = class_of_transformers(f"{name}Config")(
        text_config=class_of_transformers("MistralConfig")(**_TEXT),
        vision_config=class_of_transformers("PixtralVisionConfig")(**_VISION, patch_size=patch),
        image_token_index=_SPECIAL[IMAGE],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **fields,
    )
    with seeded(0):
        model = class_of_transformers(f"{name}ForConditionalGeneration")(config)
    model.to(torch.float32).save_pretrained(folder)
    copy_tokenizer(folder)
    add_tokens(folder, _SPECIAL)
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": _LONGEST},
        "patch_size": {"height": patch, "width": patch},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": patch,
        "spatial_merge_size": merge,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder
