from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash

from sglang_ext.tiers.records import checksums
from sglang_ext.tiers.records.checksums import digests

# Around the lengths at which xxh3 changes its ways, and a page.
LENGTHS = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 4072, 266_240]


@pytest.fixture(params=["by address", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package's C function, and as where it is not to be found."""
    if request.param == "one by one":
        monkeypatch.setattr(checksums, "_FUNCTION", 0)
    else:
        assert checksums._FUNCTION


@pytest.mark.usefixtures("way")
def test_they_are_xxh3_at_any_length_and_alignment() -> None:
    flat = np.random.default_rng(3).integers(0, 256, sum(LENGTHS) + 8, np.uint8)
    arrays = [flat[at : at + length] for at, length in enumerate(LENGTHS)]
    assert digests(arrays) == [xxhash.xxh3_64_intdigest(array.tobytes()) for array in arrays]
    assert digests([]) == []


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "odd",
    [np.zeros(8, np.uint16), np.zeros((2, 8), np.uint8), np.zeros(16, np.uint8)[::2], b"12345678"],
    ids=["wide", "two axes", "strided", "bytes"],
)
def test_only_plain_bytes_are_taken(odd: Any) -> None:
    with pytest.raises(ValueError, match="contiguous u8"):
        digests([np.zeros(8, np.uint8), odd])


def test_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(4)
    batches = [[rng.integers(0, 256, 20_000, np.uint8) for _ in range(9)] for _ in range(24)]
    expected = [[xxhash.xxh3_64_intdigest(array.data) for array in batch] for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(digests, batches)) == expected
