"""Pairs that un-rotation alone does not find: listed by row, searched for together, on the CPU.

Few are missed, here and there; searched for one at a time they would take most of a save. See
`cpu.py` for how arrays are passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rotate import rotate
from .search import solve_pair, try_neighbours
from .words import jit, mark_bits, trailing_zeros

CHUNK = 512
"""Listed pairs that are searched for at a time; their scratch stays in the L1 cache."""

_U = np.uint64
_ONE, _SHIFT32, _MASK32 = _U(1), _U(32), _U(0xFFFFFFFF)
_LANES = _U(16)  # lists are searched in whole vectors; what lies beyond their end is ignored


@jit(forceinline=True)
def new_lists(pool: Any, row_pairs: Any) -> Any:
    """Room for `CHUNK` pairs and a row of more: as missed, as found, as searched further."""
    room = _U(CHUNK) + row_pairs + _LANES
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
    return misses, found, further


@jit(forceinline=True)
def list_misses(
    pool: Any,
    a: Any,
    geometry: Any,
    cos: Any,
    sin: Any,
    k: Any,
    tag: Any,
    bad: Any,
    misses: Any,
    num: Any,
) -> Any:
    """Append the pairs of one row that `bad` marks, head by head, to the list of misses."""
    heads, dim, half, stride, gap = geometry
    tags, y1, y2, c, s = misses
    for start in range(_U(0), heads * half, _U(64)):
        bits = mark_bits(bad, start)
        while bits:
            at = start + trailing_zeros(bits)
            bits &= bits - _ONE
            head = at // half
            j = at - head * half
            i = head * dim + j * stride
            tags[num] = tag + i
            y1[num] = pool[a + i]
            y2[num] = pool[a + i + gap]
            c[num] = cos[k + j]
            s[num] = sin[k + j]
            num += _ONE
    return num


@jit(forceinline=True)
def _whole(num: Any) -> Any:
    return (num + _LANES - _ONE) // _LANES * _LANES


@jit()
def _search_further(rule: Any, misses: Any, num: Any, found: Any, further: Any) -> None:
    """Look further for the pairs that are still not found, listed once more."""
    _, y1, y2, c, s = misses
    x1, x2, ok = found
    index, z1, z2, cz, sz, xz1, xz2, okz = further
    count = _U(0)
    for i in range(num):
        if not ok[i]:
            index[count] = i
            z1[count], z2[count], cz[count], sz[count] = y1[i], y2[i], c[i], s[i]
            count += _ONE
    try_neighbours(rule, 2, z1, z2, cz, sz, xz1, xz2, okz, _whole(count))
    for k in range(count):
        i = index[k]
        x1[i], x2[i], ok[i] = xz1[k], xz2[k], okz[k]


@jit()
def search_misses(
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
    try_neighbours(rule, 1, y1, y2, c, s, x1, x2, ok, _whole(num))
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
