"""Saving and loading K and V with Triton, for pools on a CUDA device.

`save_k`, `load_k`, `move_k` and the two copies take the same arguments as in `api.py`. Pages and
indices of a load may also be tensors on the pool's device: then nothing is copied on the way, and
nothing waits for the device. Everything also runs on CPU tensors under `TRITON_INTERPRET=1`.

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
from .spec import HEAD_WORDS, I64, RULES, Corrections, Listing, PagedView, RopeSpec

_KIND = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLACK = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_TABLES: WeakKeyDictionary[RopeSpec, dict[torch.device, tuple[torch.Tensor, torch.Tensor]]] = (
    WeakKeyDictionary()
)
# Contraction would turn `fp32` into one of the fma rules.
_OPTIONS = {"enable_fp_fusion": False}
_WIDE_BYTES = 16
_CORRECTIONS_A_PROGRAM = 128
_LISTED_A_STEP = 512


def save_to_pages(
    pool: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    spec: RopeSpec,
    out: PagedView,
    listing: Listing,
    layer: int,
) -> None:
    """As `tail_lists.save_to_pages`, of what lies on the device; two launches, nobody waits.

    Every byte of `listing.wrong` and `listing.misses` that is read was written by this call.
    """
    wrong, misses = listing.wrong, listing.misses.view(torch.int32)
    _save(pool, rows, positions, spec, out, wrong, misses)
    tails = listing.tails.view(torch.int32)
    kernels.list_kernel[(len(tails),)](
        _words(pool),
        rows,
        pool.stride(0),
        wrong,
        misses,
        tails,
        tails.stride(0),
        layer,
        listing.num_layers,
        listing.capacity,
        out.page_size,
        pool.shape[1] * pool.shape[2],
        DIM=pool.shape[2],
        FIRST=spec.first,
        HALF=spec.rotary_dim // 2,
        BLOCK=_LISTED_A_STEP,
        num_warps=4,
    )


def begin_tails(tails: torch.Tensor, heads: torch.Tensor) -> None:
    """As `tail_lists.begin_tails`."""
    tails.zero_()
    tails[:, : 4 * HEAD_WORDS] = heads.view(torch.uint8).view(len(tails), -1)


def clear(pages: torch.Tensor) -> None:
    """As `tail_lists.clear`."""
    pages.zero_()


def _save(
    pool: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    spec: RopeSpec,
    out: PagedView,
    wrong: torch.Tensor,
    misses: torch.Tensor,
) -> None:
    cos, sin = _tables(spec, pool.device)
    pages, index, page_words, first_word, _, page_size = _paged(out, pool, len(rows), 0)
    kernels.save_kernel[(len(rows),)](
        _words(pool),
        rows,
        pool.stride(0),
        positions,
        cos,
        sin,
        pages,
        index,
        page_words,
        first_word,
        page_size,
        wrong,
        misses,
        pool.shape[1],
        # Half a grid step per rounding in between; unused precision costs a few candidates.
        _SLACK[pool.dtype] if spec.rule == "eager" else 0.0,
        **_geometry(pool, spec),
        RULE=RULES[spec.rule],
        EXACT=not _interpreted(),
        **_search_options(pool, spec),
    )


def save_k(
    pool: torch.Tensor, token_slots: I64, positions: I64, spec: RopeSpec, out: PagedView
) -> Corrections:
    """As `api.save_k`, with a spec."""
    _check_positions(positions, spec)
    pages, width = _staging(pool, token_slots.size), pool.shape[1] * pool.shape[2]
    rows = _indices(token_slots, pool)
    wrong = torch.zeros(pages.shape, dtype=torch.uint8, device=pool.device)
    misses = torch.empty(len(rows), dtype=torch.int32, device=pool.device)
    _save(pool, rows, _indices(positions, pool), spec, _as_one_page(pages), wrong, misses)
    _to_view(pages, out, 0)
    at = wrong.view(-1).nonzero().view(-1)
    span = (pool.shape[0] - 1) * pool.stride(0) + width
    words = torch.as_strided(_words(pool), (span,), (1,))
    places = rows[at // width] * pool.stride(0) + at % width
    bits = words[places].cpu().numpy()
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
    positions: Any,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: Any,
    corrections: Corrections | None,
    first_row: int = 0,
) -> None:
    """As `api.load_k`, with a spec."""
    _check_positions(positions, spec)
    cos, sin = _tables(spec, pool.device)
    rows = _indices(token_slots, pool)
    kernels.load_kernel[(len(rows),)](
        *_paged(src, pool, len(rows), first_row),
        _indices(positions, pool),
        cos,
        sin,
        _words(pool),
        rows,
        pool.stride(0),
        pool.shape[1],
        **_geometry(pool, spec),
        RULE=RULES[spec.rule],
        EXACT=not _interpreted(),
        **_wide(pool.shape[1] * spec.rotary_dim // 2, pool.element_size()),
    )
    if corrections is not None and len(corrections):
        _correct(corrections, src.page_size, first_row, pool, rows)


def move_k(
    src: PagedView,
    saved_positions: Any,
    positions: Any,
    spec: RopeSpec,
    pool: torch.Tensor,
    token_slots: Any,
    first_row: int = 0,
) -> None:
    """As `api.move_k`, with a spec."""
    _check_positions(positions, spec)
    _check_positions(saved_positions, spec)
    cos, sin = _tables(spec, pool.device)
    rows = _indices(token_slots, pool)
    kernels.move_kernel[(len(rows),)](
        *_paged(src, pool, len(rows), first_row),
        _indices(saved_positions, pool),
        _indices(positions, pool),
        cos,
        sin,
        _words(pool),
        rows,
        pool.stride(0),
        pool.shape[1],
        **_geometry(pool, spec),
        **_wide(pool.shape[1] * spec.rotary_dim // 2, pool.element_size()),
    )


def copy_rows_to_pages(
    pool: torch.Tensor, token_slots: Any, out: PagedView, first_row: int = 0
) -> None:
    """As `api.copy_rows_to_pages`; to pages on the device it is one launch."""
    rows = _indices(token_slots, pool)
    if isinstance(out.arena, torch.Tensor):
        _gather(pool, rows, out)
        return
    pages = _staging(pool, len(rows))
    _gather(pool, rows, _as_one_page(pages))
    _to_view(pages, out, first_row)


def _gather(pool: torch.Tensor, rows: torch.Tensor, out: PagedView) -> None:
    width = pool.shape[1] * pool.shape[2]
    pages, index, page_words, first_word, _, page_size = _paged(out, pool, len(rows), 0)
    kernels.page_kernel[(len(rows),)](
        _words(pool),
        rows,
        pool.stride(0),
        pages,
        index,
        page_words,
        first_word,
        page_size,
        width,
        **_wide(width, pool.element_size()),
    )


def copy_pages_to_rows(
    src: PagedView, pool: torch.Tensor, token_slots: Any, first_row: int = 0
) -> None:
    """As `api.copy_pages_to_rows`."""
    rows, width = _indices(token_slots, pool), pool.shape[1] * pool.shape[2]
    kernels.unpage_kernel[(len(rows),)](
        *_paged(src, pool, len(rows), first_row),
        _words(pool),
        rows,
        pool.stride(0),
        width,
        **_wide(width, pool.element_size()),
    )


def warm_up(pool: torch.Tensor, spec: RopeSpec | None, page_size: int) -> None:
    """Compiles every kernel that a pool of this shape needs, and waits for them.

    Args:
        pool: `[S, H, D]`, a layer of the pool; not touched.
        spec: the layer's rotation; None where rows are copied as they are.
        page_size: tokens a page.
    """
    memory = torch.zeros(2 * pool.stride(0), dtype=pool.dtype, device=pool.device)
    scratch = memory.as_strided((2, *pool.shape[1:]), pool.stride())
    zero, one = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    block_bytes = page_size * scratch[0].numel() * pool.element_size()
    # As in a slot, blocks begin at multiples of 64 bytes: what is compiled depends on it.
    page = torch.zeros((1, -(-block_bytes // 64) * 64), dtype=torch.uint8, device=pool.device)
    rows = torch.zeros(page_size, dtype=torch.int64, device=pool.device)
    view = PagedView(page, rows[:1], 0, page_size)  # type: ignore[arg-type]
    copy_rows_to_pages(scratch, rows, view)
    copy_pages_to_rows(view, scratch, zero)
    if spec is not None:
        load_k(view, zero, spec, scratch, zero, Corrections(zero.astype(np.int32), one, one))
        move_k(view, zero, zero, spec, scratch, zero)
        _warm_up_listing(scratch, rows, spec, view)
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)


def _warm_up_listing(
    pool: torch.Tensor, rows: torch.Tensor, spec: RopeSpec, view: PagedView
) -> None:
    def memory(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=pool.device)

    width = pool.shape[1] * pool.shape[2]
    marks = memory(len(rows) * width), memory(4 * len(rows))
    listing = Listing(memory(1, 128), 1, 0, *marks)
    begin_tails(listing.tails, rows.new_zeros(HEAD_WORDS // 2))
    save_to_pages(pool, rows, rows, spec, view, listing, 0)


def _paged(
    src: PagedView, pool: torch.Tensor, num_tokens: int, first_row: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """A kernel's first arguments: pages that it can read, and where its rows begin in them."""
    arena: Any = src.arena
    index, offset = src.page_slots, src.byte_offset
    item = pool.element_size()
    if isinstance(arena, np.ndarray):
        if pool.is_cuda:  # not the way of loads: these bring pages to the device before
            block_bytes = src.page_size * pool.shape[1] * pool.shape[2] * item
            num_pages = -(-(first_row + num_tokens) // src.page_size)
            arena = arena[index[:num_pages], offset : offset + block_bytes]
            index, offset = np.arange(num_pages), 0
        arena = torch.from_numpy(arena).to(pool.device)
    return (
        arena.view(-1).view(_INTEGER[item]),
        _indices(index, pool),
        arena.shape[1] // item,
        offset // item,
        first_row,
        src.page_size,
    )


def _correct(
    corrections: Corrections, page_size: int, first_row: int, pool: torch.Tensor, rows: torch.Tensor
) -> None:
    count = len(corrections)
    kernels.correct_kernel[(-(-count // _CORRECTIONS_A_PROGRAM),)](
        _indices(corrections.page, pool),
        _indices(corrections.element, pool),
        _indices(corrections.bits, pool),
        count,
        first_row,
        page_size,
        _words(pool),
        rows,
        len(rows),
        pool.stride(0),
        pool.shape[1] * pool.shape[2],
        BLOCK=_CORRECTIONS_A_PROGRAM,
        num_warps=4,
    )


def _check_positions(positions: Any, spec: RopeSpec) -> None:
    """Checks positions on the host, because kernels do not check the length of a table.

    Positions on the device were checked before the upload; reading them would wait for the device.

    Raises:
        IndexError: one is not in the table.
    """
    if isinstance(positions, torch.Tensor):
        return
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < spec.max_pos:
        raise IndexError(f"positions must lie in [0, {spec.max_pos})")


def _interpreted() -> bool:
    return not isinstance(kernels.save_kernel, triton.runtime.JITFunction)


def _search_options(pool: torch.Tensor, spec: RopeSpec) -> dict[str, Any]:
    """A thread copies 16 bytes at a time, and searches for one pair at a time.

    Of interleaved pairs half as many are 16 bytes, and with more of them registers do not suffice.
    """
    options = _wide(pool.shape[1] * spec.rotary_dim // 2, pool.element_size())
    block = 32 * options["num_warps"]
    wide = max(options["BLOCK"] // 2, block) if spec.interleaved else options["BLOCK"]
    return {**options, "WIDE": wide, "BLOCK": block}


def _geometry(pool: torch.Tensor, spec: RopeSpec) -> dict[str, Any]:
    return {
        "DIM": pool.shape[2],
        "FIRST": spec.first,
        "HALF": spec.rotary_dim // 2,
        "INTERLEAVED": spec.interleaved,
        "KIND": _KIND[pool.dtype],
        "REST": _wide(pool.shape[1] * pool.shape[2], pool.element_size())["BLOCK"],
    }


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.detach().view(_INTEGER[values.element_size()])


def _wide(width: int, item_bytes: int) -> dict[str, Any]:
    """Launch options with which a thread moves 16 bytes, where a row has so many."""
    lanes = _WIDE_BYTES // item_bytes
    block = min(max(triton.next_power_of_2(width), lanes), 128 * lanes)
    num_warps = max(1, min(4, block // (32 * lanes)))
    return {"BLOCK": block, "num_warps": num_warps, **_OPTIONS}


def _indices(values: Any, pool: torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
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


def _as_one_page(rows: torch.Tensor) -> PagedView:
    """Rows `[T, H, D]` on the device as a page of so many."""
    arena: Any = rows.view(1, -1).view(torch.uint8)
    index: Any = torch.zeros(1, dtype=torch.int64, device=rows.device)
    return PagedView(arena, index, 0, len(rows))


def _to_view(pages: torch.Tensor, out: PagedView, first_row: int) -> None:
    """Queues the copies; to page-locked memory they are done when the stream is."""
    rows = pages.view(pages.shape[0], -1).view(torch.uint8)
    row_bytes, done = rows.shape[1], 0
    while done < rows.shape[0]:  # a page, or what of it is asked for, at a time
        page, row = divmod(first_row + done, out.page_size)
        num = min(out.page_size - row, rows.shape[0] - done)
        start = out.byte_offset + row * row_bytes
        part = out.arena[out.page_slots[page], start : start + num * row_bytes]
        torch.from_numpy(part).copy_(rows[done : done + num].reshape(-1), non_blocking=True)
        done += num
