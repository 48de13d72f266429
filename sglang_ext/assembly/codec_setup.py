"""Builds the codec of pages on disk from the settings, the KV pool and the files of the model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sglang_ext.assembly.key_setup import file_keys
from sglang_ext.codec.base import CodecError, LearnedKind
from sglang_ext.codec.calibration.profile_paths import find_profile
from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.codec.page_codec import PageCodec, parse_level
from sglang_ext.codec.registry import kind_of
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import DevicePool
from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.namespace import digest_model
from sglang_ext.ranks.rank import Exchange, RankPlace
from sglang_ext.settings.config import HierKVConfig

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profiles"
DTYPE_NAMES = {  # as codecs call them
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def agree_on_profile(config: HierKVConfig, model_path: str, exchange: Exchange) -> None:
    """Compares the calibrated profile among tensor parallel ranks; a collective of all of them.

    A page is decoded with the profile that coded it, so a rank that has another one harms nobody.
    Its heads would be kept at another quality than the settings say of all.

    Args:
        config: the server's settings.
        model_path: where a profile may lie that no setting names.
        exchange: among these ranks, in the order of their numbers.

    Raises:
        HierKVConfigError: a rank has another one, or none; one sentence.
    """
    kinds = [kind_of(codec_id) for codec_id, _, _ in _chosen(config)]
    if not any(kind is not None and (config.profile or kind.is_calibrated) for kind in kinds):
        return
    path = Path(config.profile) if config.profile else find_profile(model_path)
    found = exchange(_digest_of(path))
    other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
    if other is not None:
        raise HierKVConfigError(
            f"--hier-kv-codec expects the same calibrated profile on all ranks, got "
            f"{found[0].hex()[:16] or 'none'} on tensor parallel rank 0 and "
            f"{found[other].hex()[:16] or 'none'} on rank {other}; copy the file "
            f"{path or 'of the first node'} to every node or remove it from all."
        )


def _digest_of(path: Path | None) -> bytes:
    """Names a file's content; empty where it cannot be read: the other ranks wait to hear of it."""
    try:
        return b"" if path is None else hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""


def build_codecs(
    config: HierKVConfig,
    pool: DevicePool,
    layout: PageLayout,
    kv_dtype: torch.dtype,
    runner: Any,
    place: RankPlace,
    num_draft_layers: int = 0,
    *,
    has_states: bool = False,
) -> tuple[PageCodec | None, RemotePageCodec | None]:
    """The codec of records and that of the remote store.

    That of records is None where none are kept, or where codecs cannot see the pool. With the
    codec "none" nothing is coded, and what an earlier run coded is still decoded. That of the
    remote store is None where pages travel raw.

    Args:
        config: the settings.
        pool: the device pool.
        layout: of its pages.
        kv_dtype: of the pool; fp8 pools hold bytes and are told apart by it.
        runner: SGLang's model runner: the weights name what is learned about the model, and a
            calibrated profile may lie in the model's folder or the cache folder.
        place: this rank's; of a calibrated profile it takes what is of its own heads.
        has_states: parts of states lie in slots of such pages.
        num_draft_layers: how many of the pool's layers, the last ones, are a draft model's.

    Raises:
        HierKVConfigError: codec, level or profile cannot be had with this model; one sentence.
    """
    (codec_id, level, named), (remote_id, remote_level, remote_named) = _chosen(config)
    of_records: PageCodec | None = None
    if config.disk_dir or config.coded_host_bytes:
        is_coded = codec_id != "none"
        with _or_refused(named) if is_coded else suppress(CodecError, OSError):
            shape = _shape(pool, layout, kv_dtype, num_draft_layers, has_states=has_states)
            of_records = PageCodec(
                shape,
                codec_id,
                parse_level(codec_id, level) if is_coded else None,
                **_knowledge(config, codec_id, runner, shape, place),
            )
    if remote_id == "none":
        return of_records, None
    with _or_refused(remote_named):
        shape = _shape(pool, layout, kv_dtype, num_draft_layers, has_states=has_states)
        return of_records, RemotePageCodec(
            shape,
            remote_id,
            parse_level(remote_id, remote_level),
            adopts=bool(config.key_file),  # then the store has nothing that no server of it made
            **_knowledge(config, remote_id, runner, shape, place),
        )


def try_profile(
    config: HierKVConfig,
    layout: PageLayout,
    dtype: str,
    head_dim: int,
    model_path: str,
    place: RankPlace,
) -> None:
    """Refuses a profile that is not of pages as they are expected, before there are any.

    Args:
        config: the settings.
        layout: of the expected pages.
        dtype: of their values, as codecs call it.
        head_dim: of K.
        model_path: where a profile may lie that no setting names.
        place: this rank's.

    Raises:
        HierKVConfigError: one sentence.
    """
    for codec_id, level, named in _chosen(config):
        if kind_of(codec_id) is None:
            continue
        with _or_refused(named):
            shape = CodedShape.of(layout, dtype, head_dim)
            learned = _learned(config, codec_id, model_path, shape, place)
            if learned is not None:
                PageCodec(shape, codec_id, parse_level(codec_id, level), learned=learned).close()


def _chosen(config: HierKVConfig) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Codec, level and what the flag says, of records and of the remote store."""
    remote = config.of_tier("codec", "remote")
    return (
        (config.record_codec, config.record_level, config.record_codec),
        (remote, config.of_tier("level", "remote"), f"remote={remote}"),
    )


@contextmanager
def _or_refused(named: str) -> Iterator[None]:
    """Context in which a codec is made; HierKVConfigError, one sentence, where it cannot be had."""
    try:
        yield
    except (CodecError, OSError) as error:
        raise HierKVConfigError(f"--hier-kv-codec {named}: {error}.") from error


def _shape(
    pool: DevicePool,
    layout: PageLayout,
    kv_dtype: torch.dtype,
    num_draft_layers: int,
    *,
    has_states: bool,
) -> CodedShape:
    name = DTYPE_NAMES.get(kv_dtype)
    if name is None:
        raise CodecError(f"codecs know no KV dtype {kv_dtype}")
    if has_states and layout.gaps:
        # A part of a state is all bytes in front of the tail, and codecs see those of planes.
        raise CodecError(
            f"codecs need pages without bytes between K and V of a model with states, these have "
            f"{sum(gap.stop - gap.start for gap in layout.gaps)}; give a larger --page-size"
        )
    return CodedShape.of(layout, name, int(pool.k[0].shape[2]), num_draft_layers)


def _knowledge(
    config: HierKVConfig, codec_id: str, runner: Any, shape: CodedShape, place: RankPlace
) -> dict[str, Any]:
    return {
        "learned": _learned(config, codec_id, str(runner.server_args.model_path), shape, place),
        "folder": Path(config.disk_dir) / PROFILE_FOLDER if config.disk_dir else None,
        "owner": digest_model(runner.model).hex()[:16],
        "keys": file_keys(config),
    }


def _learned(
    config: HierKVConfig, codec_id: str, model_path: str, shape: CodedShape, place: RankPlace
) -> Any | None:
    """What the settings or the files of the model have for the codec; None to learn it in service.

    Raises:
        HierKVConfigError: a file was named and cannot be used.
        CodecError: the file beside the model or in the cache folder cannot be used.
    """
    kind = kind_of(codec_id)
    if config.profile and kind is None:
        if not _uses_profile(config):
            raise HierKVConfigError(
                f"--hier-kv-profile has no effect with --hier-kv-codec {codec_id}; leave it out."
            )
        return None
    if config.profile and kind is not None:
        try:
            return _of_rank(kind, kind.load(Path(config.profile)), shape, place)
        except (OSError, CodecError) as error:
            raise HierKVConfigError(
                f"--hier-kv-profile {config.profile} cannot be used: {error}; make one with "
                "`hier-kv calibrate` or leave it out."
            ) from error
    found = find_profile(model_path) if kind is not None and kind.is_calibrated else None
    if kind is None or found is None:
        return None
    learned = kind.load(found)
    try:
        return _of_rank(kind, learned, shape, place)
    except CodecError as error:
        logger.warning(
            "hier-kv: %s is not used, and this rank learns a profile of its heads: %s", found, error
        )
        return None


def _of_rank(kind: LearnedKind, learned: Any, shape: CodedShape, place: RankPlace) -> Any:
    """What a calibration of all heads says of this rank's.

    Raises:
        CodecError: it cannot be had of these.
    """
    if place.tp_size == 1:
        return learned
    if kind.of_rank is None:
        raise CodecError("what this codec learns is of all heads, and a rank has a part of them")
    return kind.of_rank(learned, shape.own.num_channels, place.tp_rank, place.tp_size)


def _uses_profile(config: HierKVConfig) -> bool:
    return any(kind_of(codec_id) is not None for codec_id, _, _ in _chosen(config))
