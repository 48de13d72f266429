"""How many bytes of KV a token takes, from a model's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1,
}  # fmt: skip
_NUMBERS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_KINDS = ("layer_types", "layers_block_type")
# Others that decide, where they are there; MLA's second may be 0.
_LATENT, _ROTARY = "kv_lora_rank", "qk_rope_head_dim"
_OPTIONAL = ("num_key_value_heads", "head_dim", "v_head_dim", _LATENT, _ROTARY)
# Of hybrid models that name no kinds: layers with attention are one in so many.
_INTERVALS = ("full_attention_interval", "attn_layer_period")
# Of those that write a letter a layer: which have attention.
_PATTERN, _ATTENTION = "hybrid_override_pattern", "*"
# Of sparse attention over an index: SGLang keeps a key in fp8 of each token, and its scale.
_CHOSEN, _INDEX_DIM, _SCALE_BYTES = "index_topk", "index_head_dim", 4
# In fp8 such a model's latent row has a scale for so many values, and its rotated part in bf16.
_SCALED, _ROTATED_BYTES = 128, 2

_MOST_BYTES = 1 << 40
_MOST_LAYERS = 1 << 16  # whose index is looked at one by one


@dataclass(frozen=True)
class ModelKv:
    """KV of one token, of all ranks together.

    Attributes:
        name: of the model.
        bytes_per_token: as the host tier stores it.
        note: what the number leaves out; empty for nothing.
    """

    name: str
    bytes_per_token: int
    note: str = ""


def read_model(path: Path, kv_dtype: str = "", num_ranks: int = 1) -> ModelKv:
    """Reads a model's `config.json`.

    Args:
        path: the file, or the folder that it is in.
        kv_dtype: of the KV cache, a name of `DTYPE_BYTES`; empty for the model's own.
        num_ranks: of tensor parallelism, on one node; heads that are fewer are stored once a rank.

    Raises:
        ValueError: it cannot be read, or does not say how large its KV is.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{file} cannot be read as a model's config.json ({reason}); name the file, or the "
            "folder that it is in"
        ) from error
    outer = config if isinstance(config, dict) else {}
    config = outer.get("text_config", outer)
    if not isinstance(config, dict):
        config = {}
    missing = [name for name in _NUMBERS if not _is_count(config.get(name))]
    if missing:
        raise ValueError(
            f"{file} has no {', '.join(missing)}, of which the size of KV follows; name the "
            "config.json of a language model, or give --kv-bytes-per-token"
        )
    odd = [name for name in _OPTIONAL if not _is_count_or_none(config.get(name))]
    if odd:
        raise ValueError(
            f"{file} must have whole numbers above 0 as {', '.join(odd)}, got "
            f"{', '.join(repr(config[name])[:40] for name in odd)}; give --kv-bytes-per-token"
        )
    dtypes = [each.get(key) for each in (config, outer) for key in ("dtype", "torch_dtype")]
    name = kv_dtype or str(next(filter(None, dtypes), "bfloat16"))
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(
            f"the KV dtype is one of {', '.join(DTYPE_BYTES)}, got {name!r}; give --kv-dtype"
        )
    num_layers, note = _layers(config)
    values = _values_per_layer(config, num_ranks)
    label = file.parent.name or file.name
    num_bytes = num_layers * values * DTYPE_BYTES[name] + _index_bytes(config, name)
    if not 0 < num_bytes < _MOST_BYTES:
        raise ValueError(
            f"a token's KV must take more than no byte and less than {_MOST_BYTES}, and by {file} "
            "it does not; give --kv-bytes-per-token"
        )
    return ModelKv(label, num_bytes, note)


def _values_per_layer(config: dict[str, Any], num_ranks: int) -> int:
    """Numbers that one layer stores of a token, over all ranks."""
    if _is_count(config.get(_LATENT)):  # latent attention: one rank of a node keeps it for all
        return int(config[_LATENT] + (config.get(_ROTARY) or 0))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    v_head_dim = config.get("v_head_dim") or head_dim
    return int(max(kv_heads, num_ranks) * (head_dim + v_head_dim))


def _index_bytes(config: dict[str, Any], kv_dtype: str) -> int:
    """Bytes of a token that a model with an index beside its latent rows has more than those."""
    num, names = int(config["num_hidden_layers"]), (_CHOSEN, _INDEX_DIM, _LATENT)
    if not all(_is_count(config.get(name)) for name in names):
        return 0
    scales = 0
    if DTYPE_BYTES[kv_dtype] == 1:
        scales = config[_LATENT] // _SCALED * _SCALE_BYTES
        scales += (config.get(_ROTARY) or 0) * (_ROTATED_BYTES - 1)
    own = num - sum(_takes_choice_before(config, layer) for layer in range(min(num, _MOST_LAYERS)))
    return int(num * scales + own * (config[_INDEX_DIM] + _SCALE_BYTES))


def _takes_choice_before(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer's tokens attend to what the layer before chose, as SGLang reads it."""
    kinds, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "shared"
    if isinstance(pattern, str):
        return layer < len(pattern) and pattern[layer] == "S"
    every, first = (config.get(name) for name in ("index_topk_freq", "index_skip_topk_offset"))
    if not (isinstance(every, int) and _is_count(every)):
        return False
    first_of_all = first if isinstance(first, int) and _is_count(first) else 2
    return bool(max(layer + 1 - first_of_all, 0) % every)


def _layers(config: dict[str, Any]) -> tuple[int, str]:
    """Layers that store KV of every token, and what that leaves out."""
    num = int(config["num_hidden_layers"])
    kinds = next((config[name] for name in _KINDS if isinstance(config.get(name), list)), None)
    if kinds is None or len(kinds) != num or not all(isinstance(kind, str) for kind in kinds):
        return _layers_of_hybrid(config, num)
    attends = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    notes = _notes(num - len(attends))
    if any("sliding" in kind or "chunked" in kind for kind in attends):
        notes.append("layers with a window are counted as full ones, so less is needed")
    return max(1, len(attends)), "; ".join(notes)


def _layers_of_hybrid(config: dict[str, Any], num: int) -> tuple[int, str]:
    """The same where no list of kinds says it."""
    attends = num
    interval = next((config[name] for name in _INTERVALS if _is_count(config.get(name))), 1)
    pattern = config.get(_PATTERN)
    if interval > 1:
        attends = max(1, num // interval)
    elif isinstance(pattern, str) and len(pattern) == num:
        attends = max(1, pattern.count(_ATTENTION))
    return attends, "; ".join(_notes(num - attends))


def _notes(num_without: int) -> list[str]:
    if not num_without:
        return []
    return [f"states of {num_without} layers without attention are not counted"]


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value) or (value == 0 and isinstance(value, int))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
