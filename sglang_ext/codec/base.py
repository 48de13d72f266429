"""What a codec of KV chunks is, and the codecs by id.

A chunk is `planes`: bit patterns, an array [S, T, C] of unsigned integers as wide as the KV dtype.
S planes go layer by layer, K before V (MLA: one plane a layer); T tokens; C = H*D channels. K is
position-free.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

PlaneArray = npt.NDArray[np.unsignedinteger[Any]]

MAX_PLANES = 4096
MAX_TOKENS = 1 << 20
MAX_CHANNELS = 1 << 18
MAX_VALUES = 1 << 31


class CodecError(ValueError):
    """A chunk cannot be encoded, or bytes are no chunk that this codec can decode."""


@dataclass(frozen=True)
class KVDtype:
    """A KV dtype as codecs see it: a name, the number stored on disk, the bits of a value."""

    name: str
    code: int
    value_bytes: int
    exponent_bits: int
    mantissa_bits: int

    @property
    def storage(self) -> np.dtype[Any]:
        """The unsigned integer type that holds one value's bits."""
        return np.dtype(f"<u{self.value_bytes}")


# Codes are stored on disk; never renumber.
_DTYPES = (
    KVDtype("bf16", 1, 2, 8, 7),
    KVDtype("fp16", 2, 2, 5, 10),
    KVDtype("fp32", 3, 4, 8, 23),
    KVDtype("fp8_e4m3", 4, 1, 4, 3),
    KVDtype("fp8_e5m2", 5, 1, 5, 2),
)
DTYPES: Mapping[str, KVDtype] = MappingProxyType({d.name: d for d in _DTYPES})
DTYPE_OF_CODE: Mapping[int, KVDtype] = MappingProxyType({d.code: d for d in _DTYPES})


def kv_dtype(name: str) -> KVDtype:
    """Returns the dtype called `name`.

    Raises:
        CodecError: codecs know no such dtype.
    """
    if name not in DTYPES:
        raise CodecError(f"no KV dtype is called {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ChunkShape:
    """[S, T, C] of a chunk, checked against what any codec may be asked to hold."""

    num_planes: int
    num_tokens: int
    num_channels: int

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            CodecError: an axis is empty, or longer than a codec takes.
        """
        limits = (("planes", MAX_PLANES), ("tokens", MAX_TOKENS), ("channels", MAX_CHANNELS))
        for (name, limit), got in zip(limits, self.axes, strict=True):
            if not 1 <= got <= limit:
                raise CodecError(f"a chunk has 1 to {limit} {name}, got {got}")
        if self.num_values > MAX_VALUES:
            raise CodecError(f"a chunk has at most {MAX_VALUES} values, got {self.num_values}")

    @property
    def axes(self) -> tuple[int, int, int]:
        """(S, T, C), as an array's shape."""
        return self.num_planes, self.num_tokens, self.num_channels

    @property
    def num_values(self) -> int:
        """S * T * C."""
        return math.prod(self.axes)


def check_planes(planes: PlaneArray, dtype: KVDtype) -> ChunkShape:
    """Checks an array of bit patterns, for encode or to be filled by decode; returns its shape.

    Raises:
        CodecError: it is no C-contiguous [S, T, C] array of unsigned integers of the dtype's width.
    """
    if planes.ndim != 3 or planes.dtype != dtype.storage:
        raise CodecError(
            f"a {dtype.name} chunk is an array [planes, tokens, channels] of {dtype.storage}, "
            f"got {planes.ndim} axes of {planes.dtype}"
        )
    if not planes.flags.c_contiguous:
        raise CodecError("a chunk must be C-contiguous; pass a copy of the view")
    return ChunkShape(*planes.shape)


def check_out(out: PlaneArray, dtype: KVDtype) -> ChunkShape:
    """As `check_planes`, for an array that decode is to fill.

    Raises:
        CodecError: as `check_planes`, or it is read-only.
    """
    shape = check_planes(out, dtype)
    if not out.flags.writeable:
        raise CodecError("decode needs an array it may write to, got a read-only one")
    return shape


class Codec(ABC):
    """Encodes chunks of one KV dtype to bytes and back.

    Instances hold no state that a call changes: any number of threads may use one at once. Numeric
    work frees the GIL where the engine does.

    Attributes:
        codec_id: the id that records name.
        lossy: whether decoded bits may differ from the encoded ones.
        num_levels: quality settings; level 0 is the coarsest. 1 for a codec without any.
        layered: whether one stream can hold several levels, each a prefix of it.
        default_level: what a profile from `hier-kv calibrate`, or the codec alone, defaults to.
        dtype: the KV dtype it was made for.
    """

    codec_id: str
    lossy: bool
    num_levels: int = 1
    layered: bool = False
    default_level: int = 0
    dtype: KVDtype

    @abstractmethod
    def encode(
        self,
        planes: PlaneArray,
        *,
        level: int | None = None,
        last_level: int | None = None,
        raw_tokens: int | None = None,
    ) -> bytes:
        """Encodes `planes` [S, T, C] (see `check_planes`).

        Args:
            planes: bit patterns; not changed.
            level: the level of the stream, or of its base where it has layers. None: the codec's
                default.
            last_level: the finest level that refinement layers reach. None: `level`, no layers.
            raw_tokens: that many first tokens are kept bit-exact. None: the codec's default.

        Raises:
            CodecError: wrong shape or dtype, or no such level.
        """

    @abstractmethod
    def decode(
        self, data: bytes | memoryview, out: PlaneArray, *, level: int | None = None
    ) -> None:
        """Decodes `data` into `out` [S, T, C], whose shape and dtype must be the stream's.

        Allocates no more than a fixed multiple of `out`'s and `data`'s sizes, whatever `data` says.

        Args:
            data: what `encode` returned, or a prefix of it that ends at a layer.
            out: filled; its content is undefined after an error.
            level: the level to decode at, for streams with layers. None: the finest one present.

        Raises:
            CodecError: `data` is damaged, cut short, foreign, or of another shape, dtype or
                profile; or `out` is no array to decode into; or the level is not in the stream.
                Never anything else.
        """


# Ids are stored in records; never rename.
_BUILTIN: dict[str, str] = {
    "none": "sglang_ext.codec.none:NoneCodec",
    "zstd": "sglang_ext.codec.zstd:ZstdCodec",
    "lossless": "sglang_ext.codec.lossless.codec:LosslessCodec",
    "hier": "sglang_ext.codec.hier.codec:HierCodec",
    "cachegen-paper": "sglang_ext.codec.cachegen.paper:CachegenPaperCodec",
    "cachegen-released": "sglang_ext.codec.cachegen.released:CachegenReleasedCodec",
}
_CODECS: dict[str, str] = dict(_BUILTIN)


def register_codec(codec_id: str, target: str) -> None:
    """Registers `target` ("module:Class") as the codec called `codec_id`.

    Raises:
        ValueError: the id is taken or not 1 to 16 ASCII characters, or `target` is not of the form
            "module:Class".
    """
    if codec_id in _CODECS:
        raise ValueError(f"codec {codec_id!r} is already registered as {_CODECS[codec_id]!r}")
    if not (codec_id.isascii() and codec_id.isprintable() and 1 <= len(codec_id) <= 16):
        raise ValueError(f"a codec id is 1 to 16 printable ASCII characters, got {codec_id!r}")
    if target.count(":") != 1:
        raise ValueError(f"a codec is registered as 'module:Class', got {target!r}")
    _CODECS[codec_id] = target


def codec_ids() -> tuple[str, ...]:
    """Returns the registered ids, sorted."""
    return tuple(sorted(_CODECS))


def codec_class(codec_id: str) -> type[Codec]:
    """Imports and returns the class of the codec called `codec_id`.

    Raises:
        CodecError: no codec has this id.
    """
    if codec_id not in _CODECS:
        raise CodecError(f"no codec is called {codec_id!r}; known are {', '.join(codec_ids())}")
    module, name = _CODECS[codec_id].split(":")
    cls: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise TypeError(f"{_CODECS[codec_id]} must be a subclass of Codec")
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
