"""Finds each layer's rotary embedding on the loaded model and proves the transform.

Three proofs, each of which fails closed to position-bound storage:

1. The module's own forward is run on random K at many positions; a rounding rule of
   ``kernels/rope`` must reproduce every bit (``detect_rule``). This proves table, pairing, scaling
   and arithmetic.
2. ``self_check.py`` prefills identical tokens and looks at what the model wrote into its pool:
   this proves that the layer applies that embedding to K at all (Cohere2 keeps a rotary module on
   layers that do not use it).
3. Every saved page is re-rotated and compared with the engine's bits (``kernels/rope``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_ext.device.pools import DevicePool
from sglang_ext.kernels.rope import RopeSpec, detect_rule

logger = logging.getLogger(__name__)

# Names under which attention modules keep their rotary embedding.
_ROPE_ATTRIBUTES = ("rotary_emb", "rotary_pos_emb", "rotary_embedding", "rope")
# The position a token is rotated to is not its index in the sequence, or the table depends on
# the batch: such K stays as the engine had it.
_UNMOVABLE = ("MRotary", "LongRoPE", "Fourier", "DualChunk", "Multimodal", "Ernie", "Vision")
_TABLE_DIGEST_ROWS = 1024


@dataclass
class LayerRope:
    """How one layer's K is stored.

    Attributes:
        spec: the rotary embedding; None when K is stored as it is.
        movable: False when the stored K is valid only at its own position.
        module: the live module, re-read when its table grows; None without rope.
        rounded_to: dtype the module casts its table to before use; None for none.
        reason: why the layer is position-bound; empty otherwise.
        is_kept: K is stored as the engine has it, whatever is done with other layers of the page.
        table: digest of the module's table as it was found; empty without one.
    """

    spec: RopeSpec | None
    movable: bool
    module: Any = None
    rounded_to: torch.dtype | None = None
    reason: str = ""
    is_kept: bool = False
    table: bytes = b""

    def bound(self, reason: str) -> LayerRope:
        """This layer's where K is stored as the engine has it, at its own position."""
        return LayerRope(None, movable=False, reason=reason, table=self.table)


def discover_ropes(
    model: torch.nn.Module, pool: DevicePool, layers: Sequence[int] | None = None
) -> list[LayerRope]:
    """Returns one ``LayerRope`` a layer.

    Args:
        model: SGLang's loaded model.
        pool: its device pool, or the one of several whose layers' rows are like those of all.
        layers: numbers of the layers that are asked for; None: the pool's, from 0 on.
    """
    layers = range(pool.num_layers) if layers is None else layers
    attention = _attention_parents(model)
    cache: dict[int, LayerRope] = {}
    ropes = []
    for layer in layers:
        parent = attention.get(layer)
        if parent is None:
            ropes.append(_bound("no attention module was found for the layer"))
            continue
        module = _rope_of(parent)
        if module is None:
            # NoPE: K carries no position. The self-check sees it if that is not so.
            ropes.append(LayerRope(None, movable=True))
            continue
        if id(module) not in cache:
            table = _table_digest(module)  # before it is run, which may round the table
            cache[id(module)] = replace(_examine(module, pool), table=table)
        ropes.append(cache[id(module)])
    if all(rope.spec is None and rope.movable for rope in ropes):
        # Learned or absolute positions go into K at the first layer, and where a bias dominates
        # the self-check hardly sees them.
        ropes = [_bound("no layer of the model has a rotary embedding") for _ in ropes]
    _log_bound_layers(layers, ropes)
    return ropes


def type_of_attention(module: torch.nn.Module) -> str:
    """What a layer's tokens see, in SGLang's words; empty for a module that is no attention."""
    kind = getattr(module, "attn_type", "")
    return str(getattr(kind, "value", kind))


def window_of(module: torch.nn.Module) -> int:
    """How many tokens before its own a layer's tokens see; 0 for all, and of what is no layer."""
    window = getattr(module, "sliding_window_size", None) if type_of_attention(module) else None
    return max(window or 0, 0)


def num_positions(rope: LayerRope) -> int | None:
    """Rows of the layer's rotary table as it is now; None for a layer without. O(1)."""
    if rope.spec is None:
        return None
    return int(rope.module.cos_sin_cache.shape[0]) if rope.module is not None else rope.spec.max_pos


def refresh_spec(rope: LayerRope) -> RopeSpec | None:
    """The layer's spec, re-read from the live module when its table was replaced or grew."""
    if rope.spec is None or rope.module is None:
        return rope.spec
    table = rope.module.cos_sin_cache
    if table.shape[0] != rope.spec.max_pos:
        rope.spec = _read_spec(rope.module, rope.spec.first, rope.spec.rule, rope.rounded_to)
    return rope.spec


def bind_pages(ropes: Sequence[LayerRope]) -> bool:
    """Whether pages hold K as the engine has it: one layer that is bound to its position binds all.

    A layer that is kept as it is in every page, as a draft's, does not.
    """
    return not all(rope.movable or rope.is_kept for rope in ropes)


def rope_digest(ropes: Sequence[LayerRope], mode: str) -> bytes:
    """Digest of tables, pairing, rounding rules and storage mode of all layers, 32 bytes.

    The first 1,024 positions stand for a table: what tells two tables apart (base, scaling) shows
    there, and growth at run time does not change them.

    Of pages that are bound it does not matter which layers bind them: their bytes are the same. And
    the self-check, which looks at rounded values, may bind others in the next start.
    """
    digest = hashlib.sha256(mode.encode())
    if bind_pages(ropes):
        for rope in ropes:
            digest.update(b"bound" + rope.table)
        return digest.digest()
    seen: dict[int, bytes] = {}
    for rope in ropes:
        spec = rope.spec
        if spec is None:
            digest.update(b"bound" if not rope.movable else b"none")
            continue
        if id(spec) not in seen:
            rows = min(spec.max_pos, _TABLE_DIGEST_ROWS)
            table = hashlib.sha256(spec.cos[:rows].tobytes() + spec.sin[:rows].tobytes())
            table.update(
                f"{spec.rotary_dim},{spec.first},{spec.interleaved},{spec.rule},{rope.movable}".encode()
            )
            seen[id(spec)] = table.digest()
        digest.update(seen[id(spec)])
    return digest.digest()


def tables_digest(model: torch.nn.Module) -> bytes:
    """Digest of the first positions of all rotary tables of a model, 32 bytes.

    Where layers are bound without being looked at, `rope_digest` does not know their tables.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        table = _table_digest(module)
        if table:
            digest.update(name.encode() + table)
    return digest.digest()


def _table_digest(module: Any) -> bytes:
    """Digest of the first positions of a module's table, whatever becomes of its layer."""
    table = getattr(module, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor):
        return b""
    rows = table.detach()[:_TABLE_DIGEST_ROWS].float().cpu().contiguous()
    return hashlib.sha256(rows.numpy().tobytes()).digest()


def _attention_parents(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Attention modules by their layers' numbers."""
    modules = dict(model.named_modules())
    parents: dict[int, torch.nn.Module] = {}
    for name, module in modules.items():
        if type(module).__name__ != "RadixAttention" or module.is_cross_attention:
            continue
        parents[int(module.layer_id)] = modules[name.rpartition(".")[0]]
    return parents


def _rope_of(parent: torch.nn.Module) -> Any:
    for attribute in _ROPE_ATTRIBUTES:
        module = getattr(parent, attribute, None)
        if module is not None:
            return module
    return None


def _bound(reason: str) -> LayerRope:
    return LayerRope(None, movable=False, reason=reason)


def _examine(module: Any, pool: DevicePool) -> LayerRope:
    name = type(module).__name__
    if any(word in name for word in _UNMOVABLE):
        return _bound(f"{name} is not a function of the token's index alone")
    if not pool.rotatable:
        return _bound("K in 8 bits was rounded behind its rotation, which cannot be taken back")
    for attribute in ("cos_sin_cache", "rotary_dim", "is_neox_style"):
        if not hasattr(module, attribute):
            return _bound(f"{name} has no {attribute}")
    head_dim = pool.k[0].shape[2]
    try:
        # Some paths cast the table to the dtype of K at every use.
        for rounded_to in (None, pool.dtype):
            trial = _read_spec(module, pool.latent_dim, "eager", rounded_to)
            rule = detect_rule(_rotate_with(module, pool), trial, pool.dtype, head_dim)
            if rule is not None:
                spec = _read_spec(module, pool.latent_dim, rule, rounded_to)
                return LayerRope(spec, movable=True, module=module, rounded_to=rounded_to)
    except Exception as error:
        return _bound(f"{name} could not be run on its own: {error}")
    return _bound(f"no rounding rule reproduces {name} bit for bit")


def _read_spec(module: Any, first: int, rule: str, rounded_to: torch.dtype | None) -> RopeSpec:
    table = module.cos_sin_cache.detach()
    if rounded_to is not None:
        table = table.to(rounded_to)
    cos, sin = table.float().cpu().chunk(2, dim=-1)
    return RopeSpec(
        cos=np.ascontiguousarray(cos.numpy(), np.float32),
        sin=np.ascontiguousarray(sin.numpy(), np.float32),
        rotary_dim=int(module.rotary_dim),
        first=first,
        interleaved=not bool(module.is_neox_style),
        rule=rule,
    )


def _rotate_with(module: Any, pool: DevicePool) -> Any:
    """The module's own rotation as a function of (K ``[T, H, D]``, positions ``[T]``)."""

    def rotate(k: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        device = pool.device
        where = torch.as_tensor(positions, dtype=torch.int64, device=device)
        part = k.to(device)[..., pool.latent_dim :].contiguous()
        width = part.shape[-1]
        query = part.clone()
        if pool.kind == "mla":  # rotates [T, H, rope] tensors
            _, rotated = module(where, query, part.clone())
        else:
            flat = part.reshape(part.shape[0], -1)
            _, rotated = module(where, query.reshape(flat.shape), flat.clone())
        out = k.clone()
        out[..., pool.latent_dim :] = rotated.reshape(*k.shape[:-1], width).to("cpu", k.dtype)
        return out

    return rotate


def _log_bound_layers(layers: Sequence[int], ropes: list[LayerRope]) -> None:
    reasons = {rope.reason for rope in ropes if rope.reason}
    for reason in sorted(reasons):
        bound = [layer for layer, rope in zip(layers, ropes, strict=True) if rope.reason == reason]
        logger.warning(
            "hier-kv: K of layers %s is kept as the engine has it, valid at its own position: %s",
            bound,
            reason,
        )
