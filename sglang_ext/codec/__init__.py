"""Codecs of KV chunks: lossless ones, the product's own, and CacheGen's for comparison."""

from sglang_ext.codec.base import (
    DTYPES,
    ChunkShape,
    Codec,
    CodecError,
    KVDtype,
    check_out,
    check_planes,
    kv_dtype,
)
from sglang_ext.codec.registry import codec_class, codec_ids, create_codec, register_codec

__all__ = [
    "DTYPES",
    "ChunkShape",
    "Codec",
    "CodecError",
    "KVDtype",
    "check_out",
    "check_planes",
    "codec_class",
    "codec_ids",
    "create_codec",
    "kv_dtype",
    "register_codec",
]
