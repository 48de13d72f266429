"""The codec `lossless` against zstandard, on the KV of the bundled model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.codec import create_codec
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.calibration.hf_capture import CausalLm

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture(scope="module")
def planes() -> PlaneArray:
    model = CausalLm(str(ASSETS / "tinylm"))
    text = (ASSETS / "text" / "python-docs" / "howto-logging-cookbook.rst").read_text()
    return model.prefill(model.tokenize(text)[:1500]).planes


@pytest.mark.parametrize(("num_tokens", "share"), [(64, 0.95), (256, 0.92), (1500, 0.85)])
def test_smaller_than_zstd_19_on_byte_planes(
    planes: PlaneArray, num_tokens: int, share: float
) -> None:
    chunk = np.ascontiguousarray(planes[:, :num_tokens])
    codec = create_codec("lossless", dtype="bf16")
    data = codec.encode(chunk)
    other = create_codec("zstd", dtype="bf16", compression_level=19).encode(chunk)
    assert len(data) < share * len(other)
    out = np.zeros_like(chunk)
    codec.decode(data, out)
    assert np.array_equal(out, chunk)
