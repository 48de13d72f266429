"""Saving and loading K and V with Triton, for pools on a CUDA device.

The `*_rows` functions work on device tensors: rows of a pool and a contiguous staging buffer
`[T, H, D]` (pages one after the other), which the caller copies from or to pinned host memory.
`save_k`, `load_k`, `move_k` and the two copies take the same arguments as in `api.py` and go
through a staging buffer of their own.  Everything also runs on CPU tensors under
`TRITON_INTERPRET=1`.

The search looks two grid points around and solves for the smaller component; it need not choose the
same x as the CPU's, but the rotation is the same bit for bit.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from . import gpu_kernels as kernels
from .spec import I64, RULES, Corrections, PagedView, RopeSpec

_KIND = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLACK = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_TABLES: WeakKeyDictionary[RopeSpec, dict[torch.device, tuple[torch.Tensor, torch.Tensor]]] = (
    WeakKeyDictionary()
)
# Contraction would turn `fp32` into one of the fma rules.
_OPTIONS = {"enable_fp_fusion": False}


def save_rows(
    pool: torch.Tensor,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    spec: RopeSpec,
    out: torch.Tensor,
) -> torch.Tensor:
    """Gather rows `[T]` of the pool to `out` `[T, H, D]`, position-free.

    Returns:
        uint8 `[T, H, D]`, 1 where the rotation of `out` does not give the pool's bits back.
    """
    wrong = torch.zeros(out.shape, dtype=torch.uint8, device=pool.device)
    cos, sin = _tables(spec, pool.device)
    kernels.save_kernel[(token_slots.numel(),)](
        _words(pool),
        token_slots,
        pool.stride(0),
        positions,
        cos,
        sin,
        _words(out),
        wrong,
        pool.shape[1],
        # Half a grid step per rounding in between; unused precision costs a few candidates.
        _SLACK[pool.dtype] if spec.rule == "eager" else 0.0,
        **_geometry(pool, spec),
        RULE=RULES[spec.rule],
        EXACT=not _interpreted(),
        **_launch(),
    )
    return wrong


def load_rows(
    pages: torch.Tensor,
    positions: torch.Tensor,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Rotate rows `pages` `[T, H, D]` and scatter them to rows of the pool."""
    cos, sin = _tables(spec, pool.device)
    kernels.load_kernel[(token_slots.numel(),)](
        _words(pages),
        positions,
        cos,
        sin,
        _words(pool),
        token_slots,
        pool.stride(0),
        pool.shape[1],
        **_geometry(pool, spec),
        RULE=RULES[spec.rule],
        EXACT=not _interpreted(),
        **_launch(),
    )


def move_rows(
    pages: torch.Tensor,
    saved_positions: torch.Tensor,
    positions: torch.Tensor,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Move position-bound rows `pages` `[T, H, D]` and scatter them to rows of the pool."""
    cos, sin = _tables(spec, pool.device)
    kernels.move_kernel[(token_slots.numel(),)](
        _words(pages),
        saved_positions,
        positions,
        cos,
        sin,
        _words(pool),
        token_slots,
        pool.stride(0),
        pool.shape[1],
        **_geometry(pool, spec),
        **_launch(),
    )


def gather_rows(pool: torch.Tensor, token_slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of the pool to `out` `[T, H, D]` as they are."""
    rows = torch.arange(out.shape[0], device=pool.device)
    _copy(pool, token_slots, pool.stride(0), out, rows, out.stride(0))


def scatter_rows(pages: torch.Tensor, pool: torch.Tensor, token_slots: torch.Tensor) -> None:
    """Copy `pages` `[T, H, D]` to rows of the pool as they are."""
    rows = torch.arange(pages.shape[0], device=pool.device)
    _copy(pages, rows, pages.stride(0), pool, token_slots, pool.stride(0))


def correct_rows(
    corrections: Corrections, page_size: int, first_row: int, pool: torch.Tensor, slots: I64
) -> None:
    """Write corrected words to the pool."""
    width = pool.shape[1] * pool.shape[2]
    element = corrections.element.astype(np.int64)
    token = corrections.page.astype(np.int64) * page_size + element // width - first_row
    inside = (token >= 0) & (token < slots.size)
    at = slots[token[inside]] * pool.stride(0) + (element % width)[inside]
    words = _words(pool)
    kind = np.int16 if pool.element_size() == 2 else np.int32
    bits = corrections.bits[inside].astype(np.dtype(kind).str.replace("i", "u")).view(kind)
    span = (pool.shape[0] - 1) * pool.stride(0) + width
    flat = torch.as_strided(words, (span,), (1,))
    flat[torch.from_numpy(at).to(pool.device)] = torch.from_numpy(bits).to(pool.device)


def save_k(
    pool: torch.Tensor, token_slots: I64, positions: I64, spec: RopeSpec, out: PagedView
) -> Corrections:
    """As `api.save_k`, with a spec."""
    _check_positions(positions, spec)
    pages = _staging(pool, token_slots.size)
    wrong = save_rows(pool, _indices(token_slots, pool), _indices(positions, pool), spec, pages)
    _to_view(pages, out, 0)
    width = pool.shape[1] * pool.shape[2]
    at = wrong.view(-1).nonzero().view(-1)
    rows = _words(pool)[_indices(token_slots, pool)[at // width]].reshape(at.numel(), width)
    bits = rows.gather(1, (at % width)[:, None]).view(-1).cpu().numpy()
    flat = at.cpu().numpy()
    block = out.page_size * width
    unsigned = bits.view(np.uint16 if bits.itemsize == 2 else np.uint32)
    return Corrections(
        (flat // block).astype(np.int32),
        (flat % block).astype(np.uint32),
        unsigned.astype(np.uint32),
    )


def load_k(
    src: PagedView,
    positions: I64,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: I64,
    corrections: Corrections | None,
    first_row: int = 0,
) -> None:
    """As `api.load_k`, with a spec."""
    _check_positions(positions, spec)
    pages = _from_view(src, pool, token_slots.size, first_row)
    load_rows(pages, _indices(positions, pool), spec, pool, _indices(token_slots, pool))
    if corrections is not None and len(corrections):
        correct_rows(corrections, src.page_size, first_row, pool, token_slots)


def move_k(
    src: PagedView,
    saved_positions: I64,
    positions: I64,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: I64,
    first_row: int = 0,
) -> None:
    """As `api.move_k`, with a spec."""
    _check_positions(positions, spec)
    _check_positions(saved_positions, spec)
    pages = _from_view(src, pool, token_slots.size, first_row)
    move_rows(
        pages,
        _indices(saved_positions, pool),
        _indices(positions, pool),
        spec,
        pool,
        _indices(token_slots, pool),
    )


def copy_rows_to_pages(
    pool: torch.Tensor, token_slots: I64, out: PagedView, first_row: int = 0
) -> None:
    """As `api.copy_rows_to_pages`."""
    pages = _staging(pool, token_slots.size)
    gather_rows(pool, _indices(token_slots, pool), pages)
    _to_view(pages, out, first_row)


def copy_pages_to_rows(
    src: PagedView, pool: torch.Tensor, token_slots: I64, first_row: int = 0
) -> None:
    """As `api.copy_pages_to_rows`."""
    pages = _from_view(src, pool, token_slots.size, first_row)
    scatter_rows(pages, pool, _indices(token_slots, pool))


def _check_positions(positions: I64, spec: RopeSpec) -> None:
    """Kernels look positions up in a table without a look at its length.

    Raises:
        IndexError: one is not in the table.
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < spec.max_pos:
        raise IndexError(f"positions must lie in [0, {spec.max_pos})")


def _interpreted() -> bool:
    return not isinstance(kernels.save_kernel, triton.runtime.JITFunction)


def _launch() -> dict[str, Any]:
    return {"BLOCK": 128, "num_warps": 4, **_OPTIONS}


def _geometry(pool: torch.Tensor, spec: RopeSpec) -> dict[str, Any]:
    return {
        "DIM": pool.shape[2],
        "FIRST": spec.first,
        "HALF": spec.rotary_dim // 2,
        "INTERLEAVED": spec.interleaved,
        "KIND": _KIND[pool.dtype],
    }


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.detach().view(_INTEGER[values.element_size()])


def _indices(values: I64, pool: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(pool.device)


def _tables(spec: RopeSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tables = _TABLES.setdefault(spec, {})
    if device not in tables:
        tables[device] = (
            torch.tensor(spec.cos, device=device),
            torch.tensor(spec.sin, device=device),
        )
    return tables[device]


def _staging(pool: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.empty((num_tokens, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)


def _copy(
    source: torch.Tensor,
    source_rows: torch.Tensor,
    source_stride: int,
    out: torch.Tensor,
    out_rows: torch.Tensor,
    out_stride: int,
) -> None:
    width = source.shape[1] * source.shape[2]
    kernels.copy_kernel[(source_rows.numel(),)](
        _words(source),
        source_rows,
        source_stride,
        _words(out),
        out_rows,
        out_stride,
        width,
        BLOCK=256,
        num_warps=4,
    )


def _to_view(pages: torch.Tensor, out: PagedView, first_row: int) -> None:
    rows = pages.view(pages.shape[0], -1).view(torch.uint8).cpu().numpy()
    row_bytes, done = rows.shape[1], 0
    while done < rows.shape[0]:  # a page, or what of it is asked for, at a time
        page, row = divmod(first_row + done, out.page_size)
        num = min(out.page_size - row, rows.shape[0] - done)
        start = out.byte_offset + row * row_bytes
        part = rows[done : done + num].reshape(-1)
        out.arena[out.page_slots[page], start : start + part.size] = part
        done += num


def _from_view(src: PagedView, pool: torch.Tensor, num_tokens: int, first_row: int) -> torch.Tensor:
    row_bytes = pool.shape[1] * pool.shape[2] * pool.element_size()
    num_pages = -(-(first_row + num_tokens) // src.page_size)
    end = src.byte_offset + src.page_size * row_bytes
    blocks = src.arena[src.page_slots[:num_pages], src.byte_offset : end]
    rows = blocks.reshape(-1, row_bytes)[first_row : first_row + num_tokens]
    pages = torch.from_numpy(np.ascontiguousarray(rows)).view(pool.dtype)
    return pages.view(num_tokens, *pool.shape[1:]).to(pool.device)
