"""The conversions of words, in all engines' forms, against torch and an oracle."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.kernels.kvquant import WORDS, naive, words
from tests.kernels.kvquant import kvquant_oracle as oracle
from tests.kernels.kvquant.kvquant_cases import DTYPES

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@words.jit()
def encode_all(values: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = words.encode(values[i], out[i])


@words.jit()
def decode_all(source: Any, out: Any) -> None:
    for i in range(source.size):
        out[i] = words.decode(source[i])


def all_words(dtype: str) -> np.ndarray[Any, Any]:
    kind = WORDS[dtype]
    if kind.itemsize < 4:
        return np.arange(256**kind.itemsize, dtype=kind)
    return np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dtype: str) -> None:
    source = all_words(dtype)
    wanted = torch.from_numpy(source.copy()).view(TORCH[dtype]).float().numpy()
    fast = np.empty(source.size, np.float32)
    decode_all(source.view(words.KERNEL_WORDS[dtype]), fast)
    for got in (naive.decode_words(source, dtype), fast):
        finite = ~np.isnan(wanted)
        assert np.array_equal(np.isnan(got), ~finite)
        assert np.array_equal(got[finite].view(np.uint32), wanted[finite].view(np.uint32))
    for word in source[:: max(1, source.size // 2000)].tolist():
        value = oracle.word_value(word, dtype)
        exact = float(wanted[np.flatnonzero(source == word)[0]])
        assert (value is None and not np.isfinite(exact)) or value == Fraction(exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode(dtype: str) -> None:
    """Grid points, the middles between them and their neighbours, and random values."""
    finite = naive.decode_words(all_words(dtype), dtype)
    finite = np.unique(finite[np.isfinite(finite)])[:: 1 if dtype != "fp32" else 7]
    with np.errstate(over="ignore"):
        middle = (finite[1:].astype(np.float64) + finite[:-1]) / 2
        middle = middle.astype(np.float32)
    inf = np.float32(np.inf)
    random = np.random.default_rng(1).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    values = np.concatenate(
        [finite, middle, np.nextafter(middle, inf), np.nextafter(middle, -inf), random]
    )
    values = np.concatenate([values[~np.isnan(values)], np.array([inf, -inf], np.float32)])
    got = naive.encode_words(values, dtype)
    fast: Any = np.zeros(values.size, words.KERNEL_WORDS[dtype])
    encode_all(values, fast)
    assert np.array_equal(fast.view(WORDS[dtype]), got)
    largest = float(oracle.FORMATS[dtype][3])
    clipped = torch.from_numpy(values).double().clamp(-largest, largest).float()
    wanted = clipped.to(TORCH[dtype]).view(torch.uint8).numpy().view(WORDS[dtype])
    assert np.array_equal(got, wanted)
    for i in np.random.default_rng(2).integers(0, values.size, 2000).tolist():
        value = float(values[i])
        if abs(value) <= largest and value != 0:
            word = oracle.nearest_word(Fraction(value), dtype)
            if word & ~(1 << (8 * WORDS[dtype].itemsize - 1)):
                assert int(got[i]) == word
