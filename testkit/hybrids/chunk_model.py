"""A small model with layers that see a chunk of the sequence, and random weights (Llama 4).

Three of four layers rotate, norm q and k, and see their own chunk; each fourth does nothing of the
kind and sees everything, with a temperature that depends on the position. SGLang keeps the KV of
the first three in a pool of their own, as that of windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.published_model import copy_tokenizer, seeded

# No multiple of a page: chunks begin within pages.
CHUNK = 160
NUM_LAYERS = 8
NUM_FULL_LAYERS = NUM_LAYERS // 4


def write_chunk_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    config = Llama4Config(
        text_config=_text_config(),
        vision_config={
            "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
            "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed):
        model = Llama4ForConditionalGeneration(config)
    for parameter in model.parameters():  # not the images' rotations, which are complex
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def open_chunk_model(folder: Path) -> Any:
    """The model that `write_chunk_model` wrote, by transformers, in float32."""
    import torch
    from transformers import Llama4ForConditionalGeneration

    return Llama4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def _text_config() -> dict[str, Any]:
    return {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,  # answers that depend on every token
        "interleave_moe_layer_step": 100,  # no experts, here and in SGLang
        "moe_layers": [],
        "num_local_experts": 2,
        "attention_chunk_size": CHUNK,
        "floor_scale": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
