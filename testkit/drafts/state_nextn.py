"""Small models with a state a sequence and a draft layer in the same checkpoint (MTP, NEXTN).

As Qwen3-Next, Qwen3.5 and Nemotron-H are published: the draft is one layer of full attention, of
the former with experts where the model has them, beside the model's layers. Here the first of these
that has full attention decides nearly alone what is said, and the draft layer is made of it: it
guesses most tokens, as long as it sees the tokens before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.hybrids.image_model import DENSE_IMAGE_MODEL, IMAGE_MODEL, write_image_model
from testkit.hybrids.state_model import STATE_MODELS, StateModel, write_state_model

# What the other layers add to what is said, and how sharp attention is.
_OTHERS, _SHARP = 0.003, 2.0
_FIRST_FULL = 3  # the number of the first layer with full attention
_ENDS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")  # their names


@dataclass(frozen=True)
class DraftedModel:
    """A model that has a draft layer beside its own.

    Attributes:
        kind: without that.
        write: writes it into a new folder, without that.
        num_full: layers with full attention, without that.
    """

    kind: StateModel
    write: Callable[[Path], Path]
    num_full: int

    @property
    def draft_bytes(self) -> int:
        """K and V of the draft layer in a page: those of each of the model's full layers."""
        return self.kind.page_bytes // self.num_full

    @property
    def takes_images(self) -> bool:
        """Whether a prompt may have images in it."""
        return self.kind.class_name.endswith("ForConditionalGeneration")

    @property
    def page_bytes(self) -> int:
        """K and V of a page, the draft layer's behind the model's."""
        return self.kind.page_bytes + self.draft_bytes


DRAFTED_MODELS = {
    "qwen3_next": DraftedModel(
        STATE_MODELS["qwen3_next"], lambda folder: write_state_model(folder, "qwen3_next"), 2
    ),
    "qwen3_5": DraftedModel(
        STATE_MODELS["qwen3_5"], lambda folder: write_state_model(folder, "qwen3_5"), 1
    ),
    "qwen3_5_moe": DraftedModel(IMAGE_MODEL, write_image_model, 1),
    "qwen3_5_dense": DraftedModel(
        DENSE_IMAGE_MODEL, lambda folder: write_image_model(folder, DENSE_IMAGE_MODEL, seed=1), 1
    ),
    "nemotron_h": DraftedModel(
        STATE_MODELS["nemotron_h"], lambda folder: write_state_model(folder, "nemotron_h"), 2
    ),
}
_WITHOUT_NORMS = "nemotron_h"


def write_drafted_model(folder: Path, name: str) -> DraftedModel:
    """Writes configuration, weights and tokenizer into a new folder; returns what was written.

    Args:
        folder: made here.
        name: of `DRAFTED_MODELS`.
    """
    from safetensors.torch import load_file, save_file

    model = DRAFTED_MODELS[name]
    model.write(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    embeddings = next(each for each in weights if each.endswith(_EMBEDDINGS))
    root = embeddings.rpartition("embed")[0]
    layers, first_full = f"{root}layers.", f"{root}layers.{_FIRST_FULL}."
    for each, value in weights.items():
        is_other = each.startswith(layers) and not each.startswith(first_full)
        if is_other and each.endswith(_ENDS):
            value.mul_(_OTHERS)
        if each.endswith("q_norm.weight"):  # what it scales by is one more
            value.fill_(_SHARP)
    if name == _WITHOUT_NORMS:
        weights[f"{first_full}mixer.q_proj.weight"].mul_(_SHARP)
        _say_so(folder / "config.json")
        weights |= _nemotron_draft(weights, root, first_full)
    else:
        weights |= _qwen_draft(weights, root, first_full)
    save_file(weights, path, metadata={"format": "pt"})
    return model


def _qwen_draft(weights: dict[str, Any], root: str, first_full: str) -> dict[str, Any]:
    """The draft layer: the first one with full attention, of the embedding of the next token."""
    import torch

    found = _layer_again(weights, first_full)
    found["mtp.fc.weight"] = _of_embedding(weights[f"{root}embed_tokens.weight"])
    found["mtp.norm.weight"] = weights[f"{root}norm.weight"].clone()
    hidden = len(found["mtp.norm.weight"])
    for name in ("embedding", "hidden"):
        found[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(hidden)
    return found


def _nemotron_draft(weights: dict[str, Any], root: str, first_full: str) -> dict[str, Any]:
    """The same of a layer that is attention and nothing else."""
    import torch

    found = _layer_again(weights, first_full)
    found["mtp.layers.0.eh_proj.weight"] = _of_embedding(weights[f"{root}embeddings.weight"])
    found["mtp.layers.0.final_layernorm.weight"] = weights[f"{root}norm_f.weight"].clone()
    for name in ("enorm", "hnorm"):
        found[f"mtp.layers.0.{name}.weight"] = torch.ones(len(weights[f"{root}norm_f.weight"]))
    return found


def _layer_again(weights: dict[str, Any], first_full: str) -> dict[str, Any]:
    return {
        "mtp.layers.0." + name.removeprefix(first_full): value.clone()
        for name, value in weights.items()
        if name.startswith(first_full)
    }


def _of_embedding(embeddings: Any) -> Any:
    """Takes the embedding of the next token as it is, and nothing of the target's hidden state."""
    import torch

    hidden, scale = embeddings.shape[1], float(embeddings.square().mean().sqrt())
    return torch.cat([torch.eye(hidden) * scale, torch.zeros(hidden, hidden)], 1)


def _say_so(path: Path) -> None:
    """Says in a Nemotron-H's configuration that it has a draft layer, which is attention."""
    config = json.loads(path.read_text())
    config.pop("mtp_layers_block_type")
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    path.write_text(json.dumps(config, indent=2))
