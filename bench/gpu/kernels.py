"""Kernels on a device at odd shapes: bits come back, and nothing but the page is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.core.case import CaseFailedError
from bench.gpu.engine import kernels_of
from sglang_ext.kernels.rope import RULES, Listing, PagedView, RopeSpec, naive

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Heads, columns, first rotated column, rotated columns, whether pairs are neighbours.
_SHAPES = ((8, 128, 0, 128, False), (3, 20, 4, 10, True), (1, 576, 512, 64, True))
_TOKENS, _PAGE = 12, 4
_POISON = 0xEE


def check_kernels(device: torch.device, share: slice = slice(None)) -> int:
    """Saves rows position-free and loads them; returns the number of cases.

    Args:
        device: where.
        share: which of the cases.

    Raises:
        CaseFailedError: other bits came back, or a byte beside the pages was written.
    """
    cases = [(dtype, rule, shape) for dtype in _DTYPES for rule in RULES for shape in _SHAPES]
    mine = list(enumerate(cases))[share]
    for number, (dtype, rule, shape) in mine:
        _check(device, dtype, rule, shape, number)
    return len(mine)


def check_in_processes(count: int) -> int:
    """The same on the first device, a share each: compiling takes 3 s of a core a case.

    Raises:
        CaseFailedError: as `check_kernels`, or a process ended otherwise.
    """
    commands = [[sys.executable, "-m", __name__, str(at), str(count)] for at in range(count)]
    return sum(_ended(started) for started in list(map(_start, commands)))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(process: subprocess.Popen[str]) -> int:
    """Cases of a process that ended well."""
    out, err = process.communicate()
    if process.returncode:
        said = err.strip().splitlines() or [f"its process ended with {process.returncode}"]
        raise CaseFailedError(said[-1])
    return int(out.split()[-1])


def _check(
    device: torch.device, dtype: torch.dtype, rule: str, shape: tuple[Any, ...], seed: int
) -> None:
    heads, dim, first, rotary_dim, interleaved = shape
    kernels, name = kernels_of(device), f"{dtype} {rule} {shape}"
    spec = _spec(rotary_dim, first, interleaved, rule)
    positions = np.arange(_TOKENS, dtype=np.int64) + 900
    values = torch.randn((_TOKENS, heads, dim), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    rows = naive.rotate(values, positions, spec).to(device)
    pool = torch.full((_TOKENS + 3, heads, dim), float("nan"), dtype=dtype, device=device)
    where = torch.randperm(_TOKENS + 3, generator=torch.Generator().manual_seed(seed))[:_TOKENS]
    pool[where.to(device)] = rows
    num_pages, width = _TOKENS // _PAGE, heads * dim
    block = _PAGE * width * rows.element_size()
    pages = np.full((num_pages, block + 128), _POISON, np.uint8)
    tails = np.full((num_pages, 4 * (6 + 1 + 2 * 512)), _POISON, np.uint8)
    scratch = [np.full(size, _POISON, np.uint8) for size in (_TOKENS * width, 4 * _TOKENS)]
    pages, tails, wrong, misses, index, slots, at, nothing = (
        _on(device, each)
        for each in (
            *(pages, tails, *scratch, np.arange(num_pages)),
            *(where.numpy().astype(np.int64), positions, np.zeros(3 * num_pages, np.int64)),
        )
    )
    view = PagedView(pages, index, 64, _PAGE)
    kernels.begin_tails(tails, nothing)
    listing = Listing(tails, 1, 512, wrong, misses)
    kernels.save_to_pages(pool, slots, at, spec, view, listing, 0)
    for part in (pages[:, :64], pages[:, 64 + block :]):
        if bool((part != _POISON).any()):
            raise CaseFailedError(f"{name}: a byte beside a page was written")
    back = torch.full_like(pool, float("nan"))
    kernels.load_k(view, at, spec, back, slots, None)
    words = _host(tails).view(np.uint32)
    listed = int(words[:, 4].sum())
    same = back[where.to(device)] == rows
    if int((~same).sum()) > listed or listed > 0.01 * rows.numel():
        raise CaseFailedError(f"{name}: {int((~same).sum())} values differ, {listed} are listed")
    if not bool(torch.isnan(back).sum() == 3 * width):
        raise CaseFailedError(f"{name}: a row beside those loaded was written")


def _spec(rotary_dim: int, first: int, interleaved: bool, rule: str) -> RopeSpec:
    angles = np.arange(1024)[:, None] * 1e4 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return RopeSpec(cos, sin, rotary_dim, first, interleaved, rule)


def _on(device: torch.device, values: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(values).to(device) if device.type == "cuda" else values


def _host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values


def main(at: int, count: int) -> None:
    """Checks every case whose number leaves `at` when it is divided by `count`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(check_kernels(device, slice(at, None, count)))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*map(int, sys.argv[1:]))
