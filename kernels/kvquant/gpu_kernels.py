# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""The Triton kernels of `gpu.py`.

Integers are summed in fp64, exactly, so that the order in which a GPU does it does not matter.
Launch with `enable_fp_fusion=False`: a product and a sum that are defined as two roundings must
not become one.  KIND: 0 bf16, 1 fp16, 2 fp32, 3 fp8_e4m3, 4 fp8_e5m2.  Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_fp8(bits, BITS: tl.constexpr, BIAS: tl.constexpr):
    """fp32 value of a float8 with `BITS` bits of mantissa."""
    magnitude = (bits & 0x7F) << (23 - BITS)
    # Subnormals too: the exponent of fp32 is raised by a multiplication, which is exact.
    raise_by = tl.full(bits.shape, (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    value = (magnitude.to(tl.float32, bitcast=True) * raise_by).to(tl.int32, bitcast=True)
    if BITS == 2:
        value = tl.where(magnitude >= (31 << 23), (magnitude & 0x7FFFFF) | 0x7F800000, value)
    else:
        value = tl.where(magnitude == (0x7F << 20), 0x7FC00000, value)
    return (value | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def decode(word, KIND: tl.constexpr):
    """fp32 value of a word."""
    if KIND == 0:
        return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == 2:
        return word.to(tl.float32, bitcast=True)
    elif KIND == 3:
        return decode_fp8(word.to(tl.int32), 3, 7)
    else:
        return decode_fp8(word.to(tl.int32), 2, 15)


@triton.jit
def encode_fp8(magnitude, BITS: tl.constexpr, BIAS: tl.constexpr):
    """Bits of a finite magnitude in range, ties to even."""
    SHIFT: tl.constexpr = 23 - BITS
    odd = (magnitude >> SHIFT) & 1
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << BITS)
    # Below the normal numbers: adding a value whose last place is the grid rounds to it.
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - BITS) << 23
    magic = tl.full(magnitude.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    total = magnitude.to(tl.float32, bitcast=True) + magic
    subnormal = total.to(tl.int32, bitcast=True) - MAGIC
    return tl.where(magnitude >= ((128 - BIAS) << 23), normal, subnormal)


@triton.jit
def encode(value, KIND: tl.constexpr):
    """Nearest word of fp32 values, none of them NaN, ties to even, saturating."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    negative = bits < 0
    if KIND == 0:
        magnitude = tl.minimum(magnitude, 0x7F7F0000)
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return (rounded | tl.where(negative, 0x8000, 0)).to(tl.int16)
    elif KIND == 1:
        magnitude = tl.minimum(magnitude, 0x477FE000)
        half = magnitude.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        return (half.to(tl.int32) | tl.where(negative, 0x8000, 0)).to(tl.int16)
    elif KIND == 2:
        return tl.minimum(magnitude, 0x7F7FFFFF) | (bits & -0x80000000)
    elif KIND == 3:
        word = encode_fp8(tl.minimum(magnitude, 0x43E00000), 3, 7)
        return (word | tl.where(negative, 0x80, 0)).to(tl.uint8)
    else:
        word = encode_fp8(tl.minimum(magnitude, 0x47600000), 2, 15)
        return (word | tl.where(negative, 0x80, 0)).to(tl.uint8)


@triton.jit
def quantise_kernel(
    words, scale, mean, forward, inv_step, rounding, clamp, raw_from, starts, tiles, flags,
    num_tokens, width, n, num_sinks, num_column_parts,
    KIND: tl.constexpr, TOKENS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some coefficients of some tokens of one block; `flags` `[B, T]` marks raw rows.

    Rows that another program finds to be raw are cleared afterwards, by `clear_kernel`.
    """
    b = (tl.program_id(0) // num_column_parts).to(tl.int64)
    j = (tl.program_id(0) % num_column_parts) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float64)
    bad = tl.zeros((TOKENS,), tl.int32)
    for begin in range(0, n, TERMS):
        c = begin + tl.arange(0, TERMS)
        channel = b * n + c
        at = ((channel // width)[None, :] * num_tokens + t[:, None]) * width
        inside = (t < num_tokens)[:, None] & (c < n)[None, :]
        word = tl.load(words + at + (channel % width)[None, :], mask=inside, other=0)
        factor = tl.load(scale + channel, mask=c < n, other=1.0)
        x = decode(word, KIND) * factor[None, :]
        small = tl.abs(x) < 40000.0  # false for NaN
        # Adding 1.5 * 2^23 leaves no place for a fraction: it is rounded, ties to even.
        rounded = (tl.where(small, x, 0.0) + 12582912.0) - 12582912.0
        good = small & (tl.abs(rounded) <= 32767.0)
        bad = bad | tl.max((inside & (good == 0)).to(tl.int32), axis=1)
        middle = tl.load(mean + channel, mask=c < n, other=0)
        grid = tl.where(good & inside, rounded.to(tl.int32) - middle[None, :], 0)
        row = (b * n + c).to(tl.int64) * n
        block = tl.load(
            forward + row[:, None] + j[None, :], mask=(c < n)[:, None] & (j < n)[None, :], other=0
        )
        sums = tl.dot(grid.to(tl.float64), block.to(tl.float64), sums, out_dtype=tl.float64)
    column = b * n + j
    per_step = tl.load(inv_step + column, mask=j < n, other=0.0)
    limit = tl.load(clamp + column, mask=j < n, other=0)
    raw_at = tl.load(raw_from + column, mask=j < n, other=65537)
    scaled = tl.abs(sums) * per_step[None, :] + tl.load(rounding)
    size = tl.minimum(scaled, 65536.0).to(tl.int32)
    raw = (bad != 0) | (t < num_sinks) | (tl.max((size >= raw_at[None, :]).to(tl.int32), 1) != 0)
    size = tl.minimum(size, limit[None, :])
    q = tl.where(raw[:, None], 0, tl.where(sums < 0, -size, size)).to(tl.int16)
    tl.store(
        flags + b * num_tokens + t, tl.full((TOKENS,), 1, tl.uint8), mask=raw & (t < num_tokens)
    )
    position = tl.load(starts + b) + j
    live = position < tl.load(starts + b + 1)
    to = ((position // 32)[None, :] * num_tokens + t[:, None]) * 32 + (position % 32)[None, :]
    kept = (t < num_tokens)[:, None] & (live & (j < n))[None, :]
    tl.store(tiles + to, q, mask=kept)


@triton.jit
def clear_kernel(flags, starts, tiles, num_tokens, COLUMNS: tl.constexpr):
    """Set the coefficients of one row to 0 if it is raw."""
    b, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(flags + b * num_tokens + t) != 0:
        begin, end = tl.load(starts + b), tl.load(starts + b + 1)
        for first in range(begin, end, COLUMNS):
            p = first + tl.arange(0, COLUMNS)
            at = ((p // 32) * num_tokens + t) * 32 + p % 32
            tl.store(tiles + at, tl.zeros((COLUMNS,), tl.int16), mask=p < end)


@triton.jit
def dequantise_kernel(
    tiles, shift, inverse, mean, scale, starts, words, num_tokens, width, n, num_column_parts,
    KIND: tl.constexpr, TOKENS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some channels of some tokens of one block."""
    b = (tl.program_id(0) // num_column_parts).to(tl.int64)
    c = (tl.program_id(0) % num_column_parts) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first = tl.load(starts + b)
    live = (tl.load(starts + b + 1) - first).to(tl.int32)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float64)
    for begin in range(0, live, TERMS):
        j = begin + tl.arange(0, TERMS)
        position = first + j
        at = ((position // 32)[None, :] * num_tokens + t[:, None]) * 32 + (position % 32)[None, :]
        inside = (t < num_tokens)[:, None] & (j < live)[None, :]
        q = tl.load(tiles + at, mask=inside, other=0).to(tl.int32)
        d = tl.load(shift + position, mask=j < live, other=0).to(tl.int32)[None, :]
        recon = 8 * q - tl.where(q > 0, d, tl.where(q < 0, -d, 0))
        row = (b * n + j).to(tl.int64) * n
        block = tl.load(
            inverse + row[:, None] + c[None, :],
            mask=(j < live)[:, None] & (c < n)[None, :],
            other=0,
        )
        sums = tl.dot(recon.to(tl.float64), block.to(tl.float64), sums, out_dtype=tl.float64)
    channel = b * n + c
    middle = tl.load(mean + channel, mask=c < n, other=0.0)
    unit = tl.load(scale + channel, mask=c < n, other=0.0)
    value = middle[None, :] + sums.to(tl.float32) * unit[None, :]
    at = ((channel // width)[None, :] * num_tokens + t[:, None]) * width
    inside = (t < num_tokens)[:, None] & (c < n)[None, :]
    tl.store(words + at + (channel % width)[None, :], encode(value, KIND), mask=inside)
