"""What a codec of KV chunks is, and what it may have to learn about a model.

A chunk is `planes`: bit patterns, an array [S, T, C] of unsigned integers as wide as the KV dtype.
S planes go layer by layer, K before V (MLA: one plane a layer); T tokens; C = H*D channels. K is
position-free.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

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
        CodecError: as `check_planes`, or it is read-only, or its values lie across words.
    """
    shape = check_planes(out, dtype)
    if not out.flags.aligned:  # kernels would fill a copy
        raise CodecError("decode needs an array of aligned values, got one between words")
    if not out.flags.writeable:
        raise CodecError("decode needs an array it may write to, got a read-only one")
    return shape


class LearnedShape(NamedTuple):
    """The model that something learned must be of.

    Attributes:
        num_planes: S.
        num_channels: C.
    """

    num_planes: int
    num_channels: int


@dataclass(frozen=True)
class LearnedKind:
    """How one codec's knowledge is made, named and stored.

    Attributes:
        suffix: of its files.
        load: reads a file; raises `CodecError` or `OSError`.
        read: the content of a file that anybody may have made, for a model of this shape; raises
            `CodecError`, and takes no more memory than such a model needs.
        max_file_bytes: no such file is longer.
        digest: bytes that name the content.
        num_levels: levels of a codec that was given what `build` makes.
        build: makes it from chunks `[S, T, C]`, the dtype's name, head dim and a note on their
            origin.
        is_calibrated: a file of it may lie beside the model (`hier-kv calibrate`).
        of_rank: `of_rank(content, num_channels, rank, num_ranks)` takes the content of a file for
            the whole model and returns that for one tensor parallel rank, whose heads have
            `num_channels` channels of each plane; raises `CodecError`. None where the content
            cannot be divided.
    """

    suffix: str
    load: Callable[[Path], Any]
    read: Callable[[bytes, LearnedShape], Any]
    max_file_bytes: Callable[[LearnedShape], int]
    digest: Callable[[Any], bytes]
    num_levels: int
    build: Callable[[Sequence[PlaneArray], str, int, str], Any]
    is_calibrated: bool = False
    of_rank: Callable[[Any, int, int, int], Any] | None = None


class Codec(ABC):
    """Encodes chunks of one KV dtype to bytes and back.

    Instances hold no state that a call changes: any number of threads may use one at once. Numeric
    work frees the GIL where the engine does.

    A class is made as `cls(kv_dtype, profile=..., engine=..., **options)` (`registry.py`), and has
    to encode pages of zeros at every level. Where it learns (`learned_kind`), what is learned has
    `nbytes` and `save(path)`. `layered` streams are containers as `container.py` writes them.

    Attributes:
        codec_id: the id that records name.
        lossy: whether decoded bits may differ from the encoded ones.
        num_levels: quality settings; level 0 is the coarsest. 1 for a codec without any.
        level_names: names of the levels, coarsest first, for flags; may be left out.
        layered: whether one stream can hold several levels, each a prefix of it.
        default_level: what a profile from `hier-kv calibrate`, or the codec alone, defaults to.
        expected_kl: mean KL divergence, in nats a token, that each level of a model is expected to
            cost, coarsest first; finer ones cost what the last does. What counts is the ratio of
            levels. A lossless codec costs nothing.
        dtype: the KV dtype it was made for.
    """

    codec_id: str
    lossy: bool
    num_levels: int = 1
    level_names: ClassVar[tuple[str, ...]] = ()
    layered: bool = False
    default_level: int = 0
    expected_kl: ClassVar[tuple[float, ...]] = (0.005,)
    dtype: KVDtype

    @classmethod
    def learned_kind(cls) -> LearnedKind | None:
        """What the codec has to learn about a model; None when it needs nothing."""
        return None

    @property
    def table_bytes(self) -> int:
        """Bytes that it makes of what it learned, at the latest with its first chunk."""
        return 0

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
