"""Builds the codec of pages on disk from the settings, the KV pool and the files of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_ext.assembly.key_setup import file_keys
from sglang_ext.codec.base import CodecError
from sglang_ext.codec.calibration.profile_paths import find_profile
from sglang_ext.codec.page_codec import CodedShape, PageCodec, parse_level
from sglang_ext.codec.registry import kind_of
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import DevicePool
from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.namespace import digest_model
from sglang_ext.remote.remote_codec import RemotePageCodec
from sglang_ext.settings.config import HierKVConfig

PROFILE_FOLDER = "profiles"
DTYPE_NAMES = {  # as codecs call them
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def build_page_codec(
    config: HierKVConfig, pool: DevicePool, layout: PageLayout, kv_dtype: torch.dtype, runner: Any
) -> PageCodec | None:
    """The codec of records; None where none are kept, or where codecs cannot see the pool.

    With the codec "none" nothing is coded, and what an earlier run coded is still decoded.

    Args:
        config: the settings.
        pool: the device pool.
        layout: of its pages.
        kv_dtype: of the pool; fp8 pools hold bytes and are told apart by it.
        runner: SGLang's model runner: the weights name what is learned about the model, and a
            calibrated profile may lie in the model's folder or the cache folder.

    Raises:
        HierKVConfigError: codec, level or profile cannot be had with this model; one sentence.
    """
    if not config.disk_dir and not config.coded_host_bytes:
        return None
    codec_id = config.record_codec
    try:
        return PageCodec(
            _shape(pool, layout, kv_dtype),
            codec_id,
            None if codec_id == "none" else parse_level(codec_id, config.record_level),
            **_knowledge(config, codec_id, runner),
        )
    except (CodecError, OSError) as error:
        if codec_id == "none":
            return None
        raise HierKVConfigError(f"--hier-kv-codec {codec_id}: {error}.") from error


def build_remote_codec(
    config: HierKVConfig, pool: DevicePool, layout: PageLayout, kv_dtype: torch.dtype, runner: Any
) -> RemotePageCodec | None:
    """The codec of the remote store; None where pages travel raw. Arguments as above.

    Raises:
        HierKVConfigError: as above.
    """
    codec_id = config.of_tier("codec", "remote")
    if codec_id == "none":
        return None
    try:
        return RemotePageCodec(
            _shape(pool, layout, kv_dtype),
            codec_id,
            parse_level(codec_id, config.of_tier("level", "remote")),
            adopts=bool(config.key_file),  # then the store has nothing that no server of it made
            **_knowledge(config, codec_id, runner),
        )
    except (CodecError, OSError) as error:
        raise HierKVConfigError(f"--hier-kv-codec remote={codec_id}: {error}.") from error


def _shape(pool: DevicePool, layout: PageLayout, kv_dtype: torch.dtype) -> CodedShape:
    name = DTYPE_NAMES.get(kv_dtype)
    if name is None:
        raise CodecError(f"codecs know no KV dtype {kv_dtype}")
    return CodedShape.of(layout, name, int(pool.k[0].shape[2]))


def _knowledge(config: HierKVConfig, codec_id: str, runner: Any) -> dict[str, Any]:
    return {
        "learned": _learned(config, codec_id, runner.server_args),
        "folder": Path(config.disk_dir) / PROFILE_FOLDER if config.disk_dir else None,
        "owner": digest_model(runner.model).hex()[:16],
        "keys": file_keys(config),
    }


def _learned(config: HierKVConfig, codec_id: str, server_args: Any) -> Any | None:
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
            return kind.load(Path(config.profile))
        except (OSError, CodecError) as error:
            raise HierKVConfigError(
                f"--hier-kv-profile {config.profile} cannot be used: {error}; make one with "
                "`hier-kv calibrate` or leave it out."
            ) from error
    if kind is None:
        return None
    calibrated = kind.is_calibrated and server_args.tp_size == 1
    found = find_profile(str(server_args.model_path)) if calibrated else None
    return kind.load(found) if found is not None else None


def _uses_profile(config: HierKVConfig) -> bool:
    codecs = (config.record_codec, config.of_tier("codec", "remote"))
    return any(kind_of(codec_id) is not None for codec_id in codecs)
