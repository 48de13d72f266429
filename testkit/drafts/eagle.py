"""An EAGLE draft model for the bundled model, made of the bundled model itself.

EAGLE's architecture of Llama differs from Llama's in that layer 0 has no norm before its attention,
and in that there is no norm behind the last layer. So layer 0 passes on what it gets, and the
bundled model's layers follow; its last norm's weights are multiplied into the residual stream. What
the target hands over of its hidden states is left out. Such a draft guesses most of the target's
tokens as long as it sees the tokens before: its guesses fall where its own KV is lost.
"""

from __future__ import annotations

import json
from pathlib import Path

from testkit.published_model import copy_tokenizer
from testkit.server import TINYLM

# Chains of three guesses; the algorithm and the draft's path are still to be named.
DRAFTS = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
# Trees of eleven guesses, likewise three deep.
TREES = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "12"),
)
# How many guesses a chain has follows from the last verification alone: none of its guesses right,
# and the next ones are none; then one; that one right, and then three.
_STEPS = {
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
    "down_hysteresis": 0.0,
    "1": {"candidate_steps": [0, 1, 3]},
}


def adaptive(path: Path) -> list[str]:
    """Chains of none, one or three guesses, as SGLang chooses anew behind each verification.

    Args:
        path: where their configuration is written.

    Returns:
        Arguments, likewise; a server begins with chains of one.
    """
    path.write_text(json.dumps(_STEPS))
    args = ["--speculative-adaptive", "--speculative-adaptive-config", str(path)]
    args += ["--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]
    args += ["--speculative-num-draft-tokens", "2"]
    # SGLang captures graphs for each number there, on a CPU, too, where it has none else.
    return [*args, "--cuda-graph-backend-decode", "disabled"]


def write_eagle_draft(folder: Path, *, noise: float = 0.0) -> Path:
    """Writes configuration and weights into a new folder; returns it.

    Args:
        folder: made here.
        noise: added to the weights of the layers, as a share of their spread; some tenths make a
            draft that guesses wrong as often as right.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((TINYLM / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    random = torch.Generator().manual_seed(0)
    target = {
        name: value.float() for name, value in load_file(TINYLM / "model.safetensors").items()
    }
    scale = target["model.norm.weight"]
    weights = {
        "fc.weight": torch.cat([torch.diag(scale), torch.zeros_like(torch.diag(scale))], 1),
        "fc.bias": torch.zeros_like(scale),
    }
    for layer in range(num_layers + 1):
        for name in _names_of_a_layer(target):
            value = target[f"model.layers.{max(layer - 1, 0)}.{name}"]
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value = scale[:, None] * value if layer else torch.zeros_like(value)
            elif name.endswith("layernorm.weight"):
                # The norm's factor of the scaled stream is another one by about this much.
                value = value / scale * scale.square().mean().sqrt()
            if noise and layer and value.dim() == 2:
                value = value + noise * value.std() * torch.randn(value.shape, generator=random)
            weights[f"layers.{layer}.{name}"] = value
    del weights["layers.0.input_layernorm.weight"]
    kept = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config.update(
        architectures=["LlamaForCausalLMEagle"],
        num_hidden_layers=num_layers + 1,
        tie_word_embeddings=False,  # the target hands over both of its own
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    copy_tokenizer(folder)
    return folder


def write_eagle3_config(folder: Path) -> Path:
    """Writes an EAGLE-3 draft of one layer without weights, for SGLang's dummy ones; returns it."""
    folder.mkdir(parents=True)
    config = json.loads((TINYLM / "config.json").read_text())
    config.update(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        num_key_value_heads=1,  # so that its rows are of another width than the target's
        draft_vocab_size=config["vocab_size"],
        tie_word_embeddings=False,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    copy_tokenizer(folder)
    return folder


def _names_of_a_layer(weights: dict[str, object]) -> list[str]:
    prefix = "model.layers.0."
    return [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
