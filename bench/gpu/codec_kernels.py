"""The codecs' kernels on a device: their bits are those of the plain statement of each.

Servers code on processors; these are for whoever decodes on a device. A Triton that cannot compile
one of them leaves that one out, and says so in a line. Each is tried in a process of its own, as a
compiler's complaint is a page, and may end the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch

from sglang_ext.kernels import kvquant, rans

_TIMEOUT_S = 90.0


def check(names: tuple[str, ...] = ("rans", "kvquant")) -> dict[str, str]:
    """Tries each; returns a line for each: what came out, or why it is left out."""
    return {name: _in_a_process(name) for name in names}


def _in_a_process(name: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.codec_kernels", name],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"left out: it took over {_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1]
    said = [line for line in done.stderr.strip().splitlines() if line.strip()]
    reason = said[-1] if said else f"its process ended with {done.returncode}"
    return f"left out with triton {version('triton')}: {reason}"


def _engine() -> rans.Engine:
    """Triton on a device; where there is none, the plain statement, which tries the check alone."""
    return "triton" if torch.cuda.is_available() else "naive"


def _rans() -> int:
    rng = np.random.default_rng(1)
    freqs = np.zeros((3, 256), np.uint16)
    freqs[0, 0] = 4096  # padding
    freqs[1, :16] = 256
    freqs[2, :64] = 64
    tables = rans.Tables(freqs)
    for tiles, tokens, group in ((5, 33, 2), (32, 64, 16)):
        classes = rng.integers(1, 3, (tiles, 32)).astype(np.uint16)
        most = np.where(classes == 1, 16, 64)[:, None, :]
        symbols = (rng.random((tiles, tokens, 32)) * most).astype(np.uint8)
        host = rans.encode(symbols, classes, tables, group, engine="naive")
        coded = rans.encode(symbols, classes, tables, group, engine=_engine())
        _require(np.array_equal(host.words, coded.words), "other words were coded")
        out = np.zeros_like(symbols)
        rans.decode(coded, classes, tables, tokens, group, None, out, _engine())
        _require(np.array_equal(out, symbols), "other symbols came back")
    return 2


def _kvquant() -> int:
    rng = np.random.default_rng(2)
    dtypes = ("bf16", "fp16", "fp8_e4m3")
    for dtype in dtypes:
        arrays, kind = _transform(rng), kvquant.WORDS[dtype]
        planes = rng.integers(0, np.iinfo(kind).max, (2, 65, 64)).astype(kind)
        host = kvquant.quantise(planes, dtype, arrays, 0, engine="naive")
        found = kvquant.quantise(planes, dtype, arrays, 0, engine=_engine())
        _require(np.array_equal(host.tiles, found.tiles), f"{dtype}: other coefficients")
        outs = [np.zeros_like(planes), np.ones_like(planes)]
        engines: tuple[rans.Engine, ...] = ("naive", _engine())
        for out, engine in zip(outs, engines, strict=True):
            kvquant.dequantise(host.tiles, dtype, arrays, 0, out, raw=host.raw, engine=engine)
        _require(np.array_equal(outs[0], outs[1]), f"{dtype}: other values")
    return len(dtypes)


def _transform(rng: np.random.Generator) -> kvquant.TransformArrays:
    """Two planes of 64 channels, a block each, of random integers."""
    blocks, n = 2, 64

    def integers(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return rng.integers(-4000, 4001, shape).astype(np.int32)

    return kvquant.TransformArrays(
        num_planes=blocks,
        num_channels=n,
        block_channels=n,
        num_levels=1,
        grid_exp=np.full((blocks, n), -8, np.int8),
        mean=np.zeros((blocks, n), np.int32),
        forward=integers(blocks, n, n),
        inverse=integers(blocks, n, n),
        inv_step=np.full((1, blocks, n), 2.0**-16),
        recon_shift=np.zeros((1, blocks, n), np.uint8),
        mean_f32=np.zeros((blocks, n), np.float32),
        out_scale=np.full((1, blocks, n), 2.0**-20, np.float32),
        num_live=np.full((1, blocks), n, np.int32),
        classes=np.ones((1, blocks, n), np.uint16),
        refine_classes=np.zeros((1, blocks, n), np.uint16),
        radius=np.array([0, 126], np.uint8),
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


_OF_NAME: dict[str, Callable[[], int]] = {"rans": _rans, "kvquant": _kvquant}


def main(name: str) -> None:
    """Checks one, and says how it went."""
    start_s = time.monotonic()
    number = _OF_NAME[name]()
    print(f"{number} cases, all bits as stated, {time.monotonic() - start_s:.1f} s with compiling")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1])
