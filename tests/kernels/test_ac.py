"""The arithmetic coder: both engines alike, near the ideal size, safe on damaged bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.codec.ideal_bits import arithmetic_bits
from sglang_ext.kernels import ac


def random_tables(rng: np.random.Generator, num: int, size: int) -> NDArray[np.uint32]:
    """Tables of very unequal frequencies, each at least 1."""
    freqs = np.ones((num, size), np.int64)
    for row in freqs:
        shares = rng.dirichlet(np.full(size, 0.1))
        row += np.floor(shares * (ac.api.TOTAL - size)).astype(np.int64)
        row[rng.integers(size)] += ac.api.TOTAL - row.sum()
    return ac.cdfs_of(freqs)


def draw(
    rng: np.random.Generator, cdfs: NDArray[np.uint32], tables: NDArray[np.int32], length: int
) -> NDArray[np.uint8]:
    """Symbols as often as the first table of each stream says."""
    points = rng.integers(0, ac.api.TOTAL, (len(tables), length))
    rows = [
        np.searchsorted(cdfs[table[0]], row, "right") - 1
        for table, row in zip(tables, points, strict=True)
    ]
    return np.array(rows, np.uint8).reshape(len(tables), length)


def make_case(seed: int, streams: int, length: int, size: int, num_rules: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cdfs = random_tables(rng, 5, size)
    tables = rng.integers(0, 5, (streams, num_rules)).astype(np.int32)
    rules = rng.integers(0, num_rules, length).astype(np.uint8)
    symbols = draw(rng, cdfs, tables, length)
    return {"symbols": symbols, "cdfs": cdfs, "tables": tables, "rules": rules}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    streams=st.integers(0, 4),
    length=st.integers(0, 60),
    size=st.sampled_from([1, 2, 3, 33, 256]),
    num_rules=st.integers(1, 3),
)
def test_engines_write_the_same_bytes_and_read_them_back(
    seed: int, streams: int, length: int, size: int, num_rules: int
) -> None:
    case = make_case(seed, streams, length, size, num_rules)
    fast, plain = (ac.encode(**case, engine=engine) for engine in ("numba", "naive"))
    assert np.array_equal(fast.lengths, plain.lengths)
    assert np.array_equal(fast.data, plain.data)
    for engine in ("numba", "naive"):
        out = np.full_like(case["symbols"], 255)
        ac.decode(fast, case["cdfs"], case["tables"], out, case["rules"], engine=engine)
        assert np.array_equal(out, case["symbols"])


def test_the_rarest_symbol_stays_within_the_bound() -> None:
    freqs = np.ones((1, 256), np.int64)
    freqs[0, 7] = 65536 - 255
    symbols = np.array([np.arange(256), np.full(256, 7)], np.uint8).repeat(4, axis=1)
    cdfs, tables = ac.cdfs_of(freqs), np.zeros((2, 1), np.int32)
    coded = ac.encode(symbols, cdfs, tables)
    assert coded.lengths[0] <= ac.api.stream_bound_bytes(symbols.shape[1])
    assert coded.lengths[1] < 3
    out = np.zeros_like(symbols)
    ac.decode(coded, cdfs, tables, out)
    assert np.array_equal(out, symbols)


def test_size_is_the_ideal_plus_the_streams_ends() -> None:
    case = make_case(3, 64, 1500, 33, 1)
    del case["rules"]
    coded = ac.encode(**case)
    ideal_bytes = arithmetic_bits(**case) / 8
    assert ideal_bytes <= coded.data.size
    assert coded.data.size <= ideal_bytes * 1.001 + 1.5 * 64


def test_symbols_without_frequency_are_refused() -> None:
    cdfs = ac.cdfs_of(np.array([[65536, 0]]))
    tables = np.zeros((1, 1), np.int32)
    for symbol in (1, 2):
        with pytest.raises(ac.ACError, match="frequency 0"):
            ac.encode(np.array([[0, symbol]], np.uint8), cdfs, tables)
    assert ac.encode(np.zeros((1, 9), np.uint8), cdfs, tables).lengths.tolist() == [1]


@pytest.mark.parametrize(
    "cdf", [[0, 5, 4, 65536], [1, 65536], [0, 65535], [0], [0, *[65536] * 257]]
)
def test_bad_tables_are_refused(cdf: list[int]) -> None:
    with pytest.raises(ac.ACError, match="expected tables"):
        ac.encode(
            np.zeros((1, 1), np.uint8), np.array([cdf], np.uint32), np.zeros((1, 1), np.int32)
        )


def test_shapes_and_table_numbers_are_checked() -> None:
    case = make_case(1, 2, 10, 4, 2)
    for name, bad in (
        ("tables", case["tables"] + 5),
        ("tables", case["tables"][:1]),
        ("rules", case["rules"] + 2),
        ("rules", case["rules"][:9]),
    ):
        with pytest.raises(ac.ACError):
            ac.encode(**{**case, name: bad})


@settings(max_examples=150)
@given(data=st.binary(max_size=80), cut=st.integers(0, 80), seed=st.integers(0, 9))
def test_any_bytes_decode_to_known_symbols_or_are_refused(data: bytes, cut: int, seed: int) -> None:
    cdfs = random_tables(np.random.default_rng(seed), 1, 7)
    words = np.frombuffer(data, np.uint8)
    cut = min(cut, len(words))
    coded = ac.Coded(np.array([cut, len(words) - cut], np.uint32), words)
    guarded = np.full((4, 20), 200, np.uint8)
    try:
        ac.decode(coded, cdfs, np.zeros((2, 1), np.int32), guarded[1:3])
    except ac.ACError:
        pass
    else:
        assert guarded[1:3].max() < 7
    assert (guarded[[0, 3]] == 200).all()


def test_lengths_have_to_fit() -> None:
    case = make_case(2, 3, 50, 9, 1)
    coded = ac.encode(**case)
    out = np.zeros_like(case["symbols"])
    moved = coded.lengths.copy()
    moved[0] += 1
    moved[1] -= 1
    for lengths, data in (
        (moved, coded.data),
        (coded.lengths, coded.data[:-1]),
        (coded.lengths[:2], coded.data),
    ):
        with pytest.raises(ac.ACError):
            ac.decode(ac.Coded(lengths, data), case["cdfs"], case["tables"], out, case["rules"])
