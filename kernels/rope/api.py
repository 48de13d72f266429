"""Shape checks and dispatch: CPU pools to the numba kernels, CUDA pools to the Triton ones.

A server whose pool is on a GPU has its transfers call `gpu.py` itself.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import cpu
from .spec import I64, RULES, Corrections, PagedView, RopeSpec

U64 = npt.NDArray[np.uint64]
Words = npt.NDArray[Any]
_U = np.uint64

# The integer type of a word tells numba the dtype (see words.py).
_WORDS: dict[torch.dtype, type] = {
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float32: np.uint32,
}
# What a load writes is read by the next forward: from this size on it would not stay cached.
_STREAMED_BYTES = 1 << 20
# The largest relative error that one intermediate rounding adds: half a grid step.
_SLACK = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def save_k(
    pool: torch.Tensor,
    token_slots: I64,
    positions: I64,
    spec: RopeSpec | None,
    out: PagedView,
) -> Corrections:
    """Copy K rows from the pool to pages, position-free.

    Args:
        pool: `[S, H, D]` bf16, fp16 or fp32.
        token_slots: int64 `[T]`, pool rows; T is a whole number of pages.
        positions: int64 `[T]`, the position each row was rotated to; not used without a spec.
        spec: the layer's rotation; None (NoPE, or K kept position-bound) copies the rows.
        out: where the pages lie; `n_pages * page_size == T`.

    Returns:
        The values that `load_k` at these positions does not give back bit by bit by itself; the
        same input always gives the same pages and the same list.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
        IndexError: a slot or position out of range.
    """
    if spec is None:
        copy_rows_to_pages(pool, token_slots, out)
        return Corrections.none()
    _check_spec(pool, spec)
    if pool.is_cuda:
        from . import gpu

        return gpu.save_k(pool, token_slots, positions, spec, out)
    words, rows = _pool_rows(pool, token_slots)
    width = _width(pool)
    pages, bases = _page_bases(out, words.dtype, width)
    if rows.size != bases.size * out.page_size:
        raise ValueError(f"{rows.size} tokens do not fill {bases.size} pages of {out.page_size}")
    num_values = rows.size * width
    # Room for the worst case; pages of it that are not written are never made real.
    fixes = (
        np.empty(num_values, np.int32),
        np.empty(num_values, np.uint32),
        np.empty(num_values, np.uint32),
    )
    num_fixes = cpu.save(
        RULES[spec.rule],
        words,
        rows,
        spec.cos.reshape(-1),
        spec.sin.reshape(-1),
        _angles(positions, rows.size, spec),
        pages,
        bases,
        out.page_size,
        _layout(pool, spec),
        _SLACK[pool.dtype],
        np.empty(spec.rotary_dim, np.float64 if words.itemsize == 4 else np.float32),
        fixes,
    )
    mask = np.uint32(0xFFFF if words.itemsize == 2 else 0xFFFFFFFF)
    return Corrections(
        fixes[0][:num_fixes].copy(), fixes[1][:num_fixes].copy(), fixes[2][:num_fixes] & mask
    )


def load_k(
    src: PagedView,
    positions: I64,
    spec: RopeSpec | None,
    pool: torch.Tensor,
    token_slots: I64,
    corrections: Corrections | None,
    first_row: int = 0,
) -> None:
    """Copy position-free K from pages to pool rows, rotated to `positions`.

    Args:
        src: the pages.
        positions: int64 `[T]`, the positions to rotate to.
        spec: the layer's rotation; None copies the rows.
        pool: `[S, H, D]`.
        token_slots: int64 `[T]`, pool rows to write.
        corrections: the list `save_k` made, if and only if `positions` are the saved ones.
        first_row: row of the first page at which the T tokens begin.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
        IndexError: a slot or position out of range.
    """
    if spec is None:
        copy_pages_to_rows(src, pool, token_slots, first_row)
        return
    _check_spec(pool, spec)
    if pool.is_cuda:
        from . import gpu

        gpu.load_k(src, positions, spec, pool, token_slots, corrections, first_row)
        return
    words, rows, pages, bases = _both_sides(pool, token_slots, src, first_row)
    cpu.load(
        RULES[spec.rule],
        pages,
        bases,
        spec.cos.reshape(-1),
        spec.sin.reshape(-1),
        _angles(positions, rows.size, spec),
        words,
        rows,
        _layout(pool, spec),
        _is_streamed(pool, rows),
    )
    if corrections is not None and len(corrections):
        cpu.correct(
            corrections.page,
            corrections.element,
            corrections.bits,
            first_row,
            src.page_size,
            _width(pool),
            words,
            rows,
        )


def move_k(
    src: PagedView,
    saved_positions: I64,
    positions: I64,
    spec: RopeSpec | None,
    pool: torch.Tensor,
    token_slots: I64,
    first_row: int = 0,
) -> None:
    """Copy position-bound K from pages to pool rows, moved to other positions (`delta` mode).

    Rows whose position is the saved one are copied; others are un-rotated and rotated in fp32 (fp64
    to un-rotate an fp32 pool) with one rounding at the end.

    Args:
        src: pages whose rows are as the engine had them at `saved_positions`.
        saved_positions: int64 `[T]`.
        positions: int64 `[T]`, the positions wanted.
        spec: the layer's rotation; None copies the rows.
        pool: `[S, H, D]`.
        token_slots: int64 `[T]`, pool rows to write.
        first_row: row of the first page at which the T tokens begin.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
        IndexError: a slot or position out of range.
    """
    if spec is None:
        copy_pages_to_rows(src, pool, token_slots, first_row)
        return
    _check_spec(pool, spec)
    if pool.is_cuda:
        from . import gpu

        gpu.move_k(src, saved_positions, positions, spec, pool, token_slots, first_row)
        return
    words, rows, pages, bases = _both_sides(pool, token_slots, src, first_row)
    cpu.move(
        pages,
        bases,
        spec.cos.reshape(-1),
        spec.sin.reshape(-1),
        _angles(saved_positions, rows.size, spec),
        _angles(positions, rows.size, spec),
        words,
        rows,
        _layout(pool, spec),
    )


def copy_rows_to_pages(
    pool: torch.Tensor, token_slots: I64, out: PagedView, first_row: int = 0
) -> None:
    """Copy pool rows (any dtype, `[S, H, D]`) to pages as they are.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
        IndexError: a slot out of range.
    """
    if pool.is_cuda:
        from . import gpu

        gpu.copy_rows_to_pages(pool, token_slots, out, first_row)
        return
    words, rows, pages, bases = _both_sides(pool, token_slots, out, first_row)
    cpu.copy_rows(words, rows, pages, bases, _U(_width(pool)), True)


def copy_pages_to_rows(
    src: PagedView, pool: torch.Tensor, token_slots: I64, first_row: int = 0
) -> None:
    """Copy rows of pages to pool rows (any dtype, `[S, H, D]`) as they are.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit.
        IndexError: a slot out of range.
    """
    if pool.is_cuda:
        from . import gpu

        gpu.copy_pages_to_rows(src, pool, token_slots, first_row)
        return
    words, rows, pages, bases = _both_sides(pool, token_slots, src, first_row)
    cpu.copy_rows(pages, bases, words, rows, _U(_width(pool)), _is_streamed(pool, rows))


save_v = copy_rows_to_pages
load_v = copy_pages_to_rows


def warm_up(dtype: torch.dtype, spec: RopeSpec | None = None, page_size: int = 2) -> None:
    """Compile, or load from the cache, every CPU kernel that pools of `dtype` need.

    All rounding rules and both pairings share the kernels, so the spec only has to be one of them.
    Takes some tens of seconds the first time on a machine.
    """
    if spec is None:
        table = np.ones((page_size, 1), np.float32)
        spec = RopeSpec(table, table, 2, 0, False, "eager")
    if dtype not in _WORDS:
        pool = torch.zeros(page_size, 1, 8).to(dtype)
    else:
        pool = torch.zeros(page_size, 1, spec.first + spec.rotary_dim, dtype=dtype)
    slots = np.arange(page_size, dtype=np.int64)
    arena = np.zeros((1, 4096 * -(-pool.nbytes // 4096)), np.uint8)
    view = PagedView(arena, np.zeros(1, np.int64), 0, page_size)
    copy_rows_to_pages(pool, slots, view)
    copy_pages_to_rows(view, pool, slots)
    if dtype not in _WORDS:
        return
    positions = np.zeros(page_size, np.int64)
    save_k(pool, slots, positions, spec, view)
    one = Corrections(np.zeros(1, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    load_k(view, positions, spec, pool, slots, one)
    move_k(view, positions, positions, spec, pool, slots)


def _check_spec(pool: torch.Tensor, spec: RopeSpec) -> None:
    if pool.dtype not in _WORDS:
        raise ValueError(f"K to be un-rotated must be one of {list(_WORDS)}, got {pool.dtype}")
    if spec.first + spec.rotary_dim > pool.shape[2]:
        raise ValueError(
            f"columns [{spec.first}, {spec.first + spec.rotary_dim}) do not lie in a head of "
            f"{pool.shape[2]}"
        )
    if spec.rotary_dim > 2 * 65536 or pool.shape[1] > 65536:
        raise ValueError(f"at most 65536 heads and pairs per head, got {tuple(pool.shape)}")


def _width(pool: torch.Tensor) -> int:
    """Words of a row."""
    return pool.shape[1] * pool.shape[2]


def _is_streamed(pool: torch.Tensor, rows: U64) -> bool:
    """Whether so many rows are written past the cache."""
    return rows.size * _width(pool) * pool.element_size() >= _STREAMED_BYTES


def _flat_words(pool: torch.Tensor) -> Words:
    if pool.ndim != 3:
        raise ValueError(f"pool must be [S, H, D], got shape {tuple(pool.shape)}")
    num_rows, heads, dim = pool.shape
    row_stride, head_stride, stride = pool.stride()
    if (stride != 1 and dim > 1) or (heads > 1 and head_stride != dim):
        raise ValueError(f"rows of the pool must be dense, got strides {pool.stride()}")
    span = (num_rows - 1) * row_stride + heads * dim if num_rows else 0
    kind = _WORDS.get(pool.dtype)
    if kind is None:
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[pool.element_size()]
    return _words_at(pool.data_ptr(), span, kind)


@lru_cache(maxsize=1024)
def _words_at(address: int, num_words: int, kind: type) -> Words:
    # Making the array costs as much as a page's copy. It owns nothing, so that keeping it is safe:
    # it is asked for only by the address and span of a tensor that lives.
    if not num_words:
        return np.empty(0, kind)
    raw = (ctypes.c_uint8 * (num_words * np.dtype(kind).itemsize)).from_address(address)
    words: Words = np.ctypeslib.as_array(raw).view(kind)
    return words


def _offsets(indices: I64, limit: int, factor: int, start: int, what: str) -> U64:
    """`start + index * factor`, for 1-D int64 indices that must lie in `[0, limit)`."""
    wanted = np.ascontiguousarray(indices, np.int64)
    if not wanted.flags.writeable:  # another type to numba, which would compile for it
        wanted = wanted.copy()
    offsets = np.empty(wanted.size, np.uint64)
    if not cpu.scale_indices(wanted, _U(limit), _U(factor), _U(start), offsets):
        raise IndexError(f"{what} must lie in [0, {limit})")
    return offsets


def _pool_rows(pool: torch.Tensor, token_slots: I64) -> tuple[Words, U64]:
    words = _flat_words(pool)
    if token_slots.ndim != 1:
        raise ValueError(f"token_slots must be [T], got shape {token_slots.shape}")
    return words, _offsets(token_slots, pool.shape[0], pool.stride(0), 0, "token slots")


def _page_bases(view: PagedView, kind: np.dtype[Any], width: int) -> tuple[Words, U64]:
    arena, item = view.arena, kind.itemsize
    if arena.dtype != np.uint8 or arena.ndim != 2 or not arena.flags.c_contiguous:
        raise ValueError(f"arena must be C-contiguous uint8 [slots, bytes], got {arena.shape}")
    num_slots, slot_bytes = arena.shape
    if slot_bytes % item or view.byte_offset % item or view.page_size < 1:
        raise ValueError(
            f"slot bytes {slot_bytes} and offset {view.byte_offset} must be multiples of "
            f"{item}, and page_size {view.page_size} positive"
        )
    block_bytes = view.page_size * width * item
    if not 0 <= view.byte_offset <= slot_bytes - block_bytes:
        raise ValueError(
            f"a block of {block_bytes} bytes at {view.byte_offset} does not lie in a slot of "
            f"{slot_bytes} bytes"
        )
    if view.page_slots.ndim != 1:
        raise ValueError(f"page_slots must be [n_pages], got shape {view.page_slots.shape}")
    bases = _offsets(
        view.page_slots, num_slots, slot_bytes // item, view.byte_offset // item, "page slots"
    )
    return arena.reshape(-1).view(kind), bases


def _both_sides(
    pool: torch.Tensor, token_slots: I64, view: PagedView, first_row: int
) -> tuple[Words, U64, Words, U64]:
    """Words of the pool and the offsets of its rows, and the same of the pages."""
    words, rows = _pool_rows(pool, token_slots)
    width = _width(pool)
    pages, bases = _page_bases(view, words.dtype, width)
    if first_row < 0 or first_row + rows.size > bases.size * view.page_size:
        raise ValueError(
            f"rows [{first_row}, {first_row + rows.size}) do not lie in {bases.size} pages of "
            f"{view.page_size}"
        )
    offsets = np.empty(rows.size, np.uint64)
    cpu.row_offsets(bases, _U(view.page_size), _U(width), _U(first_row), offsets)
    return words, rows, pages, offsets


def _angles(positions: I64, num_tokens: int, spec: RopeSpec) -> U64:
    if positions.shape != (num_tokens,):
        raise ValueError(f"positions must be [{num_tokens}], got shape {positions.shape}")
    return _offsets(positions, spec.max_pos, spec.rotary_dim // 2, 0, "positions")


def _layout(pool: torch.Tensor, spec: RopeSpec) -> U64:
    _, heads, dim = pool.shape
    return _packed(heads, dim, spec.first, spec.rotary_dim // 2, int(spec.interleaved))


@lru_cache(maxsize=64)
def _packed(*values: int) -> U64:
    return np.array(values, np.uint64)
