"""Damaged rANS data: found, or another stream that decodes; and no byte beside any buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.kernels import rans
from sglang_ext.kernels.rans import Coded, RansError, api, cpu, vector, wide
from tests.kernels.rans.rans_cases import GUARD, Case, make_case, make_tables, mutated, same_coded

ROOT = Path(__file__).parents[3]
ENGINES = [("numba", cpu), ("naive", None)] + ([("numba", wide)] if vector.SUPPORTED else [])


@pytest.fixture(params=ENGINES, ids=lambda param: f"{param[0]}-{param[1] is wide}")
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> rans.Engine:
    name: rans.Engine
    name, module = request.param
    if module is not None:
        monkeypatch.setattr(api, "_kernels", module)
    return name


def small_case(num_contexts: int = 0, tiles: int = 13) -> Case:
    rng = np.random.default_rng(tiles)
    tables = make_tables([3, 40, 254], rng)
    return make_case(tiles, 20, 3, tables, rng, num_contexts)


def test_cut_short(engine: rans.Engine) -> None:
    for case in (small_case(), small_case(2)):
        coded = case.encode()
        for group in range(coded.states.shape[0]):
            at = int(coded.offsets[group + 1])
            offsets = coded.offsets.copy()
            offsets[group + 1 :] -= np.uint32(1)
            words = np.delete(coded.words, at - 1)
            with pytest.raises(RansError, match=f"group {group}"):
                case.decode(Coded(coded.states, offsets, words), engine)


def test_words_left_over(engine: rans.Engine) -> None:
    for case in (small_case(), small_case(2)):
        coded = case.encode()
        for group in range(coded.states.shape[0]):
            offsets = coded.offsets.copy()
            offsets[group + 1 :] += np.uint32(1)
            words = np.insert(coded.words, int(coded.offsets[group + 1]), 7)
            with pytest.raises(RansError, match=f"(?i)group {group} .*words"):
                case.decode(Coded(coded.states, offsets, words), engine)


def test_other_end_state(engine: rans.Engine) -> None:
    # States of lanes that read no words: they end one higher than they should.
    case = small_case()
    case.classes[:] = 0
    quiet = Case(np.zeros_like(case.symbols), case.classes, case.tables, 3, None)
    coded = quiet.encode()
    coded.states[2, 9] += np.uint32(1)
    with pytest.raises(RansError, match="group 2"):
        quiet.decode(coded, engine)


@pytest.mark.parametrize("num_contexts", [0, 2])
def test_mutations_are_found_or_are_other_streams(engine: rans.Engine, num_contexts: int) -> None:
    rng = np.random.default_rng(0)
    case = small_case(num_contexts)
    coded = case.encode()
    found, num = 0, 60 if engine == "naive" else 1500
    # Guard bytes around what is written.
    area = np.full((case.symbols.shape[0] + 2, *case.symbols.shape[1:]), GUARD, np.uint8)
    for _ in range(num):
        wrong = mutated(coded, rng)
        copy = Coded(wrong.states.copy(), wrong.offsets.copy(), wrong.words.copy())
        try:
            case.decode_into(area[1:-1], wrong, engine)
        except RansError:
            found += 1
        else:
            assert same_coded(case.coding(area[1:-1].copy()), wrong)
        assert same_coded(wrong, copy)
        assert (area[0] == GUARD).all()
        assert (area[-1] == GUARD).all()
    assert found > 0.9 * num


def test_what_the_kernels_rely_on_is_checked_before(engine: rans.Engine) -> None:
    case = small_case()
    coded = case.encode()
    states, offsets, words = coded.states, coded.offsets, coded.words
    falling = offsets.copy()
    falling[2] = falling[1] - 1
    beyond = offsets.copy()
    beyond[1] = words.size + 1
    low = states.copy()
    low[1, 1] = 65535
    for wrong in (
        Coded(states, falling, words),
        Coded(states, beyond, words),
        Coded(states, offsets + np.uint32(1), words),
        Coded(states, offsets, words[:-1]),
        Coded(states, offsets, np.append(words, np.uint16(0))),
        Coded(states, offsets[:-1], words[: offsets[-2]]),
        Coded(states, offsets.astype(np.int64), words),
        Coded(states[:-1], offsets, words),
        Coded(states.reshape(-1), offsets, words),
        Coded(states.astype(np.uint64), offsets, words),
        Coded(low, offsets, words),
        Coded(states, offsets, words.astype(np.int16)),
        Coded(states, offsets, words.reshape(1, -1)),
    ):
        with pytest.raises(RansError, match=r"must (be|rise)"):
            case.decode(wrong, engine)


def test_nothing_beside_the_buffers_is_touched(tmp_path: Path) -> None:
    # A cache of its own: numba would take kernels from the usual one, made without the checks.
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.rans.bounds_rans", "250"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-4000:])
    assert "all checks passed" in done.stdout
