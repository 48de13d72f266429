# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""The Triton kernels of `gpu.py`: a warp codes a group, its 32 threads are the lanes.

ROWS groups make a program of as many warps, which have nothing to do with each other: lane counts
and ranks are shuffles in a warp, so there are neither barriers nor shared memory. Addresses are
int64; within a group 31 bits are enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ["num_tiles", "num_groups", "num_tokens", "tiles_per_group", "slot_words"]


@triton.jit(do_not_specialize=_SIZES)
def decode_kernel(
    words, offsets, states, lut, classes, context, out, status,
    num_tiles, num_groups, num_tokens, tiles_per_group,
    HAS_CONTEXT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Decode groups to `out`.

    `status` of a lane is 0 if its group's words are as many as needed and its end state is right.
    """
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    exists = group < num_groups
    x = tl.load(states + group * 32 + lane, mask=exists, other=65536)
    # The first two lanes read where the group's words begin and end: any address that does not
    # change from lane to lane would make the compiler lay tensors out across warps.
    bounds = tl.load(offsets + group + lane, mask=exists & (lane < 2), other=0).to(tl.int64)
    start = tl.sum(tl.where(lane == 0, bounds, 0), 1, keep_dims=True)
    length = (tl.sum(tl.where(lane == 1, bounds, 0), 1, keep_dims=True) - start).to(tl.int32)
    at = tl.zeros((ROWS, 1), tl.int32)
    stream = words + start
    for k in range(tiles_per_group):
        tile = group * tiles_per_group + k
        live = exists & (tile < num_tiles)
        place = tile * num_tokens * 32 + lane
        row = tl.load(classes + tile * 32 + lane, mask=live, other=0).to(tl.int32)
        for _ in range(num_tokens):
            table = row
            if HAS_CONTEXT:
                table += tl.load(context + place, mask=live, other=0).to(tl.int32)
            slot = (x & 4095).to(tl.int32)
            entry = tl.load(lut + ((table << 12) | slot))
            tl.store(out + place, (entry & 255).to(tl.uint8), mask=live)
            fresh = ((entry >> 20) + 1) * (x >> 12) + ((entry >> 8) & 4095)
            low = ((fresh < 65536) & live).to(tl.int32)
            index = at + tl.cumsum(low, 1) - low
            inside = (low != 0) & (index < length)
            word = tl.load(stream + index, mask=inside, other=0).to(tl.uint32)
            fresh = tl.where(low != 0, (fresh << 16) | word, fresh)
            x = tl.where(live, fresh, x)
            at += tl.sum(low, 1, keep_dims=True)
            place += 32
    wrong = ((x != 65536) | (at != length)).to(tl.int32)
    tl.store(status + group * 32 + lane, wrong, mask=exists)


@triton.jit(do_not_specialize=_SIZES)
def encode_kernel(
    symbols, lut, classes, context, scratch, states, counts, status,
    num_tiles, num_groups, num_tokens, tiles_per_group, slot_words,
    HAS_CONTEXT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Encode groups, each to the end of its `slot_words` of scratch.

    `counts` of each lane is the number of its group's words; `status` is 1 if one of the lane's
    symbols has frequency 0.
    """
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    exists = group < num_groups
    x = tl.full((ROWS, 32), 65536, tl.uint32)
    bad = tl.zeros((ROWS, 32), tl.int32)
    count = tl.zeros((ROWS, 1), tl.int32)
    end = scratch + (group + 1) * slot_words
    for i in range(tiles_per_group):
        tile = group * tiles_per_group + (tiles_per_group - 1 - i)
        live = exists & (tile < num_tiles)
        place = (tile + 1) * num_tokens * 32 + lane
        row = tl.load(classes + tile * 32 + lane, mask=live, other=0).to(tl.int32)
        for _ in range(num_tokens):
            place -= 32
            table = row
            if HAS_CONTEXT:
                table += tl.load(context + place, mask=live, other=0).to(tl.int32)
            symbol = tl.load(symbols + place, mask=live, other=0).to(tl.int32)
            entry = tl.load(lut + ((table << 8) | symbol))
            packed, factor = entry.to(tl.uint32), (entry >> 32).to(tl.uint32)
            freq = packed & 8191
            bad = bad | ((freq == 0) & live).to(tl.int32)
            full = (((x >> 20) >= freq) & live).to(tl.int32)
            count += tl.sum(full, 1, keep_dims=True)
            index = tl.cumsum(full, 1) - full - count
            tl.store(end + index, (x & 65535).to(tl.uint16), mask=full != 0)
            y = tl.where(full != 0, x >> 16, x)
            quotient = tl.umulhi(y + ((packed >> 30) & 1), factor) >> ((packed >> 25) & 31)
            y = y + quotient * (4096 - freq) + ((packed >> 13) & 4095)
            x = tl.where(live, y, x)
    tl.store(states + group * 32 + lane, x, mask=exists)
    tl.store(counts + group * 32 + lane, count + lane * 0, mask=exists)
    tl.store(status + group * 32 + lane, bad, mask=exists)


@triton.jit(do_not_specialize=_SIZES)
def pack_kernel(scratch, offsets, words, slot_words, BLOCK: tl.constexpr):
    """Copy each group's words, which lie at the end of its scratch, to their offset in `words`."""
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + group).to(tl.int64)
    length = (tl.load(offsets + group + 1).to(tl.int64) - start).to(tl.int32)
    source = scratch + (group + 1) * slot_words - length
    for first in range(0, length, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < length
        tl.store(words + start + index, tl.load(source + index, mask=inside), mask=inside)
