"""A small gpt-oss with random weights, in the format of transformers.

As published, but for sizes: every other layer has a window, every head has a sink, and experts and
projections have biases. Each token takes all experts: two computations that differ by rounding
choose the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit.published_model import class_of_transformers, copy_tokenizer, seeded

NUM_LAYERS, KV_HEADS, HEAD_DIM = 8, 2, 32
NUM_FULL_LAYERS = NUM_LAYERS // 2
ARCHITECTURE = "GptOssForCausalLM"
# Of what begins as zeros, or nearly so: so large that answers depend on it.
_BIASES_STD, _SINKS_STD = 0.1, 0.5


def write_oss_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    import torch
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=128,
        num_local_experts=2,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        initializer_range=0.1,  # answers that depend on every token
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed), torch.no_grad():
        model = class_of_transformers(ARCHITECTURE)(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=_SINKS_STD)
            elif "bias" in name:
                parameter.normal_(std=_BIASES_STD)
    model.to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def open_oss_model(folder: Path) -> Any:
    """The model that `write_oss_model` wrote, by transformers, in float32."""
    import torch

    return class_of_transformers(ARCHITECTURE).from_pretrained(folder, dtype=torch.float32)
