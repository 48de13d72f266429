"""The codecs by id. A codec's module is imported only when the codec is asked for.

A new one is a subclass of `Codec` (`base.py`), or, where it has one level, of `OneLevelCodec`
(`one_level.py`; `none.py` and `zstd.py` are the smallest), and its line here, or the entry point of
another package (`sglang_ext/registry.py`). One that comes with the plugin is named in the help of
`--hier-kv-codec`, too (`settings/config.py`), and has a golden stream
(`tests/unit/codec/golden_chunks.py`).
"""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.codec.base import Codec, CodecError, LearnedKind, kv_dtype
from sglang_ext.registry import Registry

# Ids are stored in records; never rename.
_BUILTIN: Final = {
    "none": "sglang_ext.codec.none:NoneCodec",
    "zstd": "sglang_ext.codec.zstd:ZstdCodec",
    "lossless": "sglang_ext.codec.lossless.codec:LosslessCodec",
    "hier": "sglang_ext.codec.hier.codec:HierCodec",
    "cachegen-paper": "sglang_ext.codec.cachegen.paper:CachegenPaperCodec",
    "cachegen-released": "sglang_ext.codec.cachegen.released:CachegenReleasedCodec",
}
_CODECS: Final = Registry(
    "codec",
    "hier_kv.codecs",
    _BUILTIN,
    is_id=lambda text: text.isascii() and text.isprintable() and 1 <= len(text) <= 16,
    id_rule="a codec id is 1 to 16 printable ASCII characters",
    error=CodecError,
)

register_codec = _CODECS.register
codec_ids = _CODECS.ids


def codec_class(codec_id: str) -> type[Codec]:
    """Imports and returns the class of the codec called `codec_id`.

    Raises:
        CodecError: no codec has this id, or what has it is no codec.
    """
    cls: Any = _CODECS.load(codec_id)
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise CodecError(f"the codec {codec_id!r} must be a subclass of Codec, got {cls!r}")
    return cls


def create_codec(
    codec_id: str, *, dtype: str, profile: Any = None, engine: str = "numba", **options: Any
) -> Codec:
    """Makes the codec called `codec_id`. Its module is imported only now.

    Args:
        codec_id: one of `codec_ids()`.
        dtype: name of the KV dtype, one of `DTYPES`.
        profile: what the codec needs to know about the model; ignored by codecs that need nothing.
        engine: "numba", "naive" or "triton", for codecs that have several; all give the same bytes.
        options: passed to the class; what it takes is in its docstring.

    Raises:
        CodecError: no such codec or dtype, or the codec cannot work with this profile.
    """
    cls: Any = codec_class(codec_id)
    codec: Codec = cls(kv_dtype(dtype), profile=profile, engine=engine, **options)
    return codec


def kind_of(codec_id: str) -> LearnedKind | None:
    """What the codec called `codec_id` has to learn; None when it needs nothing, or is not known.

    Raises:
        CodecError: the codec cannot be imported.
    """
    return codec_class(codec_id).learned_kind() if codec_id in codec_ids() else None
