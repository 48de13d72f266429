"""`hier-kv prebuild`: compiles what the first start on a machine would wait for, and keeps it.

A part is what one kind of server needs. Each imports what it warms up itself: some loops are
compiled when their module is imported.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

from numba.core import event

from sglang_ext.child_processes import ChildProcesses
from sglang_ext.compiling import check_kept, round_source_times

_COMPILES = "numba:compile"  # numba's event; what it finds kept gives none
_NOISE_SHAPE = (2, 256, 64)  # planes, tokens, channels: enough to learn from
_OUTLIERS = 30.0  # times what a codec has learned from


@dataclass(frozen=True)
class Built:
    """What became of a part.

    Attributes:
        part: its name.
        num_compiled: loops that were not kept before.
        seconds: that it took.
    """

    part: str
    num_compiled: int
    seconds: float


def prebuild(dtypes: Sequence[str], codec_ids: Sequence[str], num_jobs: int = 1) -> Iterator[Built]:
    """Compiles all parts, in this process or in several at a time.

    Args:
        dtypes: of KV caches, as codecs call them.
        codec_ids: codecs that pages may be coded with.
        num_jobs: processes; with 1 it is this one.

    Raises:
        ValueError: no such dtype or codec; one sentence.
        OSError: what is compiled can be kept nowhere, or one of the processes was killed; one
            sentence.
    """
    # Before anything is imported that numba looks at.
    round_source_times()
    check_kept()
    parts = _parts(dtypes, codec_ids)
    if num_jobs == 1:
        yield from itertools.starmap(_built, parts.items())
        return
    try:
        with ChildProcesses(min(num_jobs, len(parts))) as pool:
            for future in [pool.submit(_built, *part) for part in parts.items()]:
                yield future.result()
    except BrokenProcessPool:
        raise OSError(
            "one of the processes that compile was killed, perhaps for want of memory; try --jobs 1"
        ) from None


def _built(part: str, build: Callable[[], None]) -> Built:
    begin_s = time.monotonic()
    with event.install_recorder(_COMPILES) as recorder:
        build()
    check_kept()
    num_compiled = sum(found.is_start for _, found in recorder.buffer)
    return Built(part, num_compiled, time.monotonic() - begin_s)


def _parts(dtypes: Sequence[str], codec_ids: Sequence[str]) -> dict[str, Callable[[], None]]:
    from sglang_ext.codec.base import kv_dtype
    from sglang_ext.codec.registry import codec_class

    for dtype in dtypes:
        kv_dtype(dtype)
    for codec_id in codec_ids:
        codec_class(codec_id)
    parts: dict[str, Callable[[], None]] = {"page store": _store, "quoted text": _quoted_text}
    for dtype in dtypes:
        parts[f"copies of {dtype}"] = partial(_copies, dtype)
        parts |= {
            f"codec {codec_id} of {dtype}": partial(_codec, codec_id, dtype)
            for codec_id in codec_ids
        }
    return parts


def _store() -> None:
    from sglang_ext.tiers.coded_host import MemoryTier
    from sglang_ext.tiers.host import HostArena
    from sglang_ext.tiers.index import PageIndex
    from sglang_ext.tiers.policy import PolicyConfig
    from sglang_ext.tiers.store import PageStore, PageStoreConfig

    records = MemoryTier(1 << 20)  # its books are those of a disk
    store_config = PageStoreConfig("auto", "", PolicyConfig())
    store = PageStore(HostArena(2, 4096), PageIndex(64), records, store_config)
    store.connect(records)
    store.close()


def _quoted_text() -> None:
    from sglang_ext.truncation.quote_search import warm_up

    warm_up(64)


def _copies(dtype: str) -> None:
    from sglang_ext.assembly.codec_setup import DTYPE_NAMES
    from sglang_ext.kernels import rope

    [torch_dtype] = [found for found, name in DTYPE_NAMES.items() if name == dtype]
    rope.warm_up(torch_dtype)


def _codec(codec_id: str, dtype: str) -> None:
    """Codes noise and decodes it; what a codec has to learn it learns from noise, too."""
    import numpy as np

    from sglang_ext.codec.float_bits import from_float32
    from sglang_ext.codec.registry import create_codec, kind_of

    noise = np.random.default_rng(0).standard_normal(_NOISE_SHAPE, np.float32)
    kind = kind_of(codec_id)
    learned = None
    if kind is not None:
        learned = kind.build([from_float32(noise, dtype)], dtype, _NOISE_SHAPE[2], "noise")
    codec = create_codec(codec_id, dtype=dtype, profile=learned)
    # Tokens that come again, and values that nobody expects: codecs have loops for both.
    planes = from_float32(np.concatenate([noise, noise, _OUTLIERS * noise], axis=1), dtype)
    streams = [codec.encode(planes)]
    if codec.layered:
        streams.append(codec.encode(planes, level=0, last_level=codec.num_levels - 1))
    for stream in streams:
        for data in (stream, memoryview(bytearray(stream))):  # to numba two types
            codec.decode(data, np.empty_like(planes))
