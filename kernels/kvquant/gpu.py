"""The transform with Triton, for planes on a CUDA device.

`quantise_tensors` and `dequantise_tensors` work on device tensors; `quantise` and `dequantise` are
the engine behind `api.py`, on the GPU if there is one.  Everything also runs on CPU tensors under
`TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from . import gpu_kernels as kernels
from .spec import I16, I32, LANES, Quantised, RawRows, TransformArrays, Words, row_places

_KINDS = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}  # the words' types on the device
_BLOCK = {"TOKENS": 32, "TERMS": 32, "COLUMNS": 32}
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


@dataclass(frozen=True, eq=False)
class _DeviceArrays:
    """A transform on a device; the attributes are those of `TransformArrays`."""

    scale: torch.Tensor
    mean: torch.Tensor
    forward: torch.Tensor
    inverse: torch.Tensor
    inv_step: torch.Tensor
    mean_f32: torch.Tensor
    out_scale: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    shift: tuple[torch.Tensor, ...]


_LOCK = Lock()  # guards _DEVICE_ARRAYS
_DEVICE_ARRAYS: WeakKeyDictionary[TransformArrays, dict[torch.device, _DeviceArrays]] = (
    WeakKeyDictionary()
)


def quantise_tensors(
    planes: torch.Tensor,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    raw_tokens: int,
    rounding: float,
    clamp: I32,
    raw_from: I32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise planes.

    Args:
        planes: signed words (uint8, int16 or int32) `[S, T, C]`, dense.
        dtype: their dtype.
        arrays: the transform.
        level: as for `api.quantise`, as are the two that follow.
        raw_tokens: first tokens that are raw.
        rounding: what is added before rounding down.
        clamp: as `spec.clamp_limits` gives it.
        raw_from: likewise.

    Returns:
        i16 `[N, T, 32]`, and u8 `[B, T]`, 1 for raw rows, sinks included.
    """
    device = planes.device
    ready, layout = _on_device(arrays, device), arrays.layout(level)
    num_tokens, n = planes.shape[1], arrays.block_channels
    tiles = torch.zeros((layout.num_tiles, num_tokens, LANES), dtype=torch.int16, device=device)
    flags = torch.zeros((arrays.num_blocks, num_tokens), dtype=torch.uint8, device=device)
    parts = triton.cdiv(n, _BLOCK["COLUMNS"])
    grid = (arrays.num_blocks * parts, triton.cdiv(num_tokens, _BLOCK["TOKENS"]))
    kernels.quantise_kernel[grid](
        planes,
        ready.scale,
        ready.mean,
        ready.forward,
        ready.inv_step[level],
        # A float argument would be fp32.
        torch.tensor([rounding], dtype=torch.float64, device=device),
        torch.from_numpy(clamp).to(device),
        torch.from_numpy(raw_from).to(device),
        ready.starts[level],
        tiles,
        flags,
        num_tokens,
        arrays.num_channels,
        n,
        raw_tokens,
        parts,
        KIND=_KINDS[dtype],
        **_BLOCK,
        **_OPTIONS,
    )
    kernels.clear_kernel[(arrays.num_blocks, num_tokens)](
        flags, ready.starts[level], tiles, num_tokens, COLUMNS=128, num_warps=1
    )
    return tiles, flags


def dequantise_tensors(
    tiles: torch.Tensor, dtype: str, arrays: TransformArrays, level: int, out: torch.Tensor
) -> None:
    """Write `out`, signed words `[S, T, C]`, from i16 `[N, T, 32]`; raw rows are not restored."""
    ready = _on_device(arrays, out.device)
    num_tokens, n = out.shape[1], arrays.block_channels
    parts = triton.cdiv(n, _BLOCK["COLUMNS"])
    grid = (arrays.num_blocks * parts, triton.cdiv(num_tokens, _BLOCK["TOKENS"]))
    kernels.dequantise_kernel[grid](
        tiles,
        ready.shift[level],
        ready.inverse,
        ready.mean_f32,
        ready.out_scale[level],
        ready.starts[level],
        out,
        num_tokens,
        arrays.num_channels,
        n,
        parts,
        KIND=_KINDS[dtype],
        **_BLOCK,
        **_OPTIONS,
    )


def restore_rows(raw: RawRows, arrays: TransformArrays, out: torch.Tensor) -> None:
    """Write raw rows and sinks to `out`, signed words `[S, T, C]`."""
    kind = _SIGNED[raw.bits.itemsize]
    if raw.index.size:
        plane, token, channel = row_places(raw.index, arrays, out.shape[1])
        bits = torch.from_numpy(raw.bits.view(kind).copy()).to(out.device)
        out[tuple(torch.from_numpy(at).to(out.device) for at in (plane, token, channel))] = bits
    sinks = torch.from_numpy(np.ascontiguousarray(raw.sinks).view(kind).copy())
    out[:, : sinks.shape[1]] = sinks.to(out.device)


def quantise(
    planes: Words,
    dtype: str,
    arrays: TransformArrays,
    level: int,
    raw_tokens: int,
    rounding: float,
    clamp: I32,
    raw_from: I32,
) -> Quantised:
    """As `api.quantise`, with the bounds that `spec.clamp_limits` gives."""
    tiles, flags = quantise_tensors(
        _to_device(planes), dtype, arrays, level, raw_tokens, rounding, clamp, raw_from
    )
    num_sinks = min(raw_tokens, planes.shape[1])
    flags[:, :num_sinks] = 0
    index = flags.reshape(-1).nonzero().reshape(-1).cpu().numpy()
    rows = planes[row_places(index, arrays, planes.shape[1])]
    raw = RawRows(index.astype(np.uint32), rows, planes[:, :num_sinks].copy())
    return Quantised(tiles.cpu().numpy(), raw)


def dequantise(
    tiles: I16, dtype: str, arrays: TransformArrays, level: int, out: Words, raw: RawRows
) -> None:
    """As `api.dequantise`."""
    planes = torch.empty(out.shape, dtype=_to_device(out[:0]).dtype, device=_device())
    dequantise_tensors(_to_device(tiles), dtype, arrays, level, planes)
    restore_rows(raw, arrays, planes)
    out[...] = planes.cpu().numpy().view(out.dtype)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _to_device(array: Words) -> torch.Tensor:
    kind = _SIGNED[array.itemsize]
    words = np.ascontiguousarray(array).view(kind)
    return torch.from_numpy(words if words.flags.writeable else words.copy()).to(_device())


def _on_device(arrays: TransformArrays, device: torch.device) -> _DeviceArrays:
    with _LOCK:
        found = _DEVICE_ARRAYS.setdefault(arrays, {})
        if device not in found:
            found[device] = _copied(arrays, device)
        return found[device]


def _copied(arrays: TransformArrays, device: torch.device) -> _DeviceArrays:
    def there(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    layouts = [arrays.layout(level) for level in range(arrays.num_levels)]
    scale = np.ldexp(np.float32(1), -arrays.grid_exp.astype(np.int32)).astype(np.float32)
    return _DeviceArrays(
        there(scale),
        there(arrays.mean),
        there(arrays.forward),
        there(arrays.inverse),
        there(arrays.inv_step),
        there(arrays.mean_f32),
        there(arrays.out_scale),
        tuple(there(layout.starts) for layout in layouts),
        tuple(there(layout.shift) for layout in layouts),
    )
