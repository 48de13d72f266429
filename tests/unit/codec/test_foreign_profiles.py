"""Profiles that other servers made: of this model or none, only to decode, and bounded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard

from sglang_ext.codec import learned as learned_module
from sglang_ext.codec.base import LearnedShape
from sglang_ext.codec.hier.codec import HierCodec
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.codec.learned import LearnedFolder
from sglang_ext.codec.memo import Memo
from sglang_ext.codec.profile_file import _HEAD, ARRAYS, INTS, num_array_bytes
from sglang_ext.codec.registry import kind_of
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.kernels.kvquant.packed import packed
from sglang_ext.tiers.records.record import RecordMeta, parse_header
from tests.faults.hostile_pages import DIM, LAYERS, SHAPE, codec_of, page, profile
from tests.unit.codec.codec_cases import make_profile

MODEL = LearnedShape(2 * LAYERS, DIM)


def meta_of(known: Any, codec_id: str = "hier") -> RecordMeta:
    """A record that names a profile."""
    digest = bytes(known.digest)
    return RecordMeta(bytes(32), bytes(32), b"", 0, 8, "pre", codec_id, 0, 1, digest)


def bomb(num_planes: int, num_channels: int, block: int) -> bytes:
    """A file of a few kilobytes whose arrays are zeros, and many."""
    ints = dict.fromkeys(INTS, 1) | {
        "num_planes": num_planes, "num_channels": num_channels, "block_channels": block,
        "num_levels": 2, "default_level": 0, "num_tables": 4,
    }  # fmt: skip
    widths = {name: 1 if "i" in kind else np.dtype(kind).itemsize for name, kind in ARRAYS.items()}
    kinds = {name: np.dtype(kind).itemsize for name, kind in ARRAYS.items()}
    blocks = num_planes * num_channels // block
    sizes = dict.fromkeys(ARRAYS, 2 * blocks * block) | {
        "grid_exp": blocks * block, "mean": blocks * block, "mean_f32": blocks * block,
        "forward": blocks * block**2, "inverse": blocks * block**2,
        "num_live": 2 * blocks, "freqs": 4 * 256, "radius": 4,
    }  # fmt: skip
    assert sum(sizes[name] * kinds[name] for name in ARRAYS) == num_array_bytes(ints)
    content = bytes(sum(sizes[name] * widths[name] for name in ARRAYS))
    packed = msgpack.packb(ints | {"widths": widths, "source": ""})
    body = _HEAD.pack(b"HKVP", 1, len(packed)) + packed
    body += zstandard.ZstdCompressor(level=3).compress(content)
    return bytes(body + xxhash.xxh3_64_digest(body))


@pytest.mark.parametrize(
    ("num_planes", "num_channels", "block"),
    [
        pytest.param(64, 512, 512, id="another model"),
        pytest.param(2 * LAYERS, DIM, 2 * LAYERS * DIM, id="this model"),
    ],
)
def test_a_small_file_does_not_grow_large(num_planes: int, num_channels: int, block: int) -> None:
    data = bomb(num_planes, num_channels, block)
    codec = codec_of("hier", learned=False)
    codec.learn(meta_of(profile()), data)  # imports
    tracemalloc.start()
    try:
        assert not codec.learn(meta_of(profile()), data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(data) < codec.max_profile_bytes("hier")


def test_what_grows_more_than_a_calibrated_profile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_ext.codec.profile_file._FREE_BYTES", 1000)
    assert not codec_of("hier", learned=False).learn(
        meta_of(profile()), bomb(2 * LAYERS, DIM, 2 * LAYERS * DIM)
    )
    assert codec_of("hier", learned=False).learn(meta_of(profile()), profile().to_bytes())


@pytest.mark.parametrize("shape", [(2 * LAYERS, 2 * DIM), (LAYERS, DIM), (LAYERS, 2 * DIM)])
def test_a_profile_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    other = make_profile(*shape, DIM)
    codec = codec_of("hier", learned=False)
    assert not codec.learn(meta_of(other), other.to_bytes())
    assert not codec.knows(meta_of(other))


def test_what_another_server_learned_decodes_and_never_codes(tmp_path: Path) -> None:
    record = codec_of("hier").encode(page(1))
    assert record is not None
    codec = RemotePageCodec(SHAPE, "hier", None, folder=tmp_path / "profiles")
    assert codec.learn(parse_header(record)[0], profile().to_bytes())
    out = np.zeros(SHAPE.layout.slot_bytes, np.uint8)
    assert codec.decode(record, out)
    assert codec.encode(page(1)) is None, "it has learned nothing itself yet"
    assert not (tmp_path / "profiles").exists()


def test_it_codes_where_the_store_proves_who_made_it() -> None:
    codec = RemotePageCodec(SHAPE, "hier", None, adopts=True)
    assert codec.learn(meta_of(profile()), profile().to_bytes())
    record = codec.encode(page(1))
    assert record is not None
    assert parse_header(record)[0].profile == profile().digest


def test_a_profile_without_the_level_that_is_asked_for_decodes_only() -> None:
    """Its pages are another server's of this deployment, and none that the store should forget."""
    coarse = make_profile(2 * LAYERS, DIM, DIM, num_levels=1)
    record = RemotePageCodec(SHAPE, "hier", 0, learned=coarse).encode(page(1))
    assert record is not None
    codec = RemotePageCodec(SHAPE, "hier", 2, adopts=True)
    assert codec.learn(parse_header(record)[0], coarse.to_bytes())
    assert codec.decode(record, np.zeros(SHAPE.layout.slot_bytes, np.uint8))
    assert codec.encode(page(1)) is None, "it goes on to learn its own"
    assert codec.learn(meta_of(profile()), profile().to_bytes())
    assert codec.encode(page(1)) is not None


def test_pages_to_learn_from_are_let_go_once_there_is_a_profile() -> None:
    codec = RemotePageCodec(SHAPE, "hier", None, adopts=True)
    assert codec.encode(page(1)) is None
    assert len(codec._samples) == 1
    assert codec.learn(meta_of(profile()), profile().to_bytes())
    assert not codec._samples


class _Slow:
    """A profile whose file is written while another codec may write the same one."""

    def __init__(self, others: threading.Barrier) -> None:
        self.digest, self.nbytes = profile().digest, 1
        self._others = others

    def save(self, path: Path) -> None:
        """Writes it, and then waits for another writer, if there is one."""
        profile().save(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._others.wait(2.0)


def test_codecs_of_two_tiers_that_learn_the_same_do_not_take_each_others_file(
    tmp_path: Path,
) -> None:
    slow = _Slow(threading.Barrier(2))
    folders = [LearnedFolder(tmp_path, MODEL) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        stored = [pool.submit(each.store, "hier", slow, "owner") for each in folders]
        assert [each.result() for each in stored] == [slow, slow]
    assert LearnedFolder(tmp_path, MODEL).latest("hier", "owner") is not None


def variants(num: int) -> list[Profile]:
    """As many profiles, each of its own digest."""
    return [dataclasses.replace(profile(), source="", raw_tokens=at) for at in range(num)]


def test_foreign_profiles_and_their_decoders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_module, "MAX_KNOWN", 8)
    monkeypatch.setattr("sglang_ext.codec.page_codec.MAX_KNOWN", 8)
    codec = codec_of("hier")
    for each in variants(30):
        assert codec.learn(meta_of(each), each.to_bytes())
    for at in range(100):
        assert not codec.knows(dataclasses.replace(meta_of(profile()), profile=bytes([at] * 32)))
    assert len(codec._known._known) <= 8
    assert len(codec._codecs) <= 8
    assert codec.encode(page(1)) is not None
    assert codec.profile(meta_of(profile())), "its own is always there to be published"


def test_decoders_are_bounded_by_all_that_they_hold() -> None:
    """A profile of many tables takes 36 times as much once the coder looks up in them."""
    codec = codec_of("hier", learned=False)
    (known,) = variants(1)
    assert codec.learn(meta_of(known), known.to_bytes())
    decoder = codec._codec("hier", known.digest)
    assert isinstance(decoder, HierCodec)
    tables, matrices = decoder._tables, packed(decoder.profile.transform)
    held = tables.decode_lut.nbytes + tables.encode_lut.nbytes
    held += matrices.forward.panels.nbytes + matrices.inverse.panels.nbytes
    assert decoder.table_bytes == held
    assert codec._codecs.num_bytes == known.nbytes + held


def test_a_folder_of_profiles_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learned_module, "MAX_FILES", 5)
    folder = LearnedFolder(tmp_path, MODEL)
    kept = variants(12)
    for each in kept:
        folder.store("hier", each, "owner")
    files = list(tmp_path.glob("*.hkp"))
    assert len(files) <= 5
    kind = kind_of("hier")
    assert kind is not None
    found = LearnedFolder(tmp_path, MODEL).latest("hier", "owner")
    assert found is not None
    assert kind.digest(found) == kept[-1].digest


def test_a_file_that_somebody_put_there_does_not_grow_large(tmp_path: Path) -> None:
    known = profile()
    path = tmp_path / f"{bytes(known.digest).hex()}.hkp"
    folder = LearnedFolder(tmp_path, MODEL)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        assert folder.find("hier", known.digest) is None
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    known.save(path)
    assert LearnedFolder(tmp_path, MODEL).find("hier", known.digest) is not None


def latest(folder: Path, *keys: bytes) -> bytes | None:
    """The digest of what a server with these keys codes with at its start."""
    found = LearnedFolder(folder, MODEL, keys).latest("hier", "owner")
    return bytes(found.digest) if found is not None else None


def test_with_a_key_no_file_says_how_pages_are_coded_but_a_keyholders(tmp_path: Path) -> None:
    own, forged = variants(2)
    key, other = bytes(32), bytes([1]) * 32
    LearnedFolder(tmp_path, MODEL, [key]).store("hier", own, "owner")
    assert latest(tmp_path, other, key) == own.digest, "after a rotation"
    assert latest(tmp_path) == own.digest
    assert latest(tmp_path, other) is None
    pointer = tmp_path / "owner.hier"
    proof = pointer.read_text().split()[1]
    (tmp_path / "another.hier").write_text(pointer.read_text())
    assert LearnedFolder(tmp_path, MODEL, [key]).latest("hier", "another") is None
    LearnedFolder(tmp_path, MODEL).store("hier", forged, "owner")  # by who has no key
    assert latest(tmp_path) == forged.digest
    for text in ("", f" {proof}"):
        pointer.write_text(forged.digest.hex() + text)
        assert latest(tmp_path, key) is None


def test_no_link_is_followed_to_what_was_learned_and_no_pipe_waited_for(tmp_path: Path) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    LearnedFolder(real, MODEL).store("hier", profile(), "owner")
    linked.symlink_to(real)
    assert LearnedFolder(real, MODEL).latest("hier", "owner") is not None
    assert LearnedFolder(linked, MODEL).latest("hier", "owner") is None
    before = sorted(real.iterdir())
    LearnedFolder(linked, MODEL).store("hier", variants(2)[1], "owner")
    assert sorted(real.iterdir()) == before
    for name in ("owner.hier", f"{profile().digest.hex()}.hkp"):
        path, away = real / name, real / f"{name}.away"
        path.rename(away)
        os.mkfifo(path)
        assert LearnedFolder(real, MODEL).latest("hier", "owner") is None
        path.unlink()
        path.symlink_to(away)
        assert LearnedFolder(real, MODEL).latest("hier", "owner") is None
        path.unlink()
        away.rename(path)


def test_the_least_recent_leave_a_memo_first() -> None:
    memo: Memo[str] = Memo(3, 100)
    for name, num_bytes in (("a", 10), ("b", 10), ("c", 10)):
        memo.put(name, name, num_bytes)
    assert memo.get("a") == "a"
    memo.put("d", "d", 10)
    assert ("b" in memo, "a" in memo, len(memo)) == (False, True, 3)
    memo.put("e", "e", 95)
    assert (len(memo), memo.num_bytes) == (1, 95)
    memo.put("f", "f", 1000)
    assert (memo.get("f"), memo.get("e"), len(memo)) == ("f", None, 1)
    memo.drop("f")
    assert (len(memo), memo.num_bytes) == (0, 0)
