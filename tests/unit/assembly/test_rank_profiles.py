"""Of a calibrated profile each tensor parallel rank uses what is of its heads; all have one."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.assembly.codec_setup import agree_on_profile, build_codecs
from sglang_ext.codec.calibration import profile_paths
from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.calibration.hf_capture import float_to_bits
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import DevicePool
from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.config import HierKVConfig

LAYERS, HEAD_DIM = 2, 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Profiles of two heads, by the size of their blocks."""
    folder, found = tmp_path_factory.mktemp("profiles"), {}
    values = np.random.default_rng(5).normal(size=(2 * LAYERS, 600, 2 * HEAD_DIM))
    planes = float_to_bits(values.astype(np.float32), "bf16")
    for block in (HEAD_DIM, 2 * HEAD_DIM):
        options = CalibrationOptions(max_block_channels=block)
        profile = profile_from_planes([planes], "bf16", head_dim=HEAD_DIM, options=options)
        found[block] = folder / f"{block}.hkp"
        profile.save(found[block])
    return found


def codec_of(folder: Path, rank: int, profile: Path | str = "") -> Any:
    """What one of two ranks codes with, which has one of two heads."""
    own = [torch.zeros(32, 1, HEAD_DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    pool = DevicePool("mha", torch.bfloat16, tuple(own), tuple(own), 0, 32)
    config = HierKVConfig(
        codec="hier", profile=str(profile), disk_dir=str(folder / str(rank)), disk_size=1.0
    )
    runner = SimpleNamespace(
        server_args=SimpleNamespace(model_path=str(folder)), model=torch.nn.Linear(2, 2)
    )
    layout = PageLayout(4, (2 * HEAD_DIM,) * LAYERS, (2 * HEAD_DIM,) * LAYERS, 2)
    return build_codecs(config, pool, layout, torch.bfloat16, runner, RankPlace(rank, 2))[0]


def test_each_rank_uses_the_part_of_its_head(files: dict[int, Path], tmp_path: Path) -> None:
    whole = Profile.load(files[HEAD_DIM])
    digests = [codec_of(tmp_path, rank, files[HEAD_DIM])._encoder[1] for rank in range(2)]
    assert digests == [whole.of_rank(HEAD_DIM, rank, 2).digest for rank in range(2)]
    assert digests[0] != digests[1]


def test_a_named_one_whose_blocks_reach_over_ranks_is_refused(
    files: dict[int, Path], tmp_path: Path
) -> None:
    with pytest.raises(HierKVConfigError, match=r"reach over the heads of several ranks.*--max-bl"):
        codec_of(tmp_path, 0, files[2 * HEAD_DIM])


def test_one_beside_the_model_is_used_where_it_can_be(
    files: dict[int, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = tmp_path / profile_paths.FILE_NAME
    beside.write_bytes(files[HEAD_DIM].read_bytes())
    assert codec_of(tmp_path, 1)._encoder is not None
    caplog.set_level(logging.WARNING)
    other = tmp_path / "other"
    other.mkdir()
    (other / profile_paths.FILE_NAME).write_bytes(files[2 * HEAD_DIM].read_bytes())
    assert codec_of(other, 1)._encoder is None
    assert "learns a profile of its heads" in caplog.text


def test_ranks_with_other_files_are_refused(files: dict[int, Path]) -> None:
    config = HierKVConfig(codec="hier", disk_dir="/kv", disk_size=1.0, profile=str(files[HEAD_DIM]))
    agree_on_profile(config, "", lambda sent: [sent, sent])
    sentence = r"same calibrated profile on all ranks, got .* on tensor parallel rank 0 and none"
    with pytest.raises(HierKVConfigError, match=sentence):
        agree_on_profile(config, "", lambda sent: [sent, b""])


def test_a_rank_that_cannot_read_its_file_tells_the_others_so() -> None:
    """They wait for what it has to say."""
    told = []

    def exchange(sent: bytes) -> list[bytes]:
        told.append(sent)
        return [b"other", sent]

    unreadable = "/proc/self/mem"  # a file; who reads it from its beginning gets an error
    config = HierKVConfig(codec="hier", disk_dir="/kv", disk_size=1.0, profile=unreadable)
    with pytest.raises(HierKVConfigError, match="none on rank 1"):
        agree_on_profile(config, "", exchange)
    assert told == [b""]


def test_ranks_that_need_no_profile_exchange_nothing() -> None:
    def fails(sent: bytes) -> list[bytes]:
        raise AssertionError

    agree_on_profile(HierKVConfig(codec="zstd", disk_dir="/kv", disk_size=1.0), "", fails)
