"""A small Qwen3-Next with a draft layer in the same checkpoint (MTP, NEXTN).

As it is published: the draft is one layer of full attention with experts, beside the model's
layers. Here the first of these that has full attention decides nearly alone what is said, and the
draft layer is made of it: it guesses most tokens, as long as it sees the tokens before.
"""

from __future__ import annotations

import json
from pathlib import Path

from testkit.hybrids.state_model import STATE_MODELS, write_state_model

KIND = STATE_MODELS["qwen3_next"]
# K and V of the draft layer are those of each of the model's full layers.
_NUM_FULL = 2
PAGE_BYTES = KIND.page_bytes // _NUM_FULL * (_NUM_FULL + 1)
DRAFT_BYTES = PAGE_BYTES - KIND.page_bytes
# What the other layers add to what is said, and how sharp attention is.
_OTHERS, _SHARP = 0.003, 2.0
_FIRST_FULL = "model.layers.3."
_ENDS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")


def write_state_nextn_model(folder: Path) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    write_state_model(folder, "qwen3_next")
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, value in weights.items():
        is_other = name.startswith("model.layers.") and not name.startswith(_FIRST_FULL)
        if is_other and name.endswith(_ENDS):
            value.mul_(_OTHERS)
        if name.endswith("q_norm.weight"):  # what it scales by is one more
            value.fill_(_SHARP)
    for name, value in list(weights.items()):
        if name.startswith(_FIRST_FULL):
            weights["mtp.layers.0." + name.removeprefix(_FIRST_FULL)] = value.clone()
    scale = float(weights["model.embed_tokens.weight"].square().mean().sqrt())
    of_embedding = torch.eye(hidden) * scale
    weights["mtp.fc.weight"] = torch.cat([of_embedding, torch.zeros(hidden, hidden)], 1)
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    for name in ("embedding", "hidden"):
        weights[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(hidden)
    save_file(weights, path, metadata={"format": "pt"})
    return folder
