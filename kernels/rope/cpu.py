"""Saving and loading K and V on the CPU: one pass over the rows, on one core, without the GIL.

Arrays are flat and every index is uint64: numba then neither wraps negative indices nor makes
slices, and the row loops vectorise.  `layout` arrays carry the geometry (`_layout` in `api.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .pairs_to_search import CHUNK, list_misses, new_lists, search_misses
from .rotate import rotate, rotated
from .search import inverse, rotates_to, unrotate, unrotate_words
from .words import (
    beside,
    decode,
    encode,
    fence,
    fetch,
    jit,
    load_pair,
    near,
    on_a_line,
    pack,
    put_first,
    put_mark,
    put_second,
    rounds_to,
    store_pair,
    stream_line,
    use_wide_vectors,
)

_U = np.uint64
_ONE, _TWO, _SHIFT32, _MASK32 = _U(1), _U(2), _U(32), _U(0xFFFFFFFF)


@jit(forceinline=True)
def _copy(source: Any, a: Any, out: Any, b: Any, num: Any) -> None:
    use_wide_vectors()
    for j in range(num):
        out[b + j] = source[a + j]


@jit(forceinline=True)
def _stream(source: Any, a: Any, out: Any, b: Any, num: Any) -> None:
    per_line = _U(64 // out.itemsize)
    if num % per_line == _U(0) and on_a_line(out, b):
        for j in range(_U(0), num, per_line):
            stream_line(source, a + j, out, b + j)
    else:
        _copy(source, a, out, b, num)


@jit(forceinline=True)
def _unrotate_run(
    rule: Any,
    paired: Any,
    pool: Any,
    a: Any,
    tables: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
    bad: Any,
    m: Any,
) -> None:
    use_wide_vectors()
    cos, sin, inverse_cos, inverse_sin = tables
    for j in range(half):
        if paired:
            w1, w2 = load_pair(pool, a + _TWO * j)
        else:
            w1, w2 = fetch(pool, a + j), fetch(pool, a + half + j)
        y1, y2, c, s = decode(w1), decode(w2), fetch(cos, k + j), fetch(sin, k + j)
        ci, si = fetch(inverse_cos, j), fetch(inverse_sin, j)
        v1, v2 = unrotate(y1, y2, ci, si, w1)
        x1, x2 = near(np.float32(v1), w1), near(np.float32(v2), w1)
        o1, o2 = rotated(rule, x1, x2, c, s, w1)
        # If the rounded pair is not exact, the exact pair lies in the direction of the residual.
        e1, e2 = y1 - o1, y2 - o2
        u1 = beside(x1, e1 * c + e2 * s, w1)
        u2 = beside(x2, e2 * c - e1 * s, w1)
        hit00 = rounds_to(o1, y1, w1) & rounds_to(o2, y2, w1)
        hit10 = rotates_to(rule, u1, x2, y1, y2, c, s, w1)
        hit01 = rotates_to(rule, x1, u2, y1, y2, c, s, w1)
        hit11 = rotates_to(rule, u1, u2, y1, y2, c, s, w1)
        x1 = x1 if hit00 | hit01 else u1
        x2 = x2 if hit00 | (hit10 & (not hit01)) else u2
        found = hit00 | hit10 | hit01 | hit11
        if paired:
            store_pair(out, b + _TWO * j, pack(x1, w1), pack(x2, w1))
        else:
            put_first(out, b + j, pack(x1, w1))
            put_second(out, b + half + j, pack(x2, w1))
        # A NaN in K makes v1 NaN. It is always listed, as `load` writes only the one quiet NaN.
        put_mark(bad, m + j, np.uint8(not (found & (v1 == v1))))


@jit(forceinline=True)
def _rotate_run(
    rule: Any,
    paired: Any,
    pages: Any,
    a: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
) -> None:
    use_wide_vectors()
    for j in range(half):
        if paired:
            w1, w2 = load_pair(pages, a + _TWO * j)
            o1, o2 = rotate(rule, w1, w2, fetch(cos, k + j), fetch(sin, k + j))
            store_pair(out, b + _TWO * j, o1, o2)
        else:
            w1, w2 = fetch(pages, a + j), fetch(pages, a + half + j)
            o1, o2 = rotate(rule, w1, w2, fetch(cos, k + j), fetch(sin, k + j))
            put_first(out, b + j, o1)
            put_second(out, b + half + j, o2)


@jit(forceinline=True)
def _move_run(
    paired: Any,
    pages: Any,
    a: Any,
    cos: Any,
    sin: Any,
    k0: Any,
    k1: Any,
    out: Any,
    b: Any,
    half: Any,
) -> None:
    use_wide_vectors()
    for j in range(half):
        if paired:
            w1, w2 = load_pair(pages, a + _TWO * j)
        else:
            w1, w2 = fetch(pages, a + j), fetch(pages, a + half + j)
        v1, v2 = unrotate_words(w1, w2, fetch(cos, k0 + j), fetch(sin, k0 + j))
        c, s = fetch(cos, k1 + j), fetch(sin, k1 + j)
        o1 = encode(np.float32(v1 * c - v2 * s), w1)
        o2 = encode(np.float32(v2 * c + v1 * s), w1)
        if paired:
            store_pair(out, b + _TWO * j, o1, o2)
        else:
            put_first(out, b + j, o1)
            put_second(out, b + half + j, o2)


@jit(forceinline=True)
def _unrotate_head(
    rule: Any,
    paired: Any,
    pool: Any,
    a: Any,
    tables: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
    bad: Any,
    m: Any,
) -> None:
    # Eight loops, each with its rule and pairing as constants.
    if paired:
        if rule == 0:
            _unrotate_run(0, True, pool, a, tables, k, out, b, half, bad, m)
        elif rule == 1:
            _unrotate_run(1, True, pool, a, tables, k, out, b, half, bad, m)
        elif rule == 2:
            _unrotate_run(2, True, pool, a, tables, k, out, b, half, bad, m)
        else:
            _unrotate_run(3, True, pool, a, tables, k, out, b, half, bad, m)
    elif rule == 0:
        _unrotate_run(0, False, pool, a, tables, k, out, b, half, bad, m)
    elif rule == 1:
        _unrotate_run(1, False, pool, a, tables, k, out, b, half, bad, m)
    elif rule == 2:
        _unrotate_run(2, False, pool, a, tables, k, out, b, half, bad, m)
    else:
        _unrotate_run(3, False, pool, a, tables, k, out, b, half, bad, m)


@jit(forceinline=True)
def _rotate_head(
    rule: Any,
    paired: Any,
    pages: Any,
    a: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
) -> None:
    if paired:
        if rule == 0:
            _rotate_run(0, True, pages, a, cos, sin, k, out, b, half)
        elif rule == 1:
            _rotate_run(1, True, pages, a, cos, sin, k, out, b, half)
        elif rule == 2:
            _rotate_run(2, True, pages, a, cos, sin, k, out, b, half)
        else:
            _rotate_run(3, True, pages, a, cos, sin, k, out, b, half)
    elif rule == 0:
        _rotate_run(0, False, pages, a, cos, sin, k, out, b, half)
    elif rule == 1:
        _rotate_run(1, False, pages, a, cos, sin, k, out, b, half)
    elif rule == 2:
        _rotate_run(2, False, pages, a, cos, sin, k, out, b, half)
    else:
        _rotate_run(3, False, pages, a, cos, sin, k, out, b, half)


@jit(forceinline=True)
def _invert(
    cos: Any, sin: Any, k: Any, like: Any, inverse_cos: Any, inverse_sin: Any, half: Any
) -> None:
    use_wide_vectors()
    for j in range(half):
        inverse_cos[j], inverse_sin[j] = inverse(cos[k + j], sin[k + j], like)


@jit()
def save(
    rule: Any,
    pool: Any,
    rows: Any,
    cos: Any,
    sin: Any,
    angles: Any,
    pages: Any,
    bases: Any,
    page_size: Any,
    layout: Any,
    slack: Any,
    scratch: Any,
    fixes: Any,
) -> Any:
    """Gather rows, un-rotate them and search; all arrays flat, offsets in words.

    Args:
        rule: number of the rounding rule.
        pool: words of the device pool.
        rows: uint64 `[T]`, offset of each token's row in `pool`.
        cos: fp32 table, flat.
        sin: fp32 table, flat.
        angles: uint64 `[T]`, offset of each token's row in the tables.
        pages: words of the host arena.
        bases: uint64 `[n_pages]`, offset of each page's block in `pages`.
        page_size: tokens per page.
        layout: uint64 heads, head dim, first rotated column, pairs per head, interleaved.
        slack: relative error of one rounding to the KV dtype in the rule, 0 for fp32 rules.
        scratch: room for `2 * pairs per head` values, fp64 if words are fp32, else fp32.
        fixes: buffers for `T * heads * dim` corrections: page, element, bits.

    Returns:
        The number of corrections.
    """
    use_wide_vectors()
    heads, dim, first, half = layout[0], layout[1], layout[2], layout[3]
    interleaved = layout[4] == _ONE
    end = first + half + half
    width, page_rows = heads * dim, _U(page_size)
    stride, gap = (_TWO, _ONE) if interleaved else (_ONE, half)
    bad = np.zeros(heads * half + _U(64), np.uint8)  # read 64 at a time; the end is never set
    geometry = (heads, dim, half, stride, gap)
    misses, found, further = new_lists(pool, heads * half)
    num, num_fixes = _U(0), 0
    inverse_cos, inverse_sin = scratch[:half], scratch[half:]
    tables = (cos, sin, inverse_cos, inverse_sin)
    for page in range(_U(bases.size)):
        for row in range(page_rows):
            t = page * page_rows + row
            a, k, element = rows[t], angles[t], row * width
            _invert(cos, sin, k, pool[a], inverse_cos, inverse_sin, half)
            mark = _U(0)
            for _ in range(heads):
                b = bases[page] + element
                _copy(pool, a, pages, b, first)
                _unrotate_head(
                    rule, interleaved, pool, a + first, tables, k, pages, b + first, half, bad, mark
                )
                _copy(pool, a + end, pages, b + end, dim - end)
                a += dim
                element += dim
                mark += half
            tag = (page << _SHIFT32) + row * width + first
            num = list_misses(pool, rows[t] + first, geometry, cos, sin, k, tag, bad, misses, num)
            if num >= _U(CHUNK):
                num_fixes = search_misses(
                    rule, misses, num, gap, pages, bases, slack, found, further, fixes, num_fixes
                )
                num = _U(0)
    return search_misses(
        rule, misses, num, gap, pages, bases, slack, found, further, fixes, num_fixes
    )


@jit()
def load(
    rule: Any,
    pages: Any,
    bases: Any,
    cos: Any,
    sin: Any,
    angles: Any,
    pool: Any,
    rows: Any,
    layout: Any,
    streamed: Any,
) -> None:
    """Gather rows of pages (`bases`: their offsets), rotate them, scatter them to `pool`."""
    use_wide_vectors()
    heads, dim, first, half = layout[0], layout[1], layout[2], layout[3]
    interleaved = layout[4] == _ONE
    end = first + half + half
    width = heads * dim
    row = np.empty(width if streamed else _U(0), pool.dtype)  # stays in the L1 cache
    for t in range(_U(rows.size)):
        a, k = bases[t], angles[t]
        out, b = (row, _U(0)) if streamed else (pool, rows[t])
        for _ in range(heads):
            _copy(pages, a, out, b, first)
            _rotate_head(rule, interleaved, pages, a + first, cos, sin, k, out, b + first, half)
            _copy(pages, a + end, out, b + end, dim - end)
            a += dim
            b += dim
        if streamed:
            _stream(row, _U(0), pool, rows[t], width)
    if streamed:
        fence()


@jit()
def move(
    pages: Any,
    bases: Any,
    cos: Any,
    sin: Any,
    saved: Any,
    angles: Any,
    pool: Any,
    rows: Any,
    layout: Any,
) -> None:
    """As `load`, for pages with K as the engine had it at the angles `saved`."""
    use_wide_vectors()
    heads, dim, first, half = layout[0], layout[1], layout[2], layout[3]
    interleaved = layout[4] == _ONE
    end = first + half + half
    for t in range(_U(rows.size)):
        a, b = bases[t], rows[t]
        if saved[t] == angles[t]:
            _copy(pages, a, pool, b, heads * dim)
            continue
        k0, k1 = saved[t], angles[t]
        for _ in range(heads):
            p, q = a + first, b + first
            _copy(pages, a, pool, b, first)
            if interleaved:
                _move_run(True, pages, p, cos, sin, k0, k1, pool, q, half)
            else:
                _move_run(False, pages, p, cos, sin, k0, k1, pool, q, half)
            _copy(pages, a + end, pool, b + end, dim - end)
            a += dim
            b += dim


@jit()
def correct(
    page: Any,
    element: Any,
    bits: Any,
    first_row: Any,
    page_size: Any,
    width: Any,
    pool: Any,
    rows: Any,
) -> None:
    """Write corrected words to the pool rows; those of other rows are left out."""
    for i in range(page.size):
        e = np.int64(element[i])
        t = np.int64(page[i]) * page_size + e // width - first_row
        if 0 <= t < rows.size:
            pool[rows[t] + _U(e % width)] = bits[i]


@jit()
def copy_rows(source: Any, a: Any, out: Any, b: Any, width: Any, streamed: Any) -> None:
    """Copy `width` words from each offset of `a` in `source` to that of `b` in `out`."""
    for t in range(_U(a.size)):
        if streamed:
            _stream(source, a[t], out, b[t], width)
        else:
            _copy(source, a[t], out, b[t], width)
    if streamed:
        fence()


@jit()
def scale_indices(indices: Any, limit: Any, factor: Any, start: Any, out: Any) -> Any:
    """`start + index * factor` of each int64 index; returns whether all lie in `[0, limit)`."""
    good = True
    for i in range(_U(indices.size)):
        index = _U(indices[i])
        good = good & (index < limit)
        out[i] = start + index * factor
    return good


@jit()
def row_offsets(bases: Any, page_size: Any, width: Any, first_row: Any, out: Any) -> None:
    """Offsets of `out.size` rows of pages that begin at `bases`, from row `first_row` on."""
    page, row = first_row // page_size, first_row % page_size
    for t in range(_U(out.size)):
        out[t] = bases[page] + row * width
        row += _ONE
        if row == page_size:
            row, page = _U(0), page + _ONE
