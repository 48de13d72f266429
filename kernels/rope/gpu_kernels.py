# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""The Triton kernels of `gpu.py`; one program works on one token.

All values travel as machine words (int16 or int32) and are rounded by integer arithmetic, so that
the bits are the same on every GPU, under the interpreter, and in `cpu.py`.  Launch them with
`enable_fp_fusion=False`: the rules `eager` and `fp32` must not be contracted.  KIND: 0 bf16, 1
fp16, 2 fp32.  RULE: `spec.RULES`.  Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that would make a new kernel where their value or their address is a multiple of 16, or
# the value is 1: all kernels are compiled when the server starts.
LOOSE = (
    "page_index", "first_row", "page_size", "positions", "saved", "slots", "num_tokens", "page",
    "element", "bits", "count", "layer", "num_layers", "capacity",
)  # fmt: skip


@triton.jit
def decode(word, KIND: tl.constexpr):
    """fp32 value of a word."""
    if KIND == 0:
        return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return word.to(tl.float32, bitcast=True)


@triton.jit
def encode(value, KIND: tl.constexpr):
    """Nearest word of fp32 values, ties to even, every NaN the one quiet NaN."""
    if KIND == 0:
        u = value.to(tl.int32, bitcast=True)
        word = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.int16)
        return tl.where(value != value, tl.full(word.shape, 0x7FC0, tl.int16), word)
    elif KIND == 1:
        word = value.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(value != value, tl.full(word.shape, 0x7E00, tl.int16), word)
    else:
        word = value.to(tl.int32, bitcast=True)
        return tl.where(value != value, tl.full(word.shape, 0x7FC00000, tl.int32), word)


@triton.jit
def step(word, places, KIND: tl.constexpr):
    """The word `places` grid points further along the number line."""
    u = word.to(tl.int32)
    if KIND == 2:
        key = (u ^ ((u >> 31) & 0x7FFFFFFF)) + places
        return key ^ ((key >> 31) & 0x7FFFFFFF)
    else:
        key = (u ^ ((u >> 31) & 0x7FFF)) + places
        return (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16)


@triton.jit
def fused(a, b, c, EXACT: tl.constexpr):
    """`a * b + c` with one rounding; the interpreter's own `fma` rounds twice, so it uses fp64."""
    if EXACT:
        return tl.fma(a, b, c)
    else:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def rotate(w1, w2, c, s, KIND: tl.constexpr, RULE: tl.constexpr, EXACT: tl.constexpr):
    """Rotate words by the model's arithmetic."""
    x1, x2 = decode(w1, KIND), decode(w2, KIND)
    if RULE == 0:
        o1 = decode(encode(x1 * c, KIND), KIND) - decode(encode(x2 * s, KIND), KIND)
        o2 = decode(encode(x2 * c, KIND), KIND) + decode(encode(x1 * s, KIND), KIND)
    elif RULE == 1:
        o1 = x1 * c - x2 * s
        o2 = x2 * c + x1 * s
    elif RULE == 2:
        o1 = fused(x1, c, -(x2 * s), EXACT)
        o2 = fused(x2, c, x1 * s, EXACT)
    else:
        o1 = fused(-x2, s, x1 * c, EXACT)
        o2 = fused(x1, s, x2 * c, EXACT)
    return encode(o1, KIND), encode(o2, KIND)


@triton.jit
def widen(value, KIND: tl.constexpr):
    """fp64 for fp32 words, which fp32 cannot un-rotate; else as it is."""
    if KIND == 2:
        return value.to(tl.float64)
    else:
        return value


@triton.jit
def unrotate(w1, w2, c, s, KIND: tl.constexpr):
    """Position-free pair, not rounded to the grid."""
    y1, y2 = widen(decode(w1, KIND), KIND), widen(decode(w2, KIND), KIND)
    c, s = widen(c, KIND), widen(s, KIND)
    # The operations and their order are those of the CPU path, so that `move` gives its bits.
    norm = c * c + s * s
    if KIND == 2:
        scale = 1.0 / norm
    else:
        scale = tl.div_rn(tl.full(norm.shape, 1.0, tl.float32), norm)
    return (y1 * c + y2 * s) * scale, (y2 * c - y1 * s) * scale


@triton.jit
def take(
    found, b1, b2, x1, x2, y1, y2, c, s,
    KIND: tl.constexpr, RULE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Keep the candidate `(x1, x2)` in lanes where it is the first that rotates to `(y1, y2)`."""
    o1, o2 = rotate(x1, x2, c, s, KIND, RULE, EXACT)
    hit = (o1 == y1) & (o2 == y2) & (found == 0)
    return found | hit.to(tl.int32), tl.where(hit, x1, b1), tl.where(hit, x2, b2)


@triton.jit
def half_gap(word, KIND: tl.constexpr):
    """Half the distance of neighbouring grid points."""
    above = widen(decode(step(word, 1, KIND), KIND), KIND)
    below = widen(decode(step(word, -1, KIND), KIND), KIND)
    return tl.abs(above - below) * 0.25


@triton.jit
def solve(
    found, b1, b2, a1, a2, y1, y2, c, s, slack,
    KIND: tl.constexpr, RULE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For candidates of the larger component, try the middle of the interval of the smaller."""
    v1, v2 = widen(decode(a1, KIND), KIND), widen(decode(a2, KIND), KIND)
    larger1 = tl.abs(v1) >= tl.abs(v2)
    cw, sw = widen(c, KIND), widen(s, KIND)
    z1, z2 = widen(decode(y1, KIND), KIND), widen(decode(y2, KIND), KIND)
    k1, k2 = tl.where(larger1, -sw, cw), tl.where(larger1, cw, sw)
    e1, e2 = half_gap(y1, KIND), half_gap(y2, KIND)
    for i in tl.static_range(7):
        outer = step(tl.where(larger1, a1, a2), i - 3, KIND)
        x = widen(decode(outer, KIND), KIND)
        m1 = (z1 - x * tl.where(larger1, cw, -sw)) / k1
        m2 = (z2 - x * tl.where(larger1, sw, cw)) / k2
        spread1 = tl.abs((e1 + slack * tl.abs(x * k2)) / k1)
        spread2 = tl.abs((e2 + slack * tl.abs(x * k1)) / k2)
        low = tl.maximum(m1 - spread1, m2 - spread2)
        high = tl.minimum(m1 + spread1, m2 + spread2)
        for j in tl.static_range(3):
            inner = encode((low + (high - low) * (0.25 + 0.25 * j)).to(tl.float32), KIND)
            x1, x2 = tl.where(larger1, outer, inner), tl.where(larger1, inner, outer)
            found, b1, b2 = take(found, b1, b2, x1, x2, y1, y2, c, s, KIND, RULE, EXACT)
    return found, b1, b2


@triton.jit
def copy_rest(
    source, a, out, b, columns, DIM: tl.constexpr, FIRST: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Copy the columns of one row that are not rotated, REST of a row at a time."""
    for start in range(0, columns, REST):
        q = start + tl.arange(0, REST)
        inside = q % DIM
        rest = (q < columns) & ((inside < FIRST) | (inside >= FIRST + 2 * HALF))
        tl.store(out + b + q, tl.load(source + a + q, mask=rest), mask=rest)


@triton.jit
def columns_of(
    start, DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Columns of neighbouring pairs from pair `start`, both of each: `[2 * BLOCK]`."""
    p = 2 * start + tl.arange(0, 2 * BLOCK)
    return p, (p // (2 * HALF)) * DIM + FIRST + p % (2 * HALF)


@triton.jit
def load_pairs(
    source, a, start, pairs, DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs of a row from pair `start` on, `[BLOCK]` twice, 16 bytes a thread where there are.

    Neighbours are read as they lie, and then taken apart.
    """
    if INTERLEAVED:
        p, column = columns_of(start, DIM, FIRST, HALF, BLOCK)
        both = tl.load(source + a + column, mask=p < 2 * pairs, other=0)
        first, second = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        q = start + tl.arange(0, BLOCK)
        column = (q // HALF) * DIM + FIRST + q % HALF
        first = tl.load(source + a + column, mask=q < pairs, other=0)
        second = tl.load(source + a + column + HALF, mask=q < pairs, other=0)
    return first, second


@triton.jit
def store_pairs(
    target, b, first, second, start, pairs, DIM: tl.constexpr, FIRST: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The way back of `load_pairs`."""
    if INTERLEAVED:
        p, column = columns_of(start, DIM, FIRST, HALF, BLOCK)
        both = tl.reshape(tl.join(first, second), (2 * BLOCK,))
        tl.store(target + b + column, both, mask=p < 2 * pairs)
    else:
        q = start + tl.arange(0, BLOCK)
        column = (q // HALF) * DIM + FIRST + q % HALF
        tl.store(target + b + column, first, mask=q < pairs)
        tl.store(target + b + column + HALF, second, mask=q < pairs)


@triton.jit
def row_in_pages(t, page_index, page_words, first_word, first_row, page_size, width):
    """Offset of token `t` of an operation that begins at row `first_row` of the first page."""
    row = t + first_row
    page = tl.load(page_index + row // page_size).to(tl.int64)
    return page * page_words + first_word + (row % page_size) * width


@triton.jit
def search(
    y1, y2, c, s, slack, KIND: tl.constexpr, RULE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The position-free pair that rotates to `(y1, y2)`, else the rounded one."""
    v1, v2 = unrotate(y1, y2, c, s, KIND)
    a1, a2 = encode(v1.to(tl.float32), KIND), encode(v2.to(tl.float32), KIND)
    o1, o2 = rotate(a1, a2, c, s, KIND, RULE, EXACT)
    found = ((o1 == y1) & (o2 == y2)).to(tl.int32)
    b1, b2 = a1, a2
    # Forward, the side of the unrounded value, is tried before backward.
    f1 = tl.where(v1 > widen(decode(a1, KIND), KIND), 1, -1)
    f2 = tl.where(v2 > widen(decode(a2, KIND), KIND), 1, -1)
    for ring in tl.static_range(1, 3):
        if tl.min(found) == 0:
            for i in tl.static_range(-ring, ring + 1):
                for m in tl.static_range(-ring, ring + 1):
                    if i * i == ring * ring or m * m == ring * ring:
                        x1, x2 = step(a1, -i * f1, KIND), step(a2, -m * f2, KIND)
                        found, b1, b2 = take(found, b1, b2, x1, x2, y1, y2, c, s, KIND, RULE, EXACT)
    if tl.min(found) == 0:
        found, b1, b2 = solve(found, b1, b2, a1, a2, y1, y2, c, s, slack, KIND, RULE, EXACT)
    return b1, b2


@triton.jit(do_not_specialize=LOOSE)
def save_kernel(
    pool, slots, row_stride, positions, cos, sin, pages, page_index, page_words, first_word,
    page_size, wrong, misses, heads, slack, DIM: tl.constexpr, FIRST: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr,
    EXACT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Gather one row to pages and un-rotate it; what is not met is marked and counted.

    First all of the row is un-rotated and rounded, 16 bytes a thread; then the pairs that this did
    not meet are searched for. `wrong` (uint8 `[T, H * D]`) marks what neither met, `misses`
    (`[T]`) counts it.
    """
    t = tl.program_id(0).to(tl.int64)
    a = tl.load(slots + t).to(tl.int64) * row_stride
    k = tl.load(positions + t).to(tl.int64) * HALF
    b = row_in_pages(t, page_index, page_words, first_word, 0, page_size, heads * DIM)
    w = t * heads * DIM
    if DIM > 2 * HALF:
        copy_rest(pool, a, pages, b, heads * DIM, DIM, FIRST, HALF, REST)
    pairs = heads * HALF
    for start in range(0, pairs, WIDE):
        q = start + tl.arange(0, WIDE)
        live, j = q < pairs, q % HALF
        y1, y2 = load_pairs(pool, a, start, pairs, DIM, FIRST, HALF, INTERLEAVED, WIDE)
        c = tl.load(cos + k + j, mask=live, other=1.0)
        s = tl.load(sin + k + j, mask=live, other=0.0)
        v1, v2 = unrotate(y1, y2, c, s, KIND)
        b1, b2 = encode(v1.to(tl.float32), KIND), encode(v2.to(tl.float32), KIND)
        o1, o2 = rotate(b1, b2, c, s, KIND, RULE, EXACT)
        store_pairs(pages, b, b1, b2, start, pairs, DIM, FIRST, HALF, INTERLEAVED, WIDE)
        if INTERLEAVED:
            m1, m2 = (o1 != y1).to(tl.uint8), (o2 != y2).to(tl.uint8)
            store_pairs(wrong, w, m1, m2, start, pairs, DIM, FIRST, HALF, INTERLEAVED, WIDE)
        else:
            column = (q // HALF) * DIM + FIRST + j
            tl.store(wrong + w + column, (o1 != y1).to(tl.uint8), mask=live)
            tl.store(wrong + w + column + HALF, (o2 != y2).to(tl.uint8), mask=live)
    tl.debug_barrier()  # another thread of this program reads the marks
    stride: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else HALF
    missed = 0
    for start in range(0, heads * HALF, BLOCK):
        q = start + tl.arange(0, BLOCK)
        live = q < heads * HALF
        j = q % HALF
        column = (q // HALF) * DIM + FIRST + j * stride
        bad = tl.load(wrong + w + column, mask=live, other=0)
        bad = bad | tl.load(wrong + w + column + gap, mask=live, other=0)
        live = bad > 0
        if tl.max(bad.to(tl.int32)) > 0:
            y1 = tl.load(pool + a + column, mask=live, other=0)
            y2 = tl.load(pool + a + column + gap, mask=live, other=0)
            c = tl.load(cos + k + j, mask=live, other=1.0)
            s = tl.load(sin + k + j, mask=live, other=0.0)
            b1, b2 = search(y1, y2, c, s, slack, KIND, RULE, EXACT)
            o1, o2 = rotate(b1, b2, c, s, KIND, RULE, EXACT)
            m1, m2 = (live & (o1 != y1)).to(tl.int32), (live & (o2 != y2)).to(tl.int32)
            tl.store(pages + b + column, b1, mask=live)
            tl.store(pages + b + column + gap, b2, mask=live)
            tl.store(wrong + w + column, m1.to(tl.uint8), mask=live)
            tl.store(wrong + w + column + gap, m2.to(tl.uint8), mask=live)
            missed += tl.sum(m1) + tl.sum(m2)
    tl.store(misses + t, missed)


@triton.jit(do_not_specialize=LOOSE)
def list_kernel(
    pool, slots, row_stride, wrong, misses, tails, tail_words, layer, num_layers, capacity,
    page_size, width, DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List in one page's tail what `save_kernel` marked, with the pool's bits.

    A tail is int32 words: 6 of which the fifth counts all, one a layer, and two an entry (value,
    bits). What is above `capacity` is counted, not listed.
    """
    p = tl.program_id(0).to(tl.int64)
    tail = tails + p * tail_words
    before = tl.load(tail + 4)
    count = before
    for row in range(page_size):
        t = p * page_size + row
        if tl.load(misses + t) > 0:
            a = tl.load(slots + t).to(tl.int64) * row_stride
            for start in range(0, width, BLOCK):
                q = start + tl.arange(0, BLOCK)
                inside = q % DIM
                live = (q < width) & (inside >= FIRST) & (inside < FIRST + 2 * HALF)
                bad = tl.load(wrong + t * width + q, mask=live, other=0).to(tl.int32)
                place = count + tl.cumsum(bad, 0) - bad
                live = (bad > 0) & (place < capacity)
                word = tl.load(pool + a + q, mask=live, other=0)
                if pool.dtype.element_ty == tl.int16:
                    word = word.to(tl.int32) & 0xFFFF
                entry = tail + 6 + num_layers + 2 * place
                tl.store(entry, row * width + q, mask=live)
                tl.store(entry + 1, word, mask=live)
                count += tl.sum(bad)
    tl.store(tail + 6 + layer, count - before)
    tl.store(tail + 4, count)


@triton.jit(do_not_specialize=LOOSE)
def page_kernel(
    pool, slots, row_stride, pages, page_index, page_words, first_word, page_size, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row of the pool to pages as it is."""
    t = tl.program_id(0).to(tl.int64)
    a = tl.load(slots + t).to(tl.int64) * row_stride
    b = row_in_pages(t, page_index, page_words, first_word, 0, page_size, width)
    for start in range(0, width, BLOCK):
        q = start + tl.arange(0, BLOCK)
        live = q < width
        tl.store(pages + b + q, tl.load(pool + a + q, mask=live), mask=live)


@triton.jit(do_not_specialize=LOOSE)
def load_kernel(
    pages, page_index, page_words, first_word, first_row, page_size, positions, cos, sin, pool,
    slots, row_stride, heads, DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate one row of pages and scatter it to the pool."""
    t = tl.program_id(0).to(tl.int64)
    a = row_in_pages(t, page_index, page_words, first_word, first_row, page_size, heads * DIM)
    b = tl.load(slots + t).to(tl.int64) * row_stride
    k = tl.load(positions + t).to(tl.int64) * HALF
    if DIM > 2 * HALF:
        copy_rest(pages, a, pool, b, heads * DIM, DIM, FIRST, HALF, REST)
    pairs = heads * HALF
    for start in range(0, pairs, BLOCK):
        q = start + tl.arange(0, BLOCK)
        live, j = q < pairs, q % HALF
        x1, x2 = load_pairs(pages, a, start, pairs, DIM, FIRST, HALF, INTERLEAVED, BLOCK)
        c = tl.load(cos + k + j, mask=live, other=1.0)
        s = tl.load(sin + k + j, mask=live, other=0.0)
        o1, o2 = rotate(x1, x2, c, s, KIND, RULE, EXACT)
        store_pairs(pool, b, o1, o2, start, pairs, DIM, FIRST, HALF, INTERLEAVED, BLOCK)


@triton.jit(do_not_specialize=LOOSE)
def move_kernel(
    pages, page_index, page_words, first_word, first_row, page_size, saved, positions, cos, sin,
    pool, slots, row_stride, heads, DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Move one position-bound row from its saved position to another, with one rounding."""
    t = tl.program_id(0).to(tl.int64)
    a = row_in_pages(t, page_index, page_words, first_word, first_row, page_size, heads * DIM)
    b = tl.load(slots + t).to(tl.int64) * row_stride
    k0 = tl.load(saved + t).to(tl.int64) * HALF
    k1 = tl.load(positions + t).to(tl.int64) * HALF
    if DIM > 2 * HALF:
        copy_rest(pages, a, pool, b, heads * DIM, DIM, FIRST, HALF, REST)
    pairs = heads * HALF
    for start in range(0, pairs, BLOCK):
        q = start + tl.arange(0, BLOCK)
        live, j = q < pairs, q % HALF
        y1, y2 = load_pairs(pages, a, start, pairs, DIM, FIRST, HALF, INTERLEAVED, BLOCK)
        c = tl.load(cos + k0 + j, mask=live, other=1.0)
        s = tl.load(sin + k0 + j, mask=live, other=0.0)
        v1, v2 = unrotate(y1, y2, c, s, KIND)
        c = widen(tl.load(cos + k1 + j, mask=live, other=1.0), KIND)
        s = widen(tl.load(sin + k1 + j, mask=live, other=0.0), KIND)
        o1 = encode((v1 * c - v2 * s).to(tl.float32), KIND)
        o2 = encode((v2 * c + v1 * s).to(tl.float32), KIND)
        o1, o2 = tl.where(k0 == k1, y1, o1), tl.where(k0 == k1, y2, o2)
        store_pairs(pool, b, o1, o2, start, pairs, DIM, FIRST, HALF, INTERLEAVED, BLOCK)


@triton.jit(do_not_specialize=LOOSE)
def unpage_kernel(
    pages, page_index, page_words, first_word, first_row, page_size, pool, slots, row_stride,
    width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row of pages to the pool as it is."""
    t = tl.program_id(0).to(tl.int64)
    a = row_in_pages(t, page_index, page_words, first_word, first_row, page_size, width)
    b = tl.load(slots + t).to(tl.int64) * row_stride
    for start in range(0, width, BLOCK):
        q = start + tl.arange(0, BLOCK)
        live = q < width
        tl.store(pool + b + q, tl.load(pages + a + q, mask=live), mask=live)


@triton.jit(do_not_specialize=LOOSE)
def correct_kernel(
    page, element, bits, count, first_row, page_size, pool, slots, num_tokens, row_stride,
    width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write corrected words of the tokens that are loaded to the pool."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    e = tl.load(element + i, mask=live, other=0)
    t = tl.load(page + i, mask=live, other=0) * page_size + e // width - first_row
    live = live & (t >= 0) & (t < num_tokens)
    at = tl.load(slots + t, mask=live, other=0).to(tl.int64) * row_stride + e % width
    word = tl.load(bits + i, mask=live, other=0)
    tl.store(pool + at, word.to(pool.dtype.element_ty), mask=live)
