"""A small model with sliding-window layers and random weights, in the format of transformers.

Mellum's architecture with dense layers: window and full attention in turn, a rotary base each, and
norms of q and k. SGLang gives its window layers a KV pool of their own, as those of gpt-oss
(`oss_model.py`), which has sinks and experts, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testkit.published_model import copy_tokenizer, seeded

WINDOW = 128
VOCAB = 4096
# 1: a window layer, 0: a full one.
PATTERN = (1, 1, 0, 1, 1, 0, 1)


def write_window_model(
    folder: Path, *, window: int = WINDOW, seed: int = 0, pattern: Sequence[int] = PATTERN
) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        window: tokens that a window layer sees, its own among them.
        seed: of the weights.
        pattern: of the layers; see `PATTERN`.
    """
    import torch
    from transformers import MellumConfig, MellumForCausalLM

    config = MellumConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(pattern),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,  # answers that depend on every token; with 0.02 all are as likely
        sliding_window=window,
        layer_types=["sliding_attention" if kind else "full_attention" for kind in pattern],
        mlp_layer_types=["dense"] * len(pattern),
        bos_token_id=0,
        eos_token_id=1,
        dtype=torch.bfloat16,
    )
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed):
        MellumForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder
