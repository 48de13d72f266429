"""A small gpt-oss or Qwen 3, and an EAGLE-3 draft for it that guesses most of what it says.

The former is that of `oss_model.py`. The first layer has full attention here and decides nearly
alone what is said. The draft's one layer is made of it, without what EAGLE-3's layer of Llama lacks
(biases, a sink, experts, norms of Q and K), and leaves out what the target hands over of its hidden
states: it guesses well as long as it sees the tokens before. Where its own KV is lost, its guesses
fall.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit.hybrids.oss_model import HEAD_DIM, KV_HEADS, NUM_LAYERS, write_oss_model
from testkit.published_model import class_of_transformers, copy_tokenizer, seeded

LAYER_TYPES = ("full_attention", "sliding_attention") * (NUM_LAYERS // 2)
# How sharp attention is, how much of what is said is the first layer's, and the others'.
_SHARP, _FIRST, _OTHERS = 3.0, 10.0, 0.03
_INNER = 64
# Of the Qwen 3, which has K and V of every head in every layer.
WHOLE_LAYERS = 8
_WHOLE = "Qwen3ForCausalLM"


def write_drafted_oss_model(folder: Path) -> Path:
    """Writes the model of `oss_model.py`, changed, into a new folder; returns it.

    Args:
        folder: made here.
    """
    from safetensors.torch import load_file, save_file

    write_oss_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = list(LAYER_TYPES)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    weights = {name: changed_weight(name, value) for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def write_drafted_qwen_model(folder: Path) -> Path:
    """Writes a Qwen 3 with random weights, changed likewise, into a new folder; returns it.

    Args:
        folder: made here.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=4096, hidden_size=128, intermediate_size=_INNER, num_hidden_layers=WHOLE_LAYERS,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=2048, initializer_range=0.1, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    with seeded(0):
        class_of_transformers(_WHOLE)(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    path = folder / "model.safetensors"
    weights = {name: changed_weight(name, value) for name, value in load_file(path).items()}
    fill_norms(weights, config.rms_norm_eps)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def fill_norms(weights: dict[str, Any], eps: float) -> None:
    """Has the first layer's norms of Q and K leave them as long as they are without, on average.

    Args:
        weights: changed ones of a model that has such norms, by their names in one of text alone.
        eps: of its norms.
    """
    embeddings = weights["model.embed_tokens.weight"].float()
    embeddings = embeddings * (embeddings.square().mean(-1, keepdim=True) + eps).rsqrt()
    first = "model.layers.0.self_attn."
    # Sharp attention would not bear that a norm makes all as long as they are on average without.
    weights[f"{first}q_proj.weight"] /= _SHARP
    for part in "qk":
        projected = embeddings @ weights[f"{first}{part}_proj.weight"].float().T
        weights[f"{first}{part}_norm.weight"].fill_(float(projected.square().mean().sqrt()))


def changed_weight(name: str, value: Any) -> Any:
    """A weight of the model, such that a layer of Llama computes what its first layer does.

    Args:
        name: the weight's, in a model of text alone.
        value: as it was drawn.
    """
    if not name.startswith("model.layers."):
        return value
    is_output = "o_proj" in name or "down_proj" in name
    if not name.startswith("model.layers.0."):
        return value * _OTHERS if is_output else value
    if name.endswith("sinks"):
        return value * 0 - 30.0
    if name.endswith("bias") or "down_proj" in name:
        return value * 0
    if name.endswith("q_proj.weight"):
        return value * _SHARP
    return value * _FIRST if name.endswith("o_proj.weight") else value


def write_oss_draft(folder: Path, model: Path) -> Path:
    """Writes a draft for such a model into a new folder; returns it.

    Args:
        folder: made here.
        model: the target's folder.
    """
    from safetensors.torch import load_file, save_file

    write_eagle3_config(folder, model, norm_output=True)
    weights = load_file(model / "model.safetensors")
    save_file(dict(draft_weights(weights)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_eagle3_config(folder: Path, model: Path, **more: Any) -> Path:
    """Writes an EAGLE-3 draft without weights, with a target's heads; returns its folder.

    Args:
        folder: made here.
        model: the target's folder.
        more: of the draft's configuration.
    """
    folder.mkdir(parents=True)
    target = json.loads((model / "config.json").read_text())
    target |= target.get("text_config", {})  # of one with an encoder of images
    config = {
        name: target[name]
        for name in ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps",
                     "bos_token_id", "eos_token_id", "dtype")
    }  # fmt: skip
    config |= {name: target[name] for name in target if name.startswith("rope")}
    rotations = config.get("rope_parameters", {})
    if "full_attention" in rotations:  # one for each kind of layer; a draft has one kind
        config["rope_parameters"] = rotations["full_attention"]
    config.update(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=_INNER,
        hidden_act="silu",
        draft_vocab_size=target["vocab_size"],
        tie_word_embeddings=False,
        **more,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    copy_tokenizer(folder)
    return folder


def ask_for_fp8(folder: Path) -> None:
    """Has a checkpoint ask for K and V in fp8, and leaves its weights as they are."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "kv_cache_quant_algo": "FP8",
        "modules_to_not_convert": ["model", "midlayer", "fc", "lm_head"],
    }
    path.write_text(json.dumps(config))


def draft_weights(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The draft's weights: the first layer's attention, of the embedding of the next token.

    Args:
        weights: of the model, by their names in one of text alone.
    """
    import torch

    embeddings = weights["model.embed_tokens.weight"]
    hidden, dtype = embeddings.shape[1], embeddings.dtype
    for name in ("q_proj", "k_proj", "v_proj"):
        value = weights[f"model.layers.0.self_attn.{name}.weight"]
        both = torch.cat([value, torch.zeros_like(value)], 1)
        yield f"midlayer.self_attn.{name}.weight", both.contiguous()
    name = "self_attn.o_proj.weight"
    yield f"midlayer.{name}", weights[f"model.layers.0.{name}"].clone()
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", torch.ones(hidden, dtype=dtype)
    for name, shape in (
        ("gate_proj", (_INNER, hidden)),
        ("up_proj", (_INNER, hidden)),
        ("down_proj", (hidden, _INNER)),
    ):
        yield f"midlayer.mlp.{name}.weight", torch.zeros(shape, dtype=dtype)
    yield "fc.weight", torch.zeros(hidden, 3 * hidden, dtype=dtype)
    yield "norm.weight", weights["model.norm.weight"].clone()
    yield "lm_head.weight", weights["lm_head.weight"].clone()
