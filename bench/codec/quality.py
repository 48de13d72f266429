"""Rate and damage: a prefix's planes go through a codec, and the model continues on the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.codec.corpus import PREFIX_TOKENS, RecallPrompt
from bench.codec.methods import Method
from sglang_ext.codec.calibration.hf_capture import (
    I64,
    CausalLm,
    KvCapture,
    TokenDamage,
    compare,
    concatenate,
)
from sglang_ext.codec.float_bits import F32, Bits

_RESAMPLES = 2000


@dataclass(frozen=True)
class Prepared:
    """A window with what the untouched cache makes the model say.

    Attributes:
        capture: the prefix's KV.
        following: tokens of the continuation.
        reference: log-probabilities [N, vocabulary] on K as an engine caches it.
    """

    capture: KvCapture
    following: I64
    reference: F32

    def planes(self, method: Method) -> Bits:
        """The planes that a method codes."""
        return self.capture.rotated if method.rotated else self.capture.planes


@dataclass(frozen=True)
class Point:
    """A codec's level at one length of chunk.

    Attributes:
        codec, level, chunk_tokens: which.
        bits_per_value: all bytes of whole chunks over their values.
        kl: mean KL divergence of the next token's distribution, nats.
        kl_p99: its 99th percentile over tokens.
        kl_ci95: bootstrap interval of the mean over windows.
        ppl_delta: perplexity minus the untouched cache's.
        top1_agreement: share of tokens whose most likely successor stays.
        recall: share of numbers told right, or None where not asked.
        kl_by_window: the samples behind `kl`.
    """

    codec: str
    level: str
    chunk_tokens: int
    bits_per_value: float
    kl: float
    kl_p99: float
    kl_ci95: tuple[float, float]
    ppl_delta: float
    top1_agreement: float
    recall: float | None = None
    kl_by_window: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Its keys in the report; samples go elsewhere."""
        values = {name: value for name, value in vars(self).items() if name != "kl_by_window"}
        return values | {"kl_ci95": list(self.kl_ci95)}


def prepare(lm: CausalLm, windows: Sequence[I64]) -> list[Prepared]:
    """Runs the model on each window once."""
    out = []
    for window in windows:
        capture = lm.prefill(window[:PREFIX_TOKENS])
        following = window[PREFIX_TOKENS:]
        reference = lm.continuation(capture.rotated, following, rotated=True)
        out.append(Prepared(capture, following, reference))
    return out


def through(method: Method, planes: Bits, chunk_tokens: int) -> tuple[Bits, int, int]:
    """Codes planes chunk by chunk.

    Returns:
        What comes back, the bytes of whole chunks, and the values in them. A chunk shorter than
        asked at the end counts only where it is the only one.
    """
    out = np.empty_like(planes)
    num_tokens = planes.shape[1]
    num_bytes = num_values = 0
    for start in range(0, num_tokens, chunk_tokens):
        chunk = np.ascontiguousarray(planes[:, start : start + chunk_tokens])
        data = method.encode(chunk, start == 0)
        out[:, start : start + chunk_tokens] = method.decode(data, chunk)
        if chunk.shape[1] == min(chunk_tokens, num_tokens):
            num_bytes += len(data)
            num_values += chunk.size
    return out, num_bytes, num_values


def check_method(method: Method, prepared: Prepared, chunk_tokens: int) -> None:
    """The method's own check on the first chunks of a window; raises CaseFailedError."""
    planes = prepared.planes(method)
    for start in (0, chunk_tokens):
        chunk = np.ascontiguousarray(planes[:, start : start + chunk_tokens])
        if chunk.shape[1]:
            method.check(chunk, is_first=start == 0)


def measure(lm: CausalLm, method: Method, prepared: Sequence[Prepared], chunk_tokens: int) -> Point:
    """Rate and damage of one method over all windows."""
    check_method(method, prepared[0], chunk_tokens)
    parts: list[TokenDamage] = []
    num_bytes = num_values = 0
    for window in prepared:
        back, size, count = through(method, window.planes(method), chunk_tokens)
        num_bytes, num_values = num_bytes + size, num_values + count
        said = window.reference
        if not method.exact:
            said = lm.continuation(back, window.following, rotated=method.rotated)
        parts.append(compare(window.reference, said, window.following))
    quality = concatenate(parts)
    by_window = [float(part.kl.mean(dtype=np.float64)) for part in parts]
    base = perplexity(prepared)
    return Point(
        codec=method.codec,
        level=method.level,
        chunk_tokens=chunk_tokens,
        bits_per_value=8 * num_bytes / num_values,
        kl=float(np.mean(by_window)),
        kl_p99=float(np.percentile(quality.kl, 99)),
        kl_ci95=mean_interval(by_window),
        ppl_delta=base * (float(np.exp(quality.delta_nll.mean(dtype=np.float64))) - 1),
        top1_agreement=float(quality.top1.mean()),
        kl_by_window=by_window,
    )


def perplexity(prepared: Sequence[Prepared]) -> float:
    """Of the continuations, on untouched caches."""
    losses: list[NDArray[Any]] = []
    for window in prepared:
        following = window.following[1:]
        losses.append(-window.reference[np.arange(len(following)), following])
    return float(np.exp(np.concatenate(losses).mean(dtype=np.float64)))


def recall(
    lm: CausalLm,
    method: Method | None,
    prompts: Sequence[tuple[RecallPrompt, KvCapture]],
    chunk: int,
) -> float:
    """Share of numbers that the model tells right, digit by digit the most likely token.

    Args:
        lm: the model.
        method: None for untouched caches.
        prompts: with the KV of their prefixes.
        chunk: tokens of a chunk.
    """
    hits = asked = 0
    for prompt, capture in prompts:
        rotated = method is None or method.rotated
        planes = capture.rotated if rotated else capture.planes
        if method is not None:
            planes, _, _ = through(method, planes, chunk)
        for question in prompt.questions:
            given = np.concatenate([question.given, question.answer])
            said = lm.continuation(planes, given, rotated=rotated).argmax(-1)
            first = len(question.given) - 1
            right = said[first : first + len(question.answer)] == question.answer
            hits, asked = hits + int(bool(right.all())), asked + 1
    return hits / asked


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    sample = np.asarray(values, np.float64)
    picks = np.random.default_rng(7).integers(0, len(sample), (_RESAMPLES, len(sample)))
    low, high = np.percentile(sample[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
