"""What the codec bench compares: a name and a level, and how planes become bytes and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.codec.kvtc import SINK_TOKENS, Allocator, KvtcLike, fit_bases
from bench.codec.simple import KiviLike, PerToken
from bench.core.case import CaseFailedError
from sglang_ext.codec import Codec, create_codec
from sglang_ext.codec.cachegen.paper import CachegenPaperCodec
from sglang_ext.codec.cachegen.released import CachegenReleasedCodec
from sglang_ext.codec.cachegen.tables import measure_tables
from sglang_ext.codec.float_bits import Bits, to_float32

# Bits a token and plane-channel that KVTC-like settings aim at, before DEFLATE.
KVTC_TARGETS = (0.75, 1.25, 2.0, 3.0, 4.5)


@dataclass(frozen=True)
class Method:
    """One codec at one level.

    Attributes:
        codec: its id; variants carry a suffix after a slash.
        level: name of the level.
        rotated: whether it codes K as an engine caches it; position-free K otherwise.
        encode: planes, and whether they begin the sequence, to bytes.
        decode: bytes to planes like those given.
        expected: what the bytes have to decode to, by a second way; None where only the codec's
            own tests tell.
        exact: decodes to the very bits.
    """

    codec: str
    level: str
    rotated: bool
    encode: Callable[[Bits, bool], bytes]
    decode: Callable[[bytes, Bits], Bits]
    expected: Callable[[Bits, bool], Bits] | None = None
    exact: bool = False

    @property
    def name(self) -> str:
        """Codec and level."""
        return f"{self.codec} {self.level}".strip()

    def check(self, planes: Bits, *, is_first: bool) -> None:
        """Codes planes once and compares what comes back with what has to.

        Raises:
            CaseFailedError: it differs.
        """
        if self.expected is None and not self.exact:
            return
        wanted = planes if self.expected is None else self.expected(planes, is_first)
        back = self.decode(self.encode(planes, is_first), planes)
        if not np.array_equal(back, wanted):
            share = float(np.mean(back != wanted))
            raise CaseFailedError(
                f"{self.name}: its bytes decode to other values than its quantiser says "
                f"({share:.2%} of them)"
            )


def coded(codec: Codec, data: bytes, like: Bits) -> Bits:
    """What a product codec decodes `data` to."""
    out = np.empty_like(like)
    codec.decode(data, out)
    return out


def of_codec(
    codec: Codec,
    name: str,
    level: int,
    level_name: str,
    *,
    rotated: bool = False,
    raw_tokens: int | None = None,
    expected: Callable[[Bits, bool], Bits] | None = None,
) -> Method:
    """A method that uses a codec of the product.

    Args:
        codec: the codec.
        name: its id, or that of a variant.
        level: the codec's level.
        level_name: how the report calls it.
        rotated: see `Method`.
        raw_tokens: tokens kept raw at the beginning of a sequence; the codec's default where None.
            A chunk further on keeps none.
        expected: see `Method`.
    """

    def encode(planes: Bits, is_first: bool) -> bytes:
        kept = raw_tokens if is_first else 0
        return codec.encode(np.ascontiguousarray(planes), level=level, raw_tokens=kept)

    return Method(
        name,
        level_name,
        rotated,
        encode,
        lambda data, like: coded(codec, data, like),
        expected,
        exact=not codec.lossy,
    )


def cachegen_methods(chunks: Sequence[Bits], dtype: str, *, rotated: bool) -> list[Method]:
    """Both baselines at all levels, tables from `chunks` of calibration text."""
    suffix = "" if rotated else "/position-free"
    paper = create_codec("cachegen-paper", dtype=dtype, profile=measure_tables(chunks, dtype))
    released = create_codec("cachegen-released", dtype=dtype)
    methods = []
    for codec in (released, paper):
        assert isinstance(codec, (CachegenPaperCodec, CachegenReleasedCodec))
        for level, level_name in enumerate(codec.level_names):
            methods.append(
                of_codec(
                    codec,
                    codec.codec_id + suffix,
                    level,
                    level_name,
                    rotated=rotated,
                    expected=_cachegen_expected(codec, level),
                )
            )
    return methods


def _cachegen_expected(
    codec: CachegenPaperCodec | CachegenReleasedCodec, level: int
) -> Callable[[Bits, bool], Bits]:
    def expected(planes: Bits, _: bool) -> Bits:
        out = np.empty_like(planes)
        symbols, sizes, bad = codec.quantise(planes, level)
        codec.dequantise(symbols, sizes, level, out)  # type: ignore[arg-type]  # its own kind
        out[bad] = planes[bad]
        return out

    return expected


def simple_methods(dtype: str) -> list[Method]:
    """int8 and int4 per token, and KIVI-like with 4 and 2 bits, on K as an engine caches it."""
    kivi = [_simple(f"kivi-{bits}", KiviLike(bits, dtype)) for bits in (4, 2)]
    return [*per_token_methods(dtype, (8, 4)), *kivi]


def per_token_methods(dtype: str, widths: Sequence[int]) -> list[Method]:
    """One range for each plane and token, codes of some bits."""
    return [_simple(f"int{bits}-token", PerToken(bits, dtype)) for bits in widths]


def _simple(name: str, coder: PerToken | KiviLike) -> Method:
    return Method(
        name,
        "",
        True,
        lambda planes, _: coder.encode(planes),
        lambda data, _: coder.decode(data),
        lambda planes, _: coder.simulate(planes),
    )


def kvtc_methods(
    chunks: Sequence[Bits], dtype: str, targets: Sequence[float] = KVTC_TARGETS
) -> list[Method]:
    """KVTC-like at several prices of a bit, bases from position-free `chunks`."""
    bases = fit_bases(chunks, dtype)
    samples = [to_float32(chunk, dtype)[:, SINK_TOKENS::8] for chunk in chunks]
    allocators = [
        Allocator(np.concatenate([basis.project(sample) for sample in samples])) for basis in bases
    ]
    num_values = sum(len(basis.mean) for basis in bases)
    methods = []
    for target in targets:
        coder = KvtcLike.make(bases, allocators, _price(allocators, target * num_values), dtype)
        methods.append(_kvtc(f"{target:g}", coder))
    return methods


def _price(allocators: Sequence[Allocator], wanted_bits: float) -> float:
    """The price of a bit at which about so many bits a token are spent."""
    low, high = -20.0, 20.0
    for _ in range(24):
        middle = (low + high) / 2
        groups = [group for each in allocators for group in each.choose(2.0**middle)]
        spent = sum(group.bits * (group.stop - group.start) + 32 for group in groups)
        low, high = (middle, high) if spent > wanted_bits else (low, middle)
    return float(2.0**high)


def _kvtc(level: str, coder: KvtcLike) -> Method:
    def raw(is_first: bool) -> int:
        return SINK_TOKENS if is_first else 0

    return Method(
        "kvtc-like",
        level,
        False,
        lambda planes, first: coder.encode(planes, raw_tokens=raw(first)),
        lambda data, _: coder.decode(data),
        lambda planes, first: coder.simulate(planes, raw_tokens=raw(first)),
    )


def exact_methods(dtype: str, codec_ids: Sequence[str], **options: Any) -> list[Method]:
    """The product's lossless codecs, on position-free planes."""
    return [
        of_codec(create_codec(codec_id, dtype=dtype, **options), codec_id, 0, "")
        for codec_id in codec_ids
    ]
