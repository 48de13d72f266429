"""Small models with one latent row a token and a draft layer in the same checkpoint (MTP, NEXTN).

As DeepSeek V3, V3.2 and GLM-5 are published: the draft is one decoder layer with experts, behind
those of the model. Here the model's first layer decides nearly alone what is said, and the draft
layer is made of it: it guesses most tokens, as long as it sees the tokens before. Where its own
rows are lost, its guesses fall.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit.hybrids.index_model import (
    CONFIGS,
    INDEX_DIM,
    LATENT,
    LAYERS,
    ROTARY,
    index_layers,
    write_index_model,
)

# Kinds: one without an index, and those of `index_model.CONFIGS`.
KINDS = ("deepseek_v3", *CONFIGS)
PLAIN = "deepseek_v3"
# Chains of three guesses; SGLang takes the model's own folder for the draft's.
NEXTN = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
# What layers behind the first add to what is said, and how sharp attention is.
_OTHERS, _SHARP = 0.03, 3.0
_EXPERTS = 4


def write_nextn_model(folder: Path, kind: str) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        kind: of `KINDS`.
    """
    source = "deepseek" if kind == PLAIN else kind
    write_index_model(folder, source)
    config = _config(json.loads((folder / "config.json").read_text()), kind)
    (folder / "config.json").write_text(json.dumps(config))
    add_draft_layer(folder, config, without="" if kind != PLAIN else ".indexer.")
    return folder


def add_draft_layer(
    folder: Path,
    config: dict[str, Any],
    *,
    sharp: tuple[str, ...] = ("q_b_proj.weight",),
    without: str = "",
) -> None:
    """Adds a draft layer to a model's weights, of which the first layer decides most from then on.

    Args:
        folder: the model's.
        config: the model's.
        sharp: ends of the names of what makes attention sharp.
        without: part of the names of weights that are left out; nothing where it is empty.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {
        name: value for name, value in load_file(path).items() if not without or without not in name
    }
    for name in list(weights):
        is_behind = name.startswith("model.layers.") and not name.startswith("model.layers.0.")
        if is_behind and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * _OTHERS
        if name.endswith((*sharp, "model.layers.0.self_attn.o_proj.weight")):
            weights[name] = weights[name] * _SHARP
    random = torch.Generator().manual_seed(1)
    weights.update(_draft(weights, config, random))
    save_file({name: value.contiguous() for name, value in weights.items()}, path)


def _config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """That of a model with an index, as that of one with a draft layer behind its layers."""
    inner = config["moe_intermediate_size"]
    config.update(
        num_nextn_predict_layers=1,
        n_routed_experts=_EXPERTS,
        n_shared_experts=config["intermediate_size"] // inner,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    if kind == PLAIN:
        config.update(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
        for name in ("index_topk", "index_head_dim", "index_n_heads"):
            del config[name]
    return config


def _draft(
    weights: dict[str, Any], config: dict[str, Any], random: Any
) -> Iterator[tuple[str, Any]]:
    """The draft layer: the first layer again, of the embedding of the next token alone."""
    import torch

    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    embeddings = weights["model.embed_tokens.weight"]
    scale = float(embeddings.float().square().mean().sqrt())
    eye = torch.eye(hidden) * scale
    yield f"{prefix}.eh_proj.weight", torch.cat([eye, torch.zeros(hidden, hidden)], 1).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{name}.weight", ones.clone()
    for name, value in list(weights.items()):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if not name.startswith("model.layers.") or layer != "0":
            continue
        if rest.startswith("mlp."):
            rest = rest.replace("mlp.", "mlp.shared_experts.")
        yield f"{prefix}.{rest}", value.clone()
    yield f"{prefix}.mlp.gate.weight", torch.randn(_EXPERTS, hidden, generator=random).bfloat16()
    yield f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(_EXPERTS)
    for expert in range(_EXPERTS):
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            value = torch.randn(shape, generator=random) * shape[1] ** -0.5 * 0.1
            yield f"{prefix}.mlp.experts.{expert}.{name}.weight", value.bfloat16()


def rows_of(kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a token's latent row and of its index row, of each layer, the draft's last."""
    with_index = [] if kind == PLAIN else [*index_layers(kind), LAYERS]
    rows = tuple(INDEX_DIM + 4 if layer in with_index else 0 for layer in range(LAYERS + 1))
    return (2 * (LATENT + ROTARY),) * (LAYERS + 1), rows
