"""The arithmetic coder's entry points: numpy in, numpy out, one stream per row of symbols.

Shapes: N streams, T symbols each, K tables of A symbols, R tables that one stream may use.
Nothing here is shared between threads; the numba engine releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import cpu, naive

TOTAL = 1 << 16  # frequencies of a table sum to this
_SCRATCH_BYTES = 32 << 20
_ENGINES: dict[str, Any] = {"numba": cpu, "naive": naive}

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]


class ACError(ValueError):
    """Bytes that no encoder can have written, or symbols that the tables cannot code."""


@dataclass(frozen=True)
class Coded:
    """What `encode` returns.

    Attributes:
        lengths: u32 [N], bytes of each stream.
        data: u8 [sum of lengths], the streams one after another.
    """

    lengths: U32
    data: U8


def cdfs_of(freqs: NDArray[np.integer[Any]]) -> U32:
    """Cumulative tables u32 [..., A+1] of frequencies [..., A], each of which sums to 65,536.

    Raises:
        ValueError: a sum is not 65,536.
    """
    cdfs = np.zeros((*freqs.shape[:-1], freqs.shape[-1] + 1), np.uint32)
    np.cumsum(freqs, axis=-1, dtype=np.uint32, out=cdfs[..., 1:])
    if not np.all(cdfs[..., -1] == TOTAL):
        raise ValueError(f"expected frequencies that sum to {TOTAL} in every table")
    return cdfs


def check_tables(cdfs: U32) -> None:
    """Sees to it that each row of `cdfs` starts at 0, never falls, and ends at 65,536.

    Raises:
        ACError: it does not.
    """
    if cdfs.ndim != 2 or not 2 <= cdfs.shape[1] <= 257:
        raise ACError(f"expected tables [K, 2..257], got {cdfs.shape}")
    rising = np.all(cdfs[:, 1:] >= cdfs[:, :-1])
    if not rising or np.any(cdfs[:, 0] != 0) or np.any(cdfs[:, -1] != TOTAL):
        raise ACError(f"expected tables that rise from 0 to {TOTAL}")


def encode(
    symbols: U8, cdfs: U32, tables: I32, rules: U8 | None = None, *, engine: str = "numba"
) -> Coded:
    """Codes each row of `symbols` into a stream of its own.

    Args:
        symbols: u8 [N, T].
        cdfs: u32 [K, A+1], as `check_tables` wants them.
        tables: i32 [N, R], the rows of `cdfs` that a stream uses.
        rules: u8 [T], which of its R tables a stream uses at each place; all 0 where None.
        engine: `numba`, or `naive` (plain Python, for tests).

    Raises:
        ACError: tables or shapes do not fit, or a symbol has frequency 0.
    """
    rules = _checked(symbols.shape, cdfs, tables, rules)
    coder = _ENGINES[engine]
    num_streams, num_symbols = symbols.shape
    bound = stream_bound_bytes(num_symbols)
    step = max(1, _SCRATCH_BYTES // bound)
    lengths = np.zeros(num_streams, np.uint32)
    parts: list[U8] = []
    for start in range(0, num_streams, step):
        rows = np.ascontiguousarray(symbols[start : start + step])
        scratch = np.zeros((len(rows), bound), np.uint8)
        sizes = lengths[start : start + step]
        if not coder.encode_streams(
            rows, cdfs, tables[start : start + step], rules, scratch, sizes
        ):
            raise ACError("a symbol has frequency 0 in its table")
        parts.append(scratch[np.arange(bound) < sizes[:, None]])
    return Coded(lengths, np.concatenate(parts) if parts else np.zeros(0, np.uint8))


def decode(
    coded: Coded,
    cdfs: U32,
    tables: I32,
    out: U8,
    rules: U8 | None = None,
    *,
    engine: str = "numba",
) -> None:
    """Decodes into `out`, u8 [N, T]; arguments as for `encode`.

    Raises:
        ACError: shapes do not fit, lengths do not add up to the data, or a stream is not exactly as
            long as its symbols need. `out` is then partly written.
    """
    rules = _checked(out.shape, cdfs, tables, rules)
    if coded.lengths.shape != (out.shape[0],):
        raise ACError(f"expected {out.shape[0]} lengths, got shape {coded.lengths.shape}")
    ends = np.cumsum(coded.lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total != coded.data.size:
        raise ACError(f"streams have {total} bytes by their lengths, {coded.data.size} by the data")
    starts = ends - coded.lengths
    if not _ENGINES[engine].decode_streams(coded.data, starts, ends, cdfs, tables, rules, out):
        raise ACError("a stream is shorter or longer than its symbols need")


def stream_bound_bytes(num_symbols: int) -> int:
    """No stream of so many symbols is longer: a symbol costs at most 17 bits, the end 2."""
    return (17 * num_symbols + 2 + 7) // 8 + 1


def _checked(shape: tuple[int, ...], cdfs: U32, tables: I32, rules: U8 | None) -> U8:
    check_tables(cdfs)
    if len(shape) != 2 or tables.ndim != 2 or tables.shape[0] != shape[0]:
        raise ACError(f"expected symbols [N, T] and tables [N, R], got {shape}, {tables.shape}")
    if tables.size and not 0 <= int(tables.min()) <= int(tables.max()) < len(cdfs):
        raise ACError(f"expected numbers of {len(cdfs)} tables")
    rules = np.zeros(shape[1], np.uint8) if rules is None else rules
    if rules.shape != (shape[1],) or (rules.size and int(rules.max()) >= tables.shape[1]):
        raise ACError(f"expected rules [{shape[1]}] below {tables.shape[1]}")
    return rules
