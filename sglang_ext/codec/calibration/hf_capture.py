"""KV caches of Hugging Face models: taken out, put back, and judged by what the model then says.

This is how a codec's damage is measured, and where calibration gets its samples. A prefix is run
once; its KV leaves as planes (see :class:`KvCapture`), goes through any codec, and is put back for
a continuation whose tokens are given. The reference is the same path with untouched planes.

Arithmetic is float32 whatever the weights' dtype, so that a difference between two runs comes from
their KV alone; the KV itself is rounded to the dtype an engine would keep it in.

Torch and transformers are imported on the first use, never when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]

# Name of a KV dtype, its torch name, the numpy type of its bit patterns.
_DTYPES: dict[str, tuple[str, type]] = {
    "bf16": ("bfloat16", np.uint16),
    "fp16": ("float16", np.uint16),
    "fp32": ("float32", np.uint32),
    "fp8_e4m3": ("float8_e4m3fn", np.uint8),
    "fp8_e5m2": ("float8_e5m2", np.uint8),
}


def bits_to_float(bits: Bits, dtype: str) -> F32:
    """Values of bit patterns, any shape, as float32. Raises KeyError for an unknown dtype name."""
    import torch

    name, word = _DTYPES[dtype]
    if bits.dtype != word:
        raise TypeError(f"{dtype} bit patterns are {np.dtype(word)}, got {bits.dtype}")
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    raw = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8).copy())
    return np.asarray(
        raw.view(getattr(torch, name)).float().numpy().reshape(bits.shape), np.float32
    )


def float_to_bits(values: npt.ArrayLike, dtype: str) -> Bits:
    """Bit patterns of values rounded to the nearest, ties to even; the shape is kept."""
    import torch

    name, word = _DTYPES[dtype]
    array = np.ascontiguousarray(values, np.float32)
    rounded = torch.from_numpy(array.copy()).to(getattr(torch, name)).contiguous()
    return np.asarray(rounded.view(torch.uint8).numpy().view(word).reshape(array.shape))


@dataclass(frozen=True)
class KvCapture:
    """The KV of one prefix, as bit patterns of ``dtype``.

    ``planes`` and ``rotated`` are ``[S, T, C]``: planes layer-major, K then V; C = KV heads times
    head dimension. ``planes`` holds position-free K: the cached K un-rotated in float32, rounded
    to the dtype. ``rotated`` holds K as an engine caches it. V is the same in both.
    """

    tokens: I64
    dtype: str
    planes: Bits
    rotated: Bits


@dataclass(frozen=True)
class TokenDamage:
    """Per-token damage of one continuation: arrays of one length.

    ``kl`` is KL(reference || other) of next-token distributions in nats; ``delta_nll`` the
    difference of the negative log-likelihood of the text that follows (its mean's exponential is
    the ratio of perplexities); ``top1`` whether the most likely token is the same.
    """

    kl: F32
    delta_nll: F32
    top1: npt.NDArray[np.bool_]


def compare(reference: F32, other: F32, tokens: I64) -> TokenDamage:
    """Damage of ``other`` against ``reference``, log-probabilities ``[N, vocabulary]``.

    ``tokens`` is what was given to :meth:`CausalLm.continuation`; row i predicts token i + 1, so
    the last row has no known successor and its ``delta_nll`` is left out.
    """
    following = tokens[1:]
    rows = np.arange(len(following))
    kl = np.sum(np.exp(reference) * (reference - other), axis=-1, dtype=np.float64)
    return TokenDamage(
        kl=np.maximum(kl, 0).astype(np.float32),
        delta_nll=reference[rows, following] - other[rows, following],
        top1=reference.argmax(-1) == other.argmax(-1),
    )


def concatenate(parts: Sequence[TokenDamage]) -> TokenDamage:
    """The damage over several continuations."""
    return TokenDamage(
        kl=np.concatenate([part.kl for part in parts]),
        delta_nll=np.concatenate([part.delta_nll for part in parts]),
        top1=np.concatenate([part.top1 for part in parts]),
    )


class CausalLm:
    """A causal language model of the Llama, Qwen or Mistral kind whose KV comes from outside.

    Rotary embedding may cover a part of each head (the first dimensions), with halves rotated
    against each other, as in those families. Attributes: ``num_layers``, ``num_heads``,
    ``num_kv_heads``, ``head_dim``, ``kv_dtype`` (what an engine would cache in), ``model`` and
    ``tokenizer``. One thread at a time.
    """

    def __init__(self, model_path: str, *, device: str = "cpu"):
        """Load model and tokenizer from a folder or by name; float32 weights on ``device``.

        Raises:
            ValueError: it cannot be loaded, or is of a kind that is not known here.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            model = AutoModelForCausalLM.from_pretrained(model_path)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{model_path} cannot be loaded as a model ({said}); name a model's folder, or a "
                "model of a hub"
            ) from error
        config = model.config.get_text_config(decoder=True)
        stored = str(getattr(config, "dtype", None) or "torch.bfloat16").removeprefix("torch.")
        names = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}
        self.kv_dtype = names.get(stored, "bf16")
        self.model: Any = model.to(device=device, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.device = device
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        )
        if not hasattr(self.model.get_decoder(), "rotary_emb"):
            raise ValueError(f"{model_path}: its decoder has no rotary_emb; Llama-like is needed")

    def tokenize(self, text: str) -> I64:
        """Tokens of a text, without special ones."""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def leading_tokens(self) -> I64:
        """What the tokenizer puts before a text, such as a token for its beginning."""
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        return np.asarray(full[: full.index(plain[0])], np.int64)

    def prefill(self, tokens: I64) -> KvCapture:
        """The KV of a prefix ``[T]``."""
        import torch
        from transformers import DynamicCache

        ids = torch.from_numpy(np.ascontiguousarray(tokens)).to(self.device)[None]
        cache = DynamicCache()
        with torch.no_grad():
            self.model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
        states = [state[0] for layer in cache.layers for state in (layer.keys, layer.values)]
        flat = torch.stack([state.transpose(0, 1).reshape(len(tokens), -1) for state in states])
        rotated = float_to_bits(flat.cpu().numpy(), self.kv_dtype)
        return KvCapture(
            np.asarray(tokens, np.int64), self.kv_dtype, self.unrotate(rotated), rotated
        )

    def unrotate(self, planes: Bits, start: int = 0) -> Bits:
        """Position-free planes from rotated ones; token t is at position ``start + t``."""
        return self._turn(planes, start, inverse=True)

    def rotate(self, planes: Bits, start: int = 0) -> Bits:
        """Rotated planes, as an engine caches them, from position-free ones."""
        return self._turn(planes, start, inverse=False)

    def continuation(self, planes: Bits, tokens: I64, *, rotated: bool = False) -> F32:
        """Log-probabilities ``[N, vocabulary]`` after each of N given tokens that follow a prefix.

        ``planes`` ``[S, T, C]`` is the prefix's KV, decoded or untouched; position-free unless
        ``rotated``. Row i is the prediction after ``tokens[: i + 1]``.
        """
        import torch

        cached = planes if rotated else self.rotate(planes)
        values = torch.from_numpy(bits_to_float(cached, self.kv_dtype)).to(self.device)
        with torch.no_grad():
            logits = self.logits(values[0::2], values[1::2], tokens)
            return np.asarray(torch.log_softmax(logits, -1).cpu().numpy(), np.float32)

    def logits(self, keys: torch.Tensor, values: torch.Tensor, tokens: I64) -> torch.Tensor:
        """Differentiable: logits ``[N, vocabulary]`` from float32 K (rotated), V ``[L, T, C]``."""
        import torch
        from transformers import DynamicCache

        length = keys.shape[1]
        cache = DynamicCache()
        for index in range(self.num_layers):
            cache.update(self._heads(keys[index]), self._heads(values[index]), index)
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self.device)[None]
        positions = torch.arange(length, length + len(tokens), device=self.device)[None]
        output = self.model(
            input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def turn(self, keys: torch.Tensor, start: int = 0, *, inverse: bool = False) -> torch.Tensor:
        """Differentiable: rotate K ``[..., T, C]`` in float32, or with ``inverse`` take it back."""
        import torch

        length = keys.shape[-2]
        positions = torch.arange(start, start + length, device=keys.device)[None]
        cos, sin = self.model.get_decoder().rotary_emb(keys, positions)
        cos, sin = cos[0, :, None], sin[0, :, None]
        heads = keys.reshape(*keys.shape[:-1], -1, self.head_dim)
        width = cos.shape[-1]
        part, rest = heads[..., :width], heads[..., width:]
        half = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
        if inverse:
            # Some rotary embeddings scale as well; cos^2 + sin^2 is that scale, squared.
            part = (part * cos - half * sin) / (cos * cos + sin * sin)
        else:
            part = part * cos + half * sin
        return torch.cat((part, rest), -1).reshape(keys.shape)

    def _heads(self, state: torch.Tensor) -> torch.Tensor:
        return state.reshape(state.shape[0], self.num_kv_heads, self.head_dim).transpose(0, 1)[None]

    def _turn(self, planes: Bits, start: int, *, inverse: bool) -> Bits:
        import torch

        out = np.array(planes)
        keys = torch.from_numpy(bits_to_float(out[0::2], self.kv_dtype)).to(self.device)
        with torch.no_grad():
            turned = self.turn(keys, start, inverse=inverse)
        out[0::2] = float_to_bits(turned.cpu().numpy(), self.kv_dtype)
        return out
