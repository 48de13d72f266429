"""A small model of Qwen's with images, and an EAGLE-3 draft that guesses much of what it says.

As the gpt-oss of `eagle3.py`: the model's first layer decides nearly alone what is said, and the
draft's one layer is made of its attention, with the rotation of three axes. It is given an image's
tokens as the encoder made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testkit.drafts.eagle3 import (
    changed_weight,
    draft_weights,
    fill_norms,
    write_eagle3_config,
)

_EMBEDDINGS = "embed_tokens.weight"


def write_drafted_vision_model(folder: Path, write: Callable[[Path], Path]) -> Path:
    """Writes a model, changed, into a new folder; returns it.

    Args:
        folder: made here.
        write: writes the model of `vision_model.py` or `qwen3_vl_model.py`.
    """
    from safetensors.torch import load_file, save_file

    path = write(folder) / "model.safetensors"
    weights = load_file(path)
    root = _root(weights)
    text = {
        name.replace(root, "model."): changed_weight(name.replace(root, "model."), value)
        for name, value in weights.items()
    }
    if "model.layers.0.self_attn.q_norm.weight" in text:
        config = json.loads((folder / "config.json").read_text())
        fill_norms(text, config["text_config"]["rms_norm_eps"])
    changed = {name: text[name.replace(root, "model.")].contiguous() for name in weights}
    save_file(changed, path, metadata={"format": "pt"})
    return folder


def write_vision_draft(folder: Path, model: Path) -> Path:
    """Writes a draft for such a model into a new folder; returns it.

    Args:
        folder: made here.
        model: the target's folder.
    """
    from safetensors.torch import load_file, save_file

    # The model has fewer layers than SGLang would choose three of.
    captured = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    write_eagle3_config(folder, model, norm_output=True, eagle_config=captured)
    weights = load_file(model / "model.safetensors")
    root = _root(weights)
    of_text = {name.replace(root, "model."): value for name, value in weights.items()}
    found = {name: value.contiguous() for name, value in draft_weights(of_text)}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _root(weights: dict[str, Any]) -> str:
    """What names of the text's weights begin with."""
    return next(name for name in weights if name.endswith(_EMBEDDINGS)).removesuffix(_EMBEDDINGS)
