"""The speeds of kernels/kvquant/README.md: `python -m tests.kernels.kvquant.measure_kvquant`.

One core; run it alone on the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from sglang_ext.kernels import kvquant
from tests.kernels.kvquant.kvquant_cases import make_planes, make_transform

# planes, tokens, channels, block
SHAPES = (
    (16, 256, 1024, 64),
    (16, 256, 1024, 128),
    (16, 1500, 128, 64),
    (4, 256, 1024, 1024),
    (4, 256, 576, 576),
)
REPEATS = 7


def best_s(call: Callable[[], object]) -> float:
    """The shortest processor time of some runs."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def measure(dtype: str, s: int, t: int, c: int, n: int) -> list[float]:
    """GB/s of each step."""
    arrays = make_transform(s, c, n, coarsest_step=2.0, live=0.7, radius_deviations=5.0)
    planes = make_planes(dtype, s, t, c, 5)
    out = np.empty_like(planes)
    found = kvquant.quantise(planes, dtype, arrays, 1)
    base, escapes = kvquant.base_symbols(found.tiles, arrays, 1)
    fine = kvquant.quantise(planes, dtype, arrays, 2, first_level=1)
    layers = kvquant.split(fine.tiles, arrays, 1, 2)

    def join() -> None:
        tiles = kvquant.base_tiles(layers.base.symbols, layers.escapes, arrays, 1)
        wide = kvquant.spread(tiles, arrays, 2)
        kvquant.contexts(wide)
        kvquant.refine(wide, layers.refinements[0].symbols, arrays, 2)

    calls: tuple[Callable[[], object], ...] = (
        lambda: np.copyto(out, planes),
        lambda: kvquant.quantise(planes, dtype, arrays, 1),
        lambda: kvquant.base_symbols(found.tiles, arrays, 1),
        lambda: kvquant.split(fine.tiles, arrays, 1, 2),
        lambda: kvquant.base_tiles(base.symbols, escapes, arrays, 1),
        join,
        lambda: kvquant.dequantise(found.tiles, dtype, arrays, 1, out, raw=found.raw),
    )
    return [planes.nbytes / best_s(call) / 1e9 for call in calls]


def main() -> None:
    """Print a table."""
    dtypes = sys.argv[1:] or ["bf16"]
    kvquant.warm_up(dtypes)
    print("GB/s of raw words, one core; split and join: two layers")
    print("dtype, planes, tokens, channels, block | ", end="")
    print("copy, quantise, base_symbols, split, base_tiles, join, dequantise")
    for dtype in dtypes:
        for shape in SHAPES:
            speeds = measure(dtype, *shape)
            print(dtype, *shape, "|", *(f"{speed:.2f}" for speed in speeds), flush=True)


if __name__ == "__main__":
    main()
