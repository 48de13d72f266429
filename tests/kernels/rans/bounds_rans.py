"""Checks that the CPU kernels keep to their buffers; run by test_rans_malformed.py.

A process of its own, with `NUMBA_BOUNDSCHECK=1`, for indices in numba's code, and buffers between
pages that nobody can touch, for the vectors: a step aside ends the process.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba.core import config

from sglang_ext.kernels.rans import Coded, cpu, vector, wide
from tests.kernels.rans.rans_cases import Case, Guarded, make_case, make_tables, mutated, same_coded

KERNELS = (cpu, wide) if vector.SUPPORTED else (cpu,)
NO_CONTEXT = np.zeros(1, np.uint8)


class Bed:
    """A case's arguments between guards."""

    def __init__(self, case: Case, luts: tuple[Guarded, Guarded]) -> None:
        self.case, self.luts = case, luts
        self.guards: list[Guarded] = []
        context = NO_CONTEXT if case.context is None else case.context
        self.fixed = (
            self._own(case.classes, True),
            self._own(context, True),
            case.context is not None,
            np.uint64(case.num_tokens),
        )
        self.symbols = self._own(case.symbols, True)

    def _own(self, array: np.ndarray, read_only: bool = False) -> Any:
        guard = Guarded(array.reshape(-1), read_only)
        self.guards.append(guard)
        return guard.array

    def check(self) -> None:
        for guard in self.guards:
            guard.check()

    def encode(self, kernels: Any, expected: Coded) -> None:
        """Encode, with room for exactly what comes out."""
        case = self.case
        tiles = min(case.tiles_per_group, case.symbols.shape[0])
        scratch = self._own(np.zeros(tiles * case.num_tokens * 32 + 1, np.uint16))
        states, offsets, words = (
            self._own(np.zeros_like(array))
            for array in (expected.states, expected.offsets, expected.words)
        )
        failed = kernels.encode(
            self.symbols, self.luts[1].array, *self.fixed, np.uint64(case.tiles_per_group),
            scratch, states, offsets, words,
        )  # fmt: skip
        assert not failed
        assert same_coded(Coded(states.reshape(-1, 32), offsets, words), expected)
        self.check()

    def decode(self, kernels: Any, coded: Coded) -> np.ndarray | None:
        """Symbols, or None if the kernel found something wrong."""
        case = self.case
        out = self._own(np.zeros_like(case.symbols))
        states, offsets, words = (
            self._own(array, True) for array in (coded.states, coded.offsets, coded.words)
        )
        failed = kernels.decode(
            words, offsets, states, self.luts[0].array, *self.fixed,
            np.uint64(case.tiles_per_group), out,
        )  # fmt: skip
        self.check()
        return None if failed else out.reshape(case.symbols.shape)


def main(num_cases: int) -> None:
    assert config.BOUNDSCHECK, "set NUMBA_BOUNDSCHECK=1"
    rng = np.random.default_rng(num_cases)
    tables = make_tables([2, 30, 200], rng, 3.0)
    luts = Guarded(tables.decode_lut, True), Guarded(tables.encode_lut, True)
    found = unnoticed = 0
    for number in range(num_cases):
        num_tiles, tiles_per_group = (int(n) for n in rng.integers(1, 12, 2))
        num_tokens, num_contexts = int(rng.integers(1, 9)), 2 * (number % 2)
        case = make_case(
            num_tiles, num_tokens, tiles_per_group, tables, rng, num_contexts, number % 3 == 0
        )
        coded = case.encode("naive")
        for kernels in KERNELS:
            bed = Bed(case, luts)
            bed.encode(kernels, coded)
            decoded = bed.decode(kernels, coded)
            assert decoded is not None
            assert np.array_equal(decoded, case.symbols)
        for _ in range(4):
            wrong = mutated(coded, rng)
            results = [Bed(case, luts).decode(kernels, wrong) for kernels in KERNELS]
            for result in results:
                assert (result is None) == (results[0] is None)
                if result is None:
                    found += 1
                else:  # another stream, and a good one
                    unnoticed += not same_coded(wrong, coded)
                    assert same_coded(case.coding(result), wrong)
    for lut in luts:
        lut.check()
    assert found > num_cases
    print(f"all checks passed; {found} found, {unnoticed} were other streams")


if __name__ == "__main__":
    main(int(sys.argv[1]))
