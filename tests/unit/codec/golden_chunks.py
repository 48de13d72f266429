"""Golden streams of the codecs: what they are made of, and the files that pin their bytes.

Run `python -m tests.unit.codec.golden_chunks --write` only for a new format version: servers in the
field have such chunks on their disks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.codec import Codec, create_codec
from sglang_ext.codec.base import PlaneArray
from sglang_ext.codec.cachegen.tables import PaperTables, measure_tables
from sglang_ext.codec.hier.profile import Profile
from tests.unit.codec.codec_cases import make_planes, make_profile

GOLDEN = Path(__file__).parents[2] / "golden"
PROFILE = GOLDEN / "codec-profile-v1.hkp"
TABLES = GOLDEN / "codec-cachegen-tables-v1.bin"
CONTENTS = GOLDEN / "codec-contents-v1.npz"  # of the streams: before coding, and after
SHAPE = (2, 40, 16)
LAST_LEVEL = 2


def planes(dtype: str) -> PlaneArray:
    """What the golden streams were made of."""
    with np.load(CONTENTS) as stored:
        return np.asarray(stored[f"planes-{dtype}"])


def _make_planes(dtype: str) -> PlaneArray:
    """Channels of unequal spread and mean; tokens that come again, are large or zero, a NaN."""
    bits = make_planes(*SHAPE, dtype)
    bits[:, 29:] = bits[:, : SHAPE[1] - 29]
    bits[1, 33:] ^= bits.dtype.type(1)
    bits[1, 7, 3] = {1: 0x7F, 2: 0x7FC1}[bits.itemsize]
    bits[:, 9] = 0
    bits[:, 10:14] += bits.dtype.type({1: 0x08, 2: 0x80}[bits.itemsize])  # twice as large
    return bits


def codecs() -> dict[str, Codec]:
    """Every codec and dtype that there is a golden stream of, by the file's name."""
    profile = Profile.load(PROFILE)
    tables = PaperTables.load(TABLES)
    return {
        "codec-none-v1.bin": create_codec("none", dtype="bf16"),
        "codec-zstd-v1.bin": create_codec("zstd", dtype="bf16"),
        "codec-lossless-v1.bin": create_codec("lossless", dtype="bf16"),
        "codec-lossless-fp8-v1.bin": create_codec("lossless", dtype="fp8_e4m3"),
        "codec-hier-v1.bin": create_codec("hier", dtype="bf16", profile=profile),
        "codec-cachegen-released-v1.bin": create_codec("cachegen-released", dtype="bf16"),
        "codec-cachegen-paper-v1.bin": create_codec("cachegen-paper", dtype="bf16", profile=tables),
    }


def encode(codec: Codec) -> bytes:
    """The golden stream of a codec; layers 0 to 2 and two raw tokens where it has such."""
    if codec.codec_id == "hier":
        return codec.encode(planes("bf16"), level=0, last_level=LAST_LEVEL, raw_tokens=2)
    return codec.encode(planes(codec.dtype.name))


def decode(codec: Codec, data: bytes) -> dict[str, PlaneArray]:
    """What a stream decodes to, at each level that a layered one has."""
    levels: list[int | None] = [None]
    if codec.codec_id == "hier":
        levels += list(range(LAST_LEVEL + 1))
    decoded = {}
    for level in levels:
        out = np.zeros(SHAPE, codec.dtype.storage)
        codec.decode(data, out, level=level)
        decoded["" if level is None else f"-{level}"] = out
    return decoded


def _write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    make_profile(2, 16, 8, raw_tokens=2, reach=1.5).save(PROFILE)
    contents: dict[str, Any] = {f"planes-{d}": _make_planes(d) for d in ("bf16", "fp8_e4m3")}
    np.savez_compressed(CONTENTS, **contents)
    measure_tables([planes("bf16")], "bf16").save(TABLES)
    for name, codec in codecs().items():
        data = encode(codec)
        (GOLDEN / name).write_bytes(data)
        contents.update({name + key: out for key, out in decode(codec, data).items()})
    np.savez_compressed(CONTENTS, **contents)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    _write()
