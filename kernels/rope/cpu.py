"""Saving and loading K and V on the CPU: one pass over the rows, on one core, without the GIL.

Arrays are flat and every index is uint64: numba then neither wraps negative indices nor makes
slices, and the row loops vectorise.  `layout` arrays carry the geometry (see `pack_layout`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rotate import rotate, rotated
from .search import (
    newton,
    reciprocal,
    solve_pair,
    try_neighbours,
    unrotate,
    unrotate_words,
)
from .words import (
    decode,
    encode,
    jit,
    mark_bits,
    nearest,
    pack,
    same,
    trailing_zeros,
    use_wide_vectors,
)

_CHUNK = 512  # listed pairs searched at a time; their scratch stays in the L1 cache
_U = np.uint64
_ONE, _TWO, _SHIFT32, _MASK32 = _U(1), _U(2), _U(32), _U(0xFFFFFFFF)


@jit(forceinline=True)
def _copy(source: Any, a: Any, out: Any, b: Any, num: Any) -> None:
    use_wide_vectors()
    for j in range(num):
        out[b + j] = source[a + j]


@jit(forceinline=True)
def _unrotate_run(
    rule: Any,
    pool: Any,
    a: Any,
    b: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    d: Any,
    e: Any,
    stride: Any,
    half: Any,
    norm: Any,
    bad: Any,
) -> None:
    use_wide_vectors()
    for j in range(half):
        i = j * stride
        w1, w2 = pool[a + i], pool[b + i]
        y1, y2, c, s = decode(w1), decode(w2), cos[k + j], sin[k + j]
        scale = reciprocal(c, s, norm, w1)
        v1, v2 = unrotate(y1, y2, c, s, scale, w1)
        x1, x2 = nearest(np.float32(v1), w1), nearest(np.float32(v2), w1)
        o1, o2 = rotated(rule, x1, x2, c, s, w1)
        o1, o2 = nearest(o1, w1), nearest(o2, w1)
        good = same(o1, y1) & same(o2, y2)
        if rule == 0:
            # One damped Newton step on the residual finds two thirds of the pairs that the many
            # roundings of this rule make miss, for less than listing them would cost.
            u1, u2 = newton(y1 - o1, y2 - o2, x1, x2, c, s, scale, w1)
            o1, o2 = rotated(rule, u1, u2, c, s, w1)
            o1, o2 = nearest(o1, w1), nearest(o2, w1)
            x1 = x1 if good else u1
            x2 = x2 if good else u2
            good = good | (same(o1, y1) & same(o2, y2))
        out[d + i] = pack(x1, w1)
        out[e + i] = pack(x2, w1)
        # A NaN makes v1 one; it is always listed, for `load` writes the one quiet NaN.
        bad[j] = not (good & (v1 == v1))


@jit(forceinline=True)
def _rotate_run(
    rule: Any,
    pages: Any,
    a: Any,
    b: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    d: Any,
    e: Any,
    stride: Any,
    half: Any,
) -> None:
    use_wide_vectors()
    for j in range(half):
        i = j * stride
        o1, o2 = rotate(rule, pages[a + i], pages[b + i], cos[k + j], sin[k + j])
        out[d + i] = o1
        out[e + i] = o2


@jit(forceinline=True)
def _move_run(
    pages: Any,
    a: Any,
    b: Any,
    cos: Any,
    sin: Any,
    k0: Any,
    k1: Any,
    out: Any,
    d: Any,
    e: Any,
    stride: Any,
    half: Any,
) -> None:
    use_wide_vectors()
    for j in range(half):
        i = j * stride
        w = pages[a + i]
        v1, v2 = unrotate_words(w, pages[b + i], cos[k0 + j], sin[k0 + j])
        c, s = cos[k1 + j], sin[k1 + j]
        out[d + i] = encode(np.float32(v1 * c - v2 * s), w)
        out[e + i] = encode(np.float32(v2 * c + v1 * s), w)


@jit(forceinline=True)
def _unrotate_head(
    rule: Any,
    pool: Any,
    a: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
    interleaved: Any,
    norm: Any,
    bad: Any,
) -> None:
    # Eight loops, each with its rule and stride as constants.
    if interleaved:
        if rule == 0:
            _unrotate_run(
                0, pool, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half, norm, bad
            )
        elif rule == 1:
            _unrotate_run(
                1, pool, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half, norm, bad
            )
        elif rule == 2:
            _unrotate_run(
                2, pool, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half, norm, bad
            )
        else:
            _unrotate_run(
                3, pool, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half, norm, bad
            )
    elif rule == 0:
        _unrotate_run(0, pool, a, a + half, cos, sin, k, out, b, b + half, _ONE, half, norm, bad)
    elif rule == 1:
        _unrotate_run(1, pool, a, a + half, cos, sin, k, out, b, b + half, _ONE, half, norm, bad)
    elif rule == 2:
        _unrotate_run(2, pool, a, a + half, cos, sin, k, out, b, b + half, _ONE, half, norm, bad)
    else:
        _unrotate_run(3, pool, a, a + half, cos, sin, k, out, b, b + half, _ONE, half, norm, bad)


@jit(forceinline=True)
def _rotate_head(
    rule: Any,
    pages: Any,
    a: Any,
    cos: Any,
    sin: Any,
    k: Any,
    out: Any,
    b: Any,
    half: Any,
    interleaved: Any,
) -> None:
    if interleaved:
        if rule == 0:
            _rotate_run(0, pages, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half)
        elif rule == 1:
            _rotate_run(1, pages, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half)
        elif rule == 2:
            _rotate_run(2, pages, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half)
        else:
            _rotate_run(3, pages, a, a + _ONE, cos, sin, k, out, b, b + _ONE, _TWO, half)
    elif rule == 0:
        _rotate_run(0, pages, a, a + half, cos, sin, k, out, b, b + half, _ONE, half)
    elif rule == 1:
        _rotate_run(1, pages, a, a + half, cos, sin, k, out, b, b + half, _ONE, half)
    elif rule == 2:
        _rotate_run(2, pages, a, a + half, cos, sin, k, out, b, b + half, _ONE, half)
    else:
        _rotate_run(3, pages, a, a + half, cos, sin, k, out, b, b + half, _ONE, half)


@jit(forceinline=True)
def _list_misses(
    pool: Any,
    a: Any,
    gap: Any,
    stride: Any,
    cos: Any,
    sin: Any,
    k: Any,
    tag: Any,
    half: Any,
    bad: Any,
    misses: Any,
    num: Any,
) -> Any:
    """Append the pairs of one head that `bad` marks to the list of misses."""
    tags, y1, y2, c, s = misses
    for start in range(_U(0), half, _U(64)):
        bits = mark_bits(bad, start)
        while bits:
            j = start + trailing_zeros(bits)
            bits &= bits - _ONE
            i = j * stride
            tags[num] = tag + i
            y1[num] = pool[a + i]
            y2[num] = pool[a + i + gap]
            c[num] = cos[k + j]
            s[num] = sin[k + j]
            num += _ONE
    return num


@jit()
def _search_further(rule: Any, misses: Any, num: Any, found: Any, further: Any) -> None:
    """Look two grid points around for the pairs that are still not found, listed once more."""
    _, y1, y2, c, s = misses
    x1, x2, ok = found
    index, z1, z2, cz, sz, xz1, xz2, okz = further
    count = _U(0)
    for i in range(num):
        if not ok[i]:
            index[count] = i
            z1[count], z2[count], cz[count], sz[count] = y1[i], y2[i], c[i], s[i]
            count += _ONE
    try_neighbours(rule, 2, z1, z2, cz, sz, xz1, xz2, okz, count)
    for k in range(count):
        i = index[k]
        x1[i], x2[i], ok[i] = xz1[k], xz2[k], okz[k]


@jit()
def _search_misses(
    rule: Any,
    misses: Any,
    num: Any,
    gap: Any,
    pages: Any,
    bases: Any,
    slack: Any,
    found: Any,
    further: Any,
    fixes: Any,
    num_fixes: Any,
) -> Any:
    """Search for the listed pairs and write them; what is not found goes to `fixes`."""
    tags, y1, y2, c, s = misses
    x1, x2, ok = found
    fix_page, fix_element, fix_bits = fixes
    try_neighbours(rule, 1, y1, y2, c, s, x1, x2, ok, num)
    _search_further(rule, misses, num, found, further)
    for i in range(num):
        page, element = tags[i] >> _SHIFT32, tags[i] & _MASK32
        a, b = x1[i], x2[i]
        if not ok[i]:
            solved, a, b = solve_pair(rule, y1[i], y2[i], c[i], s[i], slack)
            if not solved:
                o1, o2 = rotate(rule, a, b, c[i], s[i])
                for wrong, at, bits in (
                    (o1 != y1[i], element, y1[i]),
                    (o2 != y2[i], element + gap, y2[i]),
                ):
                    if wrong:
                        fix_page[num_fixes] = page
                        fix_element[num_fixes] = at
                        fix_bits[num_fixes] = bits
                        num_fixes += 1
        pages[bases[page] + element] = a
        pages[bases[page] + element + gap] = b
    return num_fixes


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
    bad = np.zeros(half + _U(64), np.uint8)  # read 64 at a time; beyond `half` never set
    room = _U(_CHUNK) + half
    y1 = np.empty(room, pool.dtype)
    angle = np.empty(room, np.float32)
    misses = (np.empty(room, np.uint64), y1, np.empty_like(y1), angle, np.empty_like(angle))
    found = (np.empty_like(y1), np.empty_like(y1), np.empty(room, np.uint8))
    further = (
        np.empty(room, np.uint64),
        np.empty_like(y1),
        np.empty_like(y1),
        np.empty_like(angle),
        np.empty_like(angle),
        np.empty_like(y1),
        np.empty_like(y1),
        np.empty(room, np.uint8),
    )
    num, num_fixes = _U(0), 0
    # c^2 + s^2 of any one angle: nearly the same for all (see `reciprocal`).
    norm = np.float32(cos[angles[0]] ** 2 + sin[angles[0]] ** 2) if angles.size else np.float32(1)
    for page in range(_U(bases.size)):
        for row in range(page_rows):
            t = page * page_rows + row
            a, k, element = rows[t], angles[t], row * width
            for _ in range(heads):
                b = bases[page] + element
                _copy(pool, a, pages, b, first)
                _unrotate_head(
                    rule,
                    pool,
                    a + first,
                    cos,
                    sin,
                    k,
                    pages,
                    b + first,
                    half,
                    interleaved,
                    norm,
                    bad,
                )
                _copy(pool, a + end, pages, b + end, dim - end)
                tag = (page << _SHIFT32) + element + first
                num = _list_misses(
                    pool, a + first, gap, stride, cos, sin, k, tag, half, bad, misses, num
                )
                if num >= _U(_CHUNK):
                    num_fixes = _search_misses(
                        rule,
                        misses,
                        num,
                        gap,
                        pages,
                        bases,
                        slack,
                        found,
                        further,
                        fixes,
                        num_fixes,
                    )
                    num = _U(0)
                a += dim
                element += dim
    return _search_misses(
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
) -> None:
    """Gather rows of pages (`bases`: their offsets), rotate them, scatter them to `pool`."""
    use_wide_vectors()
    heads, dim, first, half = layout[0], layout[1], layout[2], layout[3]
    interleaved = layout[4] == _ONE
    end = first + half + half
    for t in range(_U(rows.size)):
        a, b, k = bases[t], rows[t], angles[t]
        for _ in range(heads):
            _copy(pages, a, pool, b, first)
            _rotate_head(rule, pages, a + first, cos, sin, k, pool, b + first, half, interleaved)
            _copy(pages, a + end, pool, b + end, dim - end)
            a += dim
            b += dim


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
                _move_run(pages, p, p + _ONE, cos, sin, k0, k1, pool, q, q + _ONE, _TWO, half)
            else:
                _move_run(pages, p, p + half, cos, sin, k0, k1, pool, q, q + half, _ONE, half)
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
def copy_rows(source: Any, a: Any, out: Any, b: Any, width: Any) -> None:
    """Copy `width` words from each offset of `a` in `source` to that of `b` in `out`."""
    for t in range(_U(a.size)):
        _copy(source, a[t], out, b[t], width)
