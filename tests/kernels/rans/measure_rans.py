"""Measure the figures of kernels/rans/README.md: `python -m tests.kernels.rans.measure_rans`.

Quantised Gaussian values, 31 symbols, 24 tables of scales from 0.3 to 5.6 steps, about 2.4 bits a
symbol; CPU time of one core, the best of some runs. Speeds are of the bf16 values that the symbols
stand for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.codec.ideal_bits import rans_bits
from sglang_ext.kernels import rans
from sglang_ext.kernels.rans import Tables, api, cpu, vector, wide
from tests.kernels.rans.rans_cases import Case

ROOT = Path(__file__).parents[3]
NUM_VALUES = 1 << 23
RADIUS = 15
SCALES = np.geomspace(0.3, 5.6, 24)
# Tokens, and whether neighbouring lanes have similar tables, as a profile's order makes them.
SHAPES = ((64, True), (256, True), (1500, True), (1500, False), (8192, True))


def gaussian_tables() -> Tables:
    edges = np.arange(-RADIUS, RADIUS + 2) - 0.5
    freqs = np.zeros((1 + 3 * len(SCALES), 256), np.uint16)
    freqs[0, 0] = 4096
    for row in range(1, len(freqs)):  # three equal tables for each scale: the contexts
        shares = np.diff([erf(edge / (SCALES[(row - 1) // 3] * sqrt(2))) for edge in edges])
        counts = np.maximum(1, np.floor(shares / shares.sum() * 4096)).astype(int)
        counts[RADIUS] += 4096 - counts.sum()
        freqs[row, : len(counts)] = counts
    return Tables(freqs)


def gaussian_case(
    num_tokens: int, in_order: bool, with_context: bool, num_values: int = NUM_VALUES
) -> Case:
    rng = np.random.default_rng(0)
    num_tiles = num_values // (32 * num_tokens)
    scales = rng.integers(0, len(SCALES), (num_tiles, 32))
    if in_order:  # blocks of 128 coefficients, from the greatest rate to the least
        blocks = scales[: num_tiles // 4 * 4].reshape(-1, 128)
        blocks[:] = -np.sort(-blocks, 1)
    symbols = np.empty((num_tiles, num_tokens, 32), np.uint8)
    for tile, scale in enumerate(SCALES[scales]):
        values = np.rint(rng.standard_normal((num_tokens, 32)) * scale)
        symbols[tile] = np.clip(values, -RADIUS, RADIUS) + RADIUS
    context = None
    if with_context:
        context = rng.integers(0, 3, symbols.shape, np.uint8)
    classes = (1 + 3 * scales).astype(np.uint16)
    tiles_per_group = rans.tiles_per_group_for(num_tokens)
    return Case(symbols, classes, gaussian_tables(), tiles_per_group, context)


def best_s(
    call: Callable[[], Any], num: int = 9, clock: Callable[[], float] = time.thread_time
) -> float:
    times = []
    for _ in range(num):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def measure_cpu() -> None:
    print("kernels  tokens tables  context | bits/symbol over ideal | encode, decode GB/s of bf16")
    for kernels in (wide, cpu) if vector.SUPPORTED else (cpu,):
        api._kernels = kernels
        for num_tokens, in_order in SHAPES:
            for with_context in (False, True):
                case = gaussian_case(num_tokens, in_order, with_context)
                coded, out = case.encode(), np.empty_like(case.symbols)
                ideal = rans_bits(case.symbols, case.classes, case.tables, case.context)
                encode_s = best_s(case.encode)
                decode_s = best_s(partial(case.decode_into, out, coded))
                assert np.array_equal(out, case.symbols)
                print(
                    f"{kernels.__name__.rsplit('.', 1)[-1]:8} {num_tokens:6} "
                    f"{'sorted' if in_order else 'random'}  {with_context!s:7} | "
                    f"{8 * coded.nbytes / out.size:.3f} {8 * coded.nbytes / ideal - 1:+.2%} | "
                    f"{2 * out.size / encode_s / 1e9:5.2f} {2 * out.size / decode_s / 1e9:5.2f}"
                )
    api._kernels = wide if vector.SUPPORTED else cpu


def measure_one_page() -> None:
    """A page alone: what of the time does not depend on its size."""
    for num_tokens, num_channels in ((1, 2048), (64, 2048), (64, 32768)):
        case = gaussian_case(num_tokens, True, False, num_tokens * num_channels)
        coded, out = case.encode(), np.empty_like(case.symbols)
        encode_s = best_s(case.encode, 99)
        decode_s = best_s(partial(case.decode_into, out, coded), 99)
        print(
            f"{num_tokens} tokens of {num_channels} channels: encode {encode_s * 1e6:.0f} us, "
            f"decode {decode_s * 1e6:.0f} us"
        )


def measure_compilation() -> None:
    """Seconds of `warm_up` in a new process, without a cache and with one."""
    code = (
        "import time; from sglang_ext.kernels import rans; start = time.perf_counter();"
        "rans.warm_up(); print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiled", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT, env={**os.environ, "NUMBA_CACHE_DIR": folder},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            print(f"warm_up, {what}: {float(done.stdout):.2f} s")


def device_s(call: Callable[[], Any]) -> float:
    def finished() -> None:
        call()
        torch.cuda.synchronize()

    return best_s(finished, clock=time.perf_counter)


def measure_gpu() -> None:
    from sglang_ext.kernels.rans import gpu

    for num_tokens, with_context in ((256, False), (1500, False), (1500, True)):
        case = gaussian_case(num_tokens, True, with_context, 1 << 28)
        coded = case.encode()
        symbols, classes = (torch.from_numpy(a).cuda() for a in (case.symbols, case.classes))
        context = None if case.context is None else torch.from_numpy(case.context).cuda()
        words, offsets, states = (
            torch.from_numpy(a.copy()).cuda() for a in (coded.words, coded.offsets, coded.states)
        )
        out = torch.empty_like(symbols)

        layout = (case.tables, case.tiles_per_group, context)
        encode = partial(gpu.encode_tensors, symbols, classes, *layout)
        decode = partial(gpu.decode_tensors, words, offsets, states, classes, *layout, out)
        speeds = [2 * out.numel() / device_s(call) / 1e9 for call in (encode, decode)]
        assert torch.equal(out, symbols)
        print(
            f"{torch.cuda.get_device_name()}, {num_tokens} tokens, context {with_context}: "
            f"encode {speeds[0]:.0f}, decode {speeds[1]:.0f} GB/s of bf16"
        )


if __name__ == "__main__":
    measure_compilation()
    measure_cpu()
    measure_one_page()
    if torch.cuda.is_available():
        measure_gpu()
