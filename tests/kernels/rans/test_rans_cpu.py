"""rANS on the CPU: every kernel against the numpy reference, and what the tables promise."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.codec.ideal_bits import rans_bits
from sglang_ext.kernels import rans
from sglang_ext.kernels.rans import RansError, Tables, api, cpu, vector, wide
from tests.kernels.rans.rans_cases import Case, make_case, make_tables, same_coded

KERNELS = [cpu, wide] if vector.SUPPORTED else [cpu]
SHAPES = (
    # tiles, tokens, tiles per group
    (1, 1, 1), (200, 1, 2048), (3, 1, 1), (13, 2, 3), (200, 11, 7), (33, 64, 32), (9, 100, 2),
    (8, 256, 8), (2, 1500, 2), (1, 2048, 1), (1, 8192, 1), (4, 8192, 1),
)  # fmt: skip


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: ModuleType = request.param
    monkeypatch.setattr(api, "_kernels", module)
    return module


def check_round_trip(case: Case) -> None:
    coded = case.encode()
    assert coded.states.dtype == np.uint32
    assert coded.words.dtype == np.uint16
    assert coded.words.size == coded.offsets[-1]
    np.testing.assert_array_equal(case.decode(coded), case.symbols)


@pytest.mark.parametrize("num_contexts", [0, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trips(kernels: ModuleType, shape: tuple[int, int, int], num_contexts: int) -> None:
    rng = np.random.default_rng(sum(shape))
    tables = make_tables([3, 17, 254, 2, 64, 9], rng)
    check_round_trip(make_case(*shape, tables, rng, num_contexts))


@pytest.mark.parametrize("skew", [0.0, 1.0, 30.0])
def test_every_alphabet(kernels: ModuleType, skew: float) -> None:
    rng = np.random.default_rng(0)
    tables = make_tables(list(range(1, 255)), rng, skew)
    for uniform in (False, True):
        case = make_case(24, 90, 5, tables, rng, uniform=uniform)
        assert len(np.unique(case.classes)) > 230
        check_round_trip(case)


@settings(max_examples=200)
@given(
    num_tiles=st.integers(1, 20),
    num_tokens=st.integers(1, 12),
    tiles_per_group=st.integers(1, 22),
    num_contexts=st.sampled_from([0, 1, 3]),
    uniform=st.booleans(),
    skew=st.floats(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_kernels_make_the_reference_bytes(
    num_tiles: int,
    num_tokens: int,
    tiles_per_group: int,
    num_contexts: int,
    uniform: bool,
    skew: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    tables = make_tables([int(n) for n in rng.integers(1, 255, 4)], rng, skew)
    case = make_case(num_tiles, num_tokens, tiles_per_group, tables, rng, num_contexts, uniform)
    expected = case.encode("naive")
    np.testing.assert_array_equal(case.decode(expected, "naive"), case.symbols)
    for module in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "_kernels", module)
            assert same_coded(case.encode(), expected)
            np.testing.assert_array_equal(case.decode(expected), case.symbols)


def test_a_stream_is_what_it_was(kernels: ModuleType) -> None:
    # Streams are kept on disk: whatever else changes, these must not.
    freqs = np.zeros((3, 256), np.uint16)
    freqs[0, :5] = 1, 1000, 2000, 95, 1000
    freqs[1, [7, 250]] = 4095, 1
    freqs[2, :254] = 16
    freqs[2, 100] += 32
    symbols = (np.arange(2 * 20 * 32).reshape(2, 20, 32) * 7 // 3 % 5).astype(np.uint8)
    classes = np.where(np.arange(64).reshape(2, 32) % 3, 0, 2).astype(np.uint16)
    symbols[1, :, 16:], classes[1, 16:] = 7, 1
    symbols[1, 3, 20] = 250
    coded = rans.encode(symbols, classes, Tables(freqs), 2)
    assert coded.offsets.tolist() == [0, 327]
    assert coded.states[0, :5].tolist() == [184320, 226519957, 433779, 208928, 15937007]
    assert coded.words[:8].tolist() == [16448, 4112, 0, 15330, 36864, 32768, 16448, 4112]
    assert zlib.crc32(coded.states.tobytes() + coded.words.tobytes()) == 2359743977


def test_padding_is_free(kernels: ModuleType) -> None:
    rng = np.random.default_rng(1)
    tables = make_tables([40], rng)
    symbols, classes = np.zeros((3, 50, 32), np.uint8), np.zeros((3, 32), np.uint16)
    coded = rans.encode(symbols, classes, tables, 2)
    assert coded.words.size == 0
    assert (coded.states == 1 << 16).all()
    assert rans_bits(symbols, classes, tables) == 0
    classes[:, ::2] = 1
    half = make_case(3, 50, 2, tables, rng)
    symbols[:, :, ::2] = half.symbols[:, :, ::2] * (half.classes[:, None, ::2] > 0)
    check_round_trip(Case(symbols, classes, tables, 2, None))


def test_no_tiles(kernels: ModuleType) -> None:
    tables = make_tables([4], np.random.default_rng(0))
    case = make_case(0, 5, 3, tables, np.random.default_rng(0))
    for engine in ("numba", "naive"):
        coded = case.encode(engine)
        assert (coded.states.shape, coded.offsets.tolist(), coded.words.size) == ((0, 32), [0], 0)
        assert case.decode(coded, engine).size == 0


@pytest.mark.parametrize(("num_tokens", "gap"), [(256, 0.012), (1500, 0.012)])
def test_size_is_near_the_ideal(kernels: ModuleType, num_tokens: int, gap: float) -> None:
    rng = np.random.default_rng(2)
    tables = make_tables([8, 16, 16, 32], rng, 0.5)
    tiles_per_group = rans.tiles_per_group_for(num_tokens)
    case = make_case(8 * tiles_per_group, num_tokens, tiles_per_group, tables, rng)
    ideal = rans_bits(case.symbols, case.classes, tables)
    size = 8 * case.encode().nbytes
    assert ideal < size < ideal * (1 + gap)


def test_ideal_bits_counts_contexts() -> None:
    freqs = np.zeros((2, 256), np.uint16)
    freqs[0, :2] = 1024, 3072
    freqs[1, 1] = 4096
    symbols = np.array([0, 1] * 16, np.uint8).reshape(1, 1, 32)
    classes = np.zeros((1, 32), np.uint16)
    expected = 16 * 2 + 16 * np.log2(4 / 3)
    assert rans_bits(symbols, classes, Tables(freqs)) == pytest.approx(expected)
    context = symbols.copy()  # the ones are certain in the other table
    assert rans_bits(symbols, classes, Tables(freqs), context) == pytest.approx(32)
    assert rans_bits(symbols, classes + np.uint16(1), Tables(freqs)) == np.inf


def test_multipliers_divide_exactly() -> None:
    freqs = np.zeros((4096, 256), np.uint16)
    divisors = np.arange(1, 4097, dtype=np.uint64)
    freqs[:, 0], freqs[:, 1] = divisors, 4096 - divisors
    entries = Tables(freqs).encode_lut.reshape(-1, 256)[:, 0]
    assert ((entries & np.uint64(8191)) == divisors).all()
    increment, shift = entries >> np.uint64(30) & np.uint64(1), entries >> np.uint64(25)
    shift = (shift & np.uint64(31)) + np.uint64(32)
    limit = divisors << np.uint64(20)
    rng = np.random.default_rng(0)
    for i in range(600):
        if i < 200:  # the ends of the range, then the neighbours of multiples, then anything
            x = np.uint64(i) if i < 100 else limit - np.uint64(i - 99)
        else:
            x = rng.integers(0, limit, dtype=np.uint64)
            x = x - x % divisors - np.uint64(i % 2) if i < 400 else x
        x = np.minimum(x, limit - np.uint64(1))
        assert ((x + increment) < 1 << 32).all()
        quotient = ((x + increment) * (entries >> np.uint64(32))) >> shift
        np.testing.assert_array_equal(quotient, x // divisors)


def test_symbols_without_a_frequency_are_refused(kernels: ModuleType) -> None:
    tables = make_tables([5, 7], np.random.default_rng(0))
    for num_contexts in (0, 2):
        case = make_case(9, 4, 2, tables, np.random.default_rng(1), num_contexts)
        case.symbols[6, 2, 31] = 200
        for engine in ("numba", "naive"):
            with pytest.raises(ValueError, match=r"tiles 6\.\. has frequency 0"):
                case.encode(engine)


def test_read_only_and_odd_buffers(kernels: ModuleType) -> None:
    case = make_case(
        5, 33, 2, make_tables([12], np.random.default_rng(0)), np.random.default_rng(1)
    )
    coded = case.encode()
    raw = b"x" + coded.words.tobytes() + coded.states.tobytes()
    words = np.frombuffer(raw, "<u2", coded.words.size, 1)  # neither aligned nor writeable
    states = np.frombuffer(raw, "<u4", coded.states.size, 1 + coded.words.nbytes)
    loaded = rans.Coded(states.reshape(-1, 32), coded.offsets, words)
    num_signatures = len(kernels.decode.signatures)
    np.testing.assert_array_equal(case.decode(loaded), case.symbols)
    strided = np.repeat(case.symbols, 2, 0)[::2]
    strided.flags.writeable = False
    assert same_coded(case.coding(strided), coded)
    assert len(kernels.decode.signatures) == num_signatures == 1
    assert len(kernels.encode.signatures) == 1


def test_warm_up_compiles_all_there_is() -> None:
    rans.warm_up()
    for kernel in (api._kernels.decode, api._kernels.encode):
        before = list(kernel.signatures)
        for contexts in (0, 2):
            rng = np.random.default_rng(0)
            check_round_trip(make_case(7, 3, 2, make_tables([3, 4], rng), rng, contexts))
        assert list(kernel.signatures) == before


def test_tables_are_checked() -> None:
    good = make_tables([5], np.random.default_rng(0)).freqs
    many = np.zeros((65537, 256), np.uint16)
    shapes: list[npt.NDArray[Any]] = [good[0], good[:, :255], good[:0], many]
    for freqs in (good.astype(np.uint32), *shapes):
        with pytest.raises(ValueError, match=r"freqs must be|1 to 65536 tables"):
            Tables(freqs)
    bad = good.copy()
    bad[1, 0] += 1
    with pytest.raises(ValueError, match="row 1 of freqs must add up to 4096, got 4097"):
        Tables(bad)


def test_tables_do_not_follow_their_source() -> None:
    rng = np.random.default_rng(0)
    source = make_tables([5], rng).freqs.copy()
    tables = Tables(source)
    source[:] = 0
    check_round_trip(make_case(2, 4, 1, tables, rng))


def test_arguments_are_checked() -> None:
    rng = np.random.default_rng(0)
    tables = make_tables([5, 6], rng)
    case = make_case(4, 3, 2, tables, rng, 2)
    symbols, classes, context = case.symbols, case.classes, case.context
    assert context is not None
    for changes in (
        {"symbols": symbols.astype(np.int16)},
        {"symbols": symbols[:, :, :31]},
        {"symbols": symbols[:, :0], "context": context[:, :0]},
        {"classes": classes[:3]},
        {"classes": classes.astype(np.int64)},
        {"classes": classes + np.uint16(2)},
        {"context": context[:3]},
        {"context": context + np.uint8(2)},
        {"context": context.astype(bool)},
        {"tiles_per_group": 0},
    ):
        arguments = {
            "symbols": symbols, "classes": classes, "tables": tables, "tiles_per_group": 2,
            "context": context, **changes,
        }  # fmt: skip
        with pytest.raises(ValueError, match=r"must (be|have)"):
            rans.encode(**arguments)  # type: ignore[arg-type]
    coded = case.encode()
    read_only = np.zeros_like(symbols)
    read_only.flags.writeable = False
    for out in (symbols[:3], np.zeros((4, 3, 64), np.uint8)[:, :, ::2], read_only):
        with pytest.raises(ValueError, match="out must be") as caught:
            case.decode_into(out, coded)
        assert not isinstance(caught.value, RansError)
