"""Parts of states, which are other bytes than K and V, through the codec of the pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.assembly.codec_setup import DTYPE_NAMES, build_codecs
from sglang_ext.codec.registry import codec_class, codec_ids
from sglang_ext.device.layout import HEADER_BYTES, ROPE_BOUND, PageLayout, write_tail
from sglang_ext.device.pools import DevicePool
from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.records.record import RecordMeta, write_meta

LAYERS, HEAD_DIM = 2, 16
CODECS = [name for name in codec_ids() if name != "none" and not codec_class(name).lossy]


def codec_of(
    folder: Path,
    page_size: int,
    *,
    codec: str = "lossless",
    dtype: torch.dtype = torch.bfloat16,
    has_states: bool = True,
    remote: bool = False,
) -> tuple[PageLayout, Any]:
    """Pages of so many tokens, and what codes them on disk, or for a remote store."""
    own = tuple(torch.zeros(32, 1, HEAD_DIM, dtype=dtype) for _ in range(LAYERS))
    pool = DevicePool("mha", dtype, own, own, 0, 32)
    config = HierKVConfig(codec=codec, disk_dir=str(folder), disk_size=1.0)
    if remote:
        config = HierKVConfig(codec=f"remote={codec}", remote_url=f"file://{folder}")
    runner = SimpleNamespace(
        server_args=SimpleNamespace(model_path=str(folder)), model=torch.nn.Linear(2, 2)
    )
    rows = (dtype.itemsize * HEAD_DIM,) * LAYERS
    layout = PageLayout(page_size, rows, rows, dtype.itemsize)
    place = RankPlace(0, 1)
    codecs = build_codecs(config, pool, layout, dtype, runner, place, has_states=has_states)
    return layout, codecs[remote]


@pytest.mark.parametrize("remote", [False, True], ids=["disk", "remote"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("kind", ["float32 values", "noise", "NaN and infinities", "zeros"])
def test_every_bit_of_a_part_comes_back(
    kind: str, dtype: torch.dtype, codec: str, remote: bool, tmp_path: Path
) -> None:
    layout, coder = codec_of(tmp_path, 64, codec=codec, dtype=dtype, remote=remote)
    rng = np.random.default_rng(3)
    num_bytes = layout.tail_offset - HEADER_BYTES
    content = {
        "float32 values": rng.normal(size=num_bytes // 4).astype(np.float32).view(np.uint8),
        "noise": rng.integers(0, 256, num_bytes, np.uint8),
        "NaN and infinities": np.resize(
            np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x8000], np.uint16), num_bytes // 2
        ).view(np.uint8),
        "zeros": np.zeros(num_bytes, np.uint8),
    }[kind]
    slot = np.zeros(layout.slot_bytes, np.uint8)
    slot[HEADER_BYTES : layout.tail_offset] = content
    payload = write_tail(slot, layout, rope_state=ROPE_BOUND, position=640)
    meta = RecordMeta(b"h" * 32, b"n" * 32, b"", 640, 64, "bound")
    write_meta(slot, meta, payload)
    record = coder.encode(slot)
    # What the slot held before means nothing.
    out = rng.integers(0, 256, layout.slot_bytes, np.uint8)
    assert coder.decode(record, out)
    end = HEADER_BYTES + payload
    assert np.array_equal(out[:end], slot[:end])


@pytest.mark.parametrize("remote", [False, True], ids=["disk", "remote"])
def test_pages_with_bytes_that_no_codec_sees_are_refused(remote: bool, tmp_path: Path) -> None:
    assert codec_of(tmp_path, 3, has_states=False, remote=remote)[0].gaps
    with pytest.raises(HierKVConfigError, match=r"lossless: .* these have 128; give a larger"):
        codec_of(tmp_path, 3, remote=remote)


@pytest.mark.parametrize("codec", CODECS)
def test_between_the_blocks_of_a_decoded_page_is_nothing_of_another_one(
    codec: str, tmp_path: Path
) -> None:
    """Zeros, as a save leaves there: the page may be stored raw elsewhere, gaps and all."""
    layout, coder = codec_of(tmp_path, 3, codec=codec, has_states=False)
    slot = np.full(layout.slot_bytes, 7, np.uint8)
    for gap in layout.gaps:
        slot[gap] = 0
    payload = write_tail(slot, layout, rope_state=ROPE_BOUND, position=0)
    write_meta(slot, RecordMeta(b"h" * 32, b"n" * 32, b"", 0, 3, "bound"), payload)
    out = np.full(layout.slot_bytes, 99, np.uint8)
    assert coder.decode(coder.encode(slot), out)
    end = HEADER_BYTES + payload
    assert np.array_equal(out[:end], slot[:end])
