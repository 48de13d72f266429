"""A small Gemma 3 with random weights: window and full layers, whose KV lies in one pool.

SGLang gives its window layers no pool of their own. They rotate by another base than the full ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.published_model import class_of_transformers, copy_tokenizer, seeded

NUM_LAYERS, KV_HEADS, HEAD_DIM = 6, 2, 32
ARCHITECTURE = "Gemma3ForCausalLM"


def write_gemma_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    import torch
    from transformers import Gemma3TextConfig

    names = {"s": "sliding_attention", "f": "full_attention"}
    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        layer_types=[names[kind] for kind in "ssfssf"],
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=128,
        max_position_embeddings=2048,
        initializer_range=0.1,  # answers that depend on every token
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed):
        model = class_of_transformers(ARCHITECTURE)(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def open_gemma_model(folder: Path) -> Any:
    """The model that `write_gemma_model` wrote, by transformers, in float32."""
    import torch

    return class_of_transformers(ARCHITECTURE).from_pretrained(folder, dtype=torch.float32)
