"""Encoding and decoding with Triton.

The `*_tensors` functions take device tensors and do not wait for the device; `encode` and `decode`
take and give numpy arrays as the other engines do. Everything also runs on CPU tensors under
`TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from . import gpu_kernels as kernels
from .tables import LANES, U8, U16, U32, RansError, Tables

_LUTS: WeakKeyDictionary[Tables, dict[torch.device, tuple[torch.Tensor, torch.Tensor]]] = (
    WeakKeyDictionary()
)
ROWS = 4  # groups, and warps, of a program
_OPTIONS: dict[str, Any] = {"num_warps": ROWS, "enable_fp_fusion": False}


def decode_tensors(
    words: torch.Tensor,
    offsets: torch.Tensor,
    states: torch.Tensor,
    classes: torch.Tensor,
    tables: Tables,
    tiles_per_group: int,
    context: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Decode to `out`, uint8 `[N, T, 32]`; dtypes and shapes as in `api.decode`, not checked.

    Offsets must rise from 0 to `words.numel()`, and classes and contexts be in range.

    Returns:
        int32 `[G, 32]`, 0 for every lane if its group's words, and its end state, are right.
    """
    num_tiles, num_tokens, _ = out.shape
    num_groups = states.shape[0]
    status = torch.empty((num_groups, LANES), dtype=torch.int32, device=out.device)
    kernels.decode_kernel[(triton.cdiv(num_groups, ROWS),)](
        words,
        offsets,
        states,
        device_luts(tables, out.device)[0],
        classes,
        out if context is None else context,
        out,
        status,
        num_tiles,
        num_groups,
        num_tokens,
        tiles_per_group,
        HAS_CONTEXT=context is not None,
        ROWS=ROWS,
        **_OPTIONS,
    )
    return status


def encode_tensors(
    symbols: torch.Tensor,
    classes: torch.Tensor,
    tables: Tables,
    tiles_per_group: int,
    context: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode uint8 `[N, T, 32]`; dtypes and shapes as in `api.encode`, not checked.

    Returns:
        States, offsets (int64), words in a buffer with room for the worst case (the last offset
        says how many), and int32 `[G, 32]`, 1 for every lane with a symbol of frequency 0.
    """
    num_tiles, num_tokens, _ = symbols.shape
    num_groups, device = -(-num_tiles // tiles_per_group), symbols.device
    slot_words = min(tiles_per_group, num_tiles) * num_tokens * LANES
    scratch = torch.empty(num_groups * slot_words, dtype=torch.uint16, device=device)
    words = torch.empty(symbols.numel(), dtype=torch.uint16, device=device)
    states = torch.empty((num_groups, LANES), dtype=torch.uint32, device=device)
    counts, status = torch.empty((2, num_groups, LANES), dtype=torch.int32, device=device)
    kernels.encode_kernel[(triton.cdiv(num_groups, ROWS),)](
        symbols,
        device_luts(tables, device)[1],
        classes,
        symbols if context is None else context,
        scratch,
        states,
        counts,
        status,
        num_tiles,
        num_groups,
        num_tokens,
        tiles_per_group,
        slot_words,
        HAS_CONTEXT=context is not None,
        ROWS=ROWS,
        **_OPTIONS,
    )
    offsets = torch.zeros(num_groups + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts[:, 0], 0, out=offsets[1:])
    kernels.pack_kernel[(num_groups,)](scratch, offsets, words, slot_words, BLOCK=1024, **_OPTIONS)
    return states, offsets, words, status


def device_luts(tables: Tables, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables' `decode_lut` and `encode_lut` on a device, copied there once."""
    luts = _LUTS.setdefault(tables, {})
    if device not in luts:
        luts[device] = (
            torch.from_numpy(tables.decode_lut).to(device),
            torch.from_numpy(tables.encode_lut).to(device),
        )
    return luts[device]


def decode(
    states: U32,
    offsets: U32,
    words: U16,
    classes: U16,
    tables: Tables,
    tiles_per_group: int,
    context: U8 | None,
    out: U8,
) -> None:
    """As `naive.decode`."""
    if not out.size:
        return
    device = _device(tiles_per_group, out)
    decoded = torch.empty(out.shape, dtype=torch.uint8, device=device)
    status = decode_tensors(
        torch.from_numpy(words).to(device),
        torch.from_numpy(offsets).to(device),
        torch.from_numpy(states).to(device),
        torch.from_numpy(classes).to(device),
        tables,
        tiles_per_group,
        None if context is None else torch.from_numpy(context).to(device),
        decoded,
    )
    out[...] = decoded.cpu().numpy()
    wrong = np.flatnonzero(status.cpu().numpy().any(1))
    if wrong.size:
        raise RansError(f"group {wrong[0]} does not end in its first state, or has other words")


def encode(
    symbols: U8, classes: U16, tables: Tables, tiles_per_group: int, context: U8 | None
) -> tuple[U32, U32, U16]:
    """As `naive.encode`."""
    if not symbols.size:
        return np.empty((0, LANES), np.uint32), np.zeros(1, np.uint32), np.empty(0, np.uint16)
    device = _device(tiles_per_group, symbols)
    states, offsets, words, status = encode_tensors(
        torch.from_numpy(symbols).to(device),
        torch.from_numpy(classes).to(device),
        tables,
        tiles_per_group,
        None if context is None else torch.from_numpy(context).to(device),
    )
    wrong = np.flatnonzero(status.cpu().numpy().any(1))
    if wrong.size:
        first = int(wrong[0]) * tiles_per_group
        raise ValueError(f"a symbol of tiles {first}.. has frequency 0 in its table")
    ends = offsets.cpu().numpy()
    return states.cpu().numpy(), ends.astype(np.uint32), words[: ends[-1]].cpu().numpy()


def _device(tiles_per_group: int, symbols: U8) -> torch.device:
    group = min(tiles_per_group, symbols.shape[0]) * symbols.shape[1] * LANES
    if group >= 1 << 31:
        raise ValueError(f"a group has fewer than 2^31 symbols here, got {group}")
    if not isinstance(kernels.decode_kernel, triton.runtime.JITFunction):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("engine 'triton' needs a CUDA device; use 'numba' without one")
    return torch.device("cuda", torch.cuda.current_device())
