"""Namespace digest: everything that makes stored KV valid for one model and for no other.

SGLang's page hash covers the tokens, ``extra_key`` and salt. It does not cover the model, its
weights, dtype, layout or rotary table. So the key of a page has this digest beside its hash
(docs/decisions).
This module imports torch and no SGLang.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from sglang_ext.errors import HierKVConfigError

_CHUNK_VALUES = 1 << 22
# Attributes of attention layers that scale stored K and V; plain floats on some paths.
_SCALES = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")
# What SGLang computes of parameters and keeps in attributes of modules. Some parameters are deleted
# or emptied then, and have their values here alone: MLA's up-projection (MiniCPM 3), and the weight
# of a projection in NVFP4 that is fused with what follows it.
_COMPUTED = (
    *("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v"),
    *("weight_swiglu_interleaved", "weight_scale_swiglu_interleaved"),
)
# The same in what a module computes with (experts in MXFP4 by triton_kernels), and on parameters
# themselves (how bitsandbytes scales each block).
_OF_METHODS = ("w13_weight_triton_tensor", "w2_weight_triton_tensor")
_OF_PARAMETERS = ("bnb_quant_state",)
_MOST_NESTED = 5
_GROWING_TABLE = "cos_sin_cache"


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Digest of the bits of all named tensors, in name order.

    Each tensor is divided into chunks. Of each chunk two sums of its values modulo 2^64, one plain
    and one weighted by place, go into SHA-256, with the tensor's name, shape and dtype. A change of
    one value changes the digest, and so does a swap of two values. The digest finds mistakes; it
    does not stop a forger. Runs on the tensors' own device; a 1 GB model takes about a second on
    one CPU core.

    Args:
        tensors: names and tensors, on any device.

    Returns:
        32 bytes.
    """
    digest = hashlib.sha256()
    places: dict[torch.device, torch.Tensor] = {}  # weights 1, 2, ... of the longest chunk so far
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        for first, second in _chunk_sums(tensor.detach(), places):
            digest.update(f"{first},{second};".encode())
    return digest.digest()


def _chunk_sums(
    tensor: torch.Tensor, places: dict[torch.device, torch.Tensor]
) -> list[tuple[int, int]]:
    if tensor.numel() == 0:
        return []
    flat = tensor.contiguous().reshape(-1)
    words = flat.view(_word_dtype(flat))
    num_places, place = min(words.numel(), _CHUNK_VALUES), places.get(words.device)
    if place is None or place.numel() < num_places:
        place = torch.arange(1, num_places + 1, device=words.device, dtype=torch.int64)
        places[words.device] = place
    sums = []
    for start in range(0, words.numel(), _CHUNK_VALUES):
        chunk = words[start : start + _CHUNK_VALUES].to(torch.int64)
        weighted = (chunk * place[: chunk.numel()]).sum()  # overflow wraps, as it should
        sums += [chunk.sum(), weighted]
    values = torch.stack(sums).tolist()  # waits for the device once
    return list(zip(values[::2], values[1::2], strict=True))


def _word_dtype(flat: torch.Tensor) -> torch.dtype:
    if flat.dtype == torch.bool or flat.element_size() == 1:
        return torch.uint8
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]


def digest_model(model: torch.nn.Module) -> bytes:
    """Digest of a model's live parameters, buffers and KV scales, 32 bytes.

    With it what SGLang computed of parameters and keeps elsewhere. Rotary tables that may grow
    while serving are left out: the rope digest covers them, and no others (LongRoPE has two).

    Raises:
        HierKVConfigError: something is kept elsewhere in a way that is not known.
    """
    named: dict[str, torch.Tensor] = {}
    named.update(model.named_parameters())
    named.update((n, b) for n, b in model.named_buffers() if n.rpartition(".")[2] != _GROWING_TABLE)
    named.update(_attributes(model, (*_SCALES, *_COMPUTED)))
    named.update(_kept_elsewhere(model))
    return digest_tensors(named.items())


def digest_scales(model: torch.nn.Module) -> bytes:
    """Digest of what scales stored K and V on this rank, 32 bytes."""
    return digest_tensors(_attributes(model, _SCALES))


def has_scales(model: torch.nn.Module) -> bool:
    """Whether anything scales stored K and V on this rank, and is not 1."""
    return any(bool((value != 1).any()) for _, value in _attributes(model, _SCALES))


def _attributes(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers that modules keep beside their parameters."""
    for name, module in model.named_modules():
        for attribute in names:
            value = getattr(module, attribute, None)
            if isinstance(value, (int, float)):
                value = torch.tensor(float(value), dtype=torch.float64)
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value


def _kept_elsewhere(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model that neither its modules nor their parameters are."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        holders: list[tuple[str, Any, tuple[str, ...]]]
        holders = [(f"{name}.quant_method", method, _OF_METHODS)]
        for own, parameter in module.named_parameters(recurse=False):
            holders.append((f"{name}.{own}", parameter, _OF_PARAMETERS))
        for holder_name, holder, attributes in holders:
            for attribute in attributes:
                value = getattr(holder, attribute, None)
                if value is None:
                    continue
                tensors = list(_tensors_in(f"{holder_name}.{attribute}", value))
                if not tensors:
                    raise HierKVConfigError(
                        f"--enable-hier-kv names stored KV by all weights, and {holder_name}."
                        f"{attribute} must hold tensors, but none are found in"
                        f" {type(value).__name__}; leave --enable-hier-kv out, or choose another"
                        " --moe-runner-backend."
                    )
                yield from tensors


def _tensors_in(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value, or in what it is made of."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _MOST_NESTED:
        parts: Mapping[Any, Any] = getattr(value, "__dict__", {})
        if is_dataclass(value):  # which may have slots alone
            parts = {each.name: getattr(value, each.name) for each in fields(value)}
        elif isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        for part, inner in parts.items():
            yield from _tensors_in(f"{name}.{part}", inner, depth + 1)


def digest_lora_adapter(adapter: Any) -> bytes:
    """Digest of one LoRA adapter's weights and scaling, 32 bytes.

    Args:
        adapter: SGLang's ``LoRAAdapter`` (``layers[i].weights``, ``embedding_layers``,
            ``added_tokens_embeddings``, ``scaling``).
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    for index, layer in enumerate(adapter.layers):
        tensors += [(f"{index}.{name}", value) for name, value in layer.weights.items()]
    for group in ("embedding_layers", "added_tokens_embeddings"):
        tensors += [(f"{group}.{n}", t) for n, t in (getattr(adapter, group, None) or {}).items()]
    scaling = torch.tensor([float(adapter.scaling)], dtype=torch.float64)
    return digest_tensors([*tensors, ("scaling", scaling)])


def namespace_digest(parts: Mapping[str, Any]) -> bytes:
    """SHA-256 of a canonical JSON object; values are plain types or bytes.

    Args:
        parts: what identifies the KV: model config, weight digest, dtype, layout, page size, rope
            digest, shard, format version.

    Returns:
        32 bytes.
    """
    text = json.dumps(parts, sort_keys=True, default=_plain, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
