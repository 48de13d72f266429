"""A small model with state-space layers and random weights, in the format of transformers.

Granite 4's architecture without experts: Mamba2 and full attention in turn, no rotary embedding.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from testkit.server import TINYLM

VOCAB = 4096
# 1: a state-space layer, 0: full attention.
PATTERN = (1, 1, 0, 1, 1, 0, 1)
CHUNK = 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_state_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        seed: of the weights.
    """
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=len(PATTERN),
        layer_types=["mamba" if kind else "attention" for kind in PATTERN],
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_multiplier=32**-0.5,
        max_position_embeddings=2048,
        position_embedding_type=None,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=CHUNK,
        initializer_range=0.1,  # answers that depend on every token; with 0.02 all are as likely
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype=torch.float32,
    )
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(TINYLM / name, folder / name)
    return folder
