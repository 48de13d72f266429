"""Variants of the bundled model and of LoRA adapters for it, made in a temp folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from testkit.server import TINYLM

Weights = dict[str, torch.Tensor]


def weights_of(model: Path) -> Weights:
    """All tensors of a model folder."""
    loaded: Weights = load_file(str(model / "model.safetensors"))
    return loaded


def variant(folder: Path, change: Callable[[Weights], None]) -> Path:
    """Copies the bundled model to `folder` and changes its weights."""
    shutil.copytree(TINYLM, folder)
    weights = weights_of(folder)
    change(weights)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def noisy(seed: int) -> Callable[[Weights], None]:
    """A change of every projection by some per cent: other tokens, still finite."""

    def change(weights: Weights) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(weights):
            if "proj" in name:
                factor = 1 + 0.05 * torch.randn(weights[name].shape, generator=generator)
                weights[name] = (weights[name].float() * factor).to(weights[name].dtype)

    return change


def strange(seed: int) -> Callable[[Weights], None]:
    """A change of every projection as large as its values: KV that no other model can use."""

    def change(weights: Weights) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(weights):
            if "proj" in name:
                values = weights[name].float()
                noise = torch.randn(values.shape, generator=generator) * values.std()
                weights[name] = (0.7 * (values + noise)).to(weights[name].dtype)

    return change


def slower(folder: Path, intermediate: int) -> Path:
    """The bundled model with a wider MLP of zeros: the same tokens and KV, for more computing."""

    def change(weights: Weights) -> None:
        for name, values in weights.items():
            more = intermediate - max(values.shape)
            if "gate_proj" in name or "up_proj" in name:
                weights[name] = torch.nn.functional.pad(values, (0, 0, 0, more))
            elif "down_proj" in name:
                weights[name] = torch.nn.functional.pad(values, (0, more))

    variant(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = intermediate
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen3(folder: Path, change: Callable[[Weights], None] | None = None) -> Path:
    """The bundled model's weights in the architecture of Qwen 3, which differs by norms of Q and K.

    Its answers are another model's, and as far from uniform. SGLang runs the attention of Qwen 3
    data parallel, and that of Llama not. Each KV head is there twice, so that four ranks have one
    each.
    """

    def convert(weights: Weights) -> None:
        if change is not None:
            change(weights)
        embeddings = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = embeddings.clone()  # tied ones would not be split in two
        for layer in range(8):
            for part in ("k_proj", "v_proj"):
                name = f"model.layers.{layer}.self_attn.{part}.weight"
                heads = weights[name].view(2, 64, -1)
                weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1).contiguous()
            for norm in ("q_norm", "k_norm"):
                name = f"model.layers.{layer}.self_attn.{norm}.weight"
                weights[name] = torch.full((64,), 1.5, dtype=embeddings.dtype)

    variant(folder, convert)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_value(weights: Weights) -> None:
    """The least change there is: one value of one tensor, by one bit."""
    weights["model.layers.5.mlp.down_proj.weight"].view(torch.int16)[17, 23] ^= 1


def adapter(folder: Path, seed: int) -> Path:
    """Writes a PEFT adapter of rank 4 for the bundled model, over what is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tinylm", "r": 4,
        "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors: Weights = {}
    for layer in range(8):
        for module, width in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 256, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, 4, generator=generator) * 0.2
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def copy_adapter(source: Path, target: Path) -> None:
    """Gives an adapter the weights of another one."""
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
