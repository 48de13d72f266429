"""Values of a dtype as machine words, and integer dot products, as LLVM code for numba.

numba knows no bfloat16 or float8, and widens int32 + int32 to int64; these intrinsics do not.  The
type of a word tells the dtype: bf16 = uint16, fp16 = int16, fp32 = uint32, fp8_e4m3 = uint8,
fp8_e5m2 = int8, so that the kernels of each are their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sglang_ext.compiling import jit as kept_jit

_F = TypeVar("_F", bound=Callable[..., Any])
_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_F32 = ir.FloatType()
_BF16, _FP16, _FP32, _E4M3, _E5M2 = (
    types.uint16, types.int16, types.uint32, types.uint8, types.int8
)  # fmt: skip
# fp32 bits of the largest finite value
_MAX_FINITE = {
    _BF16: 0x7F7F0000, _FP16: 0x477FE000, _FP32: 0x7F7FFFFF, _E4M3: 0x43E00000, _E5M2: 0x47600000
}  # fmt: skip
# fp8: mantissa bits and exponent bias
_SMALL = {_E4M3: (3, 7), _E5M2: (2, 15)}

# The numpy type by which the kernels know a dtype.
KERNEL_WORDS: dict[str, type] = {
    "bf16": np.uint16,
    "fp16": np.int16,
    "fp32": np.uint32,
    "fp8_e4m3": np.uint8,
    "fp8_e5m2": np.int8,
}
ROWS = 8  # rows of `dot_rows`
COLUMNS = 32  # its columns
OFF_GRID = -(1 << 31)


def jit(**options: Any) -> Callable[[_F], _F]:
    """`numba.njit` with this package's settings: frees the GIL, cached, no exceptions on 0/0.

    Never `fastmath`: a contracted or reassociated operation would change decoded bits.
    """
    return kept_jit(**{"nogil": True, "error_model": "numpy", **options})


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    # What numba makes of it is called without the typing context.
    return cast("Callable[..., Any]", intrinsic(function))


def _constant_fp32(bits: int) -> Any:
    return ir.Constant(_I32, bits).bitcast(_F32)


def _decode_fp8(builder: Any, kind: Any, word: Any) -> Any:
    mantissa_bits, bias = _SMALL[kind]
    bits = builder.zext(word, _I32)
    magnitude = builder.shl(builder.and_(bits, _I32(0x7F)), _I32(23 - mantissa_bits))
    # Subnormals too: the exponent of fp32 is raised by a multiplication, which is exact.
    raised = builder.fmul(builder.bitcast(magnitude, _F32), _constant_fp32((254 - bias) << 23))
    # Exponent 31 of e5m2 and the word 0x7F of e4m3 are no finite values.
    if kind == _E5M2:
        special = builder.icmp_unsigned(">=", magnitude, _I32(31 << 23))
        mantissa = builder.and_(magnitude, _I32(0x7FFFFF))
        bits_special = builder.or_(mantissa, _I32(0x7F800000))
    else:
        special = builder.icmp_unsigned("==", magnitude, _I32(0x7F << 20))
        bits_special = _I32(0x7FC00000)
    value = builder.select(special, bits_special, builder.bitcast(raised, _I32))
    sign = builder.shl(builder.and_(bits, _I32(0x80)), _I32(24))
    return builder.bitcast(builder.or_(value, sign), _F32)


@_intrinsic
def decode(typingctx: Any, word: Any) -> Any:
    """The fp32 value of a word."""
    if word not in _MAX_FINITE:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if word == _BF16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)
        if word == _FP16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)
        if word == _FP32:
            return builder.bitcast(args[0], _F32)
        return _decode_fp8(builder, word, args[0])

    return types.float32(word), codegen


def _encode_magnitude(builder: Any, kind: Any, magnitude: Any) -> Any:
    """Bits of a finite magnitude in range, as i32, from its fp32 bits."""
    if kind == _FP32:
        return magnitude
    if kind == _FP16:
        half = builder.fptrunc(builder.bitcast(magnitude, _F32), ir.HalfType())
        return builder.zext(builder.bitcast(half, _I16), _I32)
    shift = 16 if kind == _BF16 else 23 - _SMALL[kind][0]
    odd = builder.and_(builder.lshr(magnitude, _I32(shift)), _I32(1))
    up = builder.add(builder.add(magnitude, _I32((1 << (shift - 1)) - 1)), odd)
    rounded = builder.lshr(up, _I32(shift))
    if kind == _BF16:
        return rounded
    mantissa_bits, bias = _SMALL[kind]
    normal = builder.sub(rounded, _I32((127 - bias) << mantissa_bits))
    # Below the normal numbers: adding a value whose last place is the grid rounds to it.
    magic = (127 + 23 + 1 - bias - mantissa_bits) << 23
    total = builder.fadd(builder.bitcast(magnitude, _F32), _constant_fp32(magic))
    subnormal = builder.sub(builder.bitcast(total, _I32), _I32(magic))
    is_normal = builder.icmp_unsigned(">=", magnitude, _I32((128 - bias) << 23))
    return builder.select(is_normal, normal, subnormal)


@_intrinsic
def encode(typingctx: Any, value: Any, like: Any) -> Any:
    """The word nearest to `value` (fp32, not NaN), ties to even, saturating."""
    if value != types.float32 or like not in _MAX_FINITE:
        return None
    width = like.bitwidth

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
        limit = _I32(_MAX_FINITE[like])
        over = builder.icmp_unsigned(">", magnitude, limit)
        magnitude = _encode_magnitude(builder, like, builder.select(over, limit, magnitude))
        sign = builder.and_(bits, _I32(0x80000000))
        word = builder.or_(magnitude, builder.lshr(sign, _I32(32 - width)))
        return word if width == 32 else builder.trunc(word, ir.IntType(width))

    return like(value, like), codegen


@_intrinsic
def to_grid(typingctx: Any, value: Any) -> Any:
    """`value` (fp32) rounded to an integer, ties to even; `OFF_GRID` if it is not in +-32767."""
    if value != types.float32:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        module, kind = builder.module, ir.FunctionType(_F32, [_F32])
        rint = cgutils.get_or_insert_function(module, kind, "llvm.rint.f32")
        fabs = cgutils.get_or_insert_function(module, kind, "llvm.fabs.f32")
        rounded = builder.call(rint, [args[0]])
        limit = ir.Constant(_F32, 32767.0)
        inside = builder.fcmp_ordered("<=", builder.call(fabs, [rounded]), limit)
        safe = builder.select(inside, rounded, ir.Constant(_F32, 0.0))
        return builder.select(inside, builder.fptosi(safe, _I32), _I32(OFF_GRID))

    return types.int32(value), codegen


def _features(context: Any) -> frozenset[str]:
    """What the processor that numba compiles for can do, as LLVM names it."""
    names = context.codegen().magic_tuple()[2].split(",")
    return frozenset(name[1:] for name in names if name.startswith("+"))


def _spread_pair(builder: Any, at: Any, width: int) -> Any:
    """The two int16 at a pointer, `width` times over."""
    ints = ir.VectorType(_I32, width)
    pair = builder.load(builder.bitcast(at, _I32.as_pointer()), align=2)
    undefined = ir.Constant(ints, ir.Undefined)
    first = builder.insert_element(undefined, pair, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ints, [0] * width))


def _pair_products(builder: Any, a: Any, b: Any) -> Any:
    """Sums of two products of neighbouring int16 each, i32, from vectors of i32."""
    width = a.type.count
    shorts = ir.VectorType(_I16, 2 * width)
    name = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}.get(width)
    if name is not None:  # with the addition after it, LLVM makes it vpdpwssd where there is that
        kind = ir.FunctionType(a.type, [shorts, shorts])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [builder.bitcast(v, shorts) for v in (a, b)])
    low, high = [], []
    for v in (a, b):
        sixteen = ir.Constant(v.type, [16] * width)
        low.append(builder.ashr(builder.shl(v, sixteen), sixteen))
        high.append(builder.ashr(v, sixteen))
    return builder.add(builder.mul(*low), builder.mul(*high))


def _dot_shape(features: frozenset[str]) -> tuple[int, int]:
    """Lanes of a vector of sums, and rows that share the registers: two thirds of them are sums."""
    if "avx512bw" in features:
        return 16, 8
    if "avx2" in features:
        return 8, 2
    return 4, 2


def _dot_group(
    builder: Any,
    features: frozenset[str],
    rows: list[Any],
    columns: Any,
    num_pairs: Any,
    out: list[Any],
) -> None:
    """Dot products of some rows with 32 columns; both lists are pointers."""
    width, _ = _dot_shape(features)
    sums = ir.VectorType(_I32, width)
    num_vectors = COLUMNS // width
    zero = ir.Constant(sums, [0] * width)
    accumulators = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(num_vectors)] for _ in rows
    ]
    with cgutils.for_range(builder, num_pairs) as loop:
        base = builder.gep(columns, [builder.mul(loop.index, _I64(2 * COLUMNS))])
        right = []
        for v in range(num_vectors):
            at = builder.gep(base, [_I64(2 * width * v)])
            right.append(builder.load(builder.bitcast(at, sums.as_pointer()), align=2))
        for row, accumulator in zip(rows, accumulators, strict=True):
            at = builder.gep(row, [builder.mul(loop.index, _I64(2))])
            left = _spread_pair(builder, at, width)
            for v in range(num_vectors):
                products = _pair_products(builder, left, right[v])
                builder.store(builder.add(builder.load(accumulator[v]), products), accumulator[v])
    for target, accumulator in zip(out, accumulators, strict=True):
        for v in range(num_vectors):
            at = builder.gep(target, [_I64(width * v)])
            total = builder.load(accumulator[v])
            builder.store(total, builder.bitcast(at, sums.as_pointer()), align=4)


@_intrinsic
def dot_rows(
    typingctx: Any,
    rows: Any,
    first: Any,
    stride: Any,
    columns: Any,
    panel: Any,
    num_pairs: Any,
    out: Any,
    at: Any,
) -> Any:
    """`out[at + 32 i + c] = sum_k rows[first + stride i + k] * panel(k, c)`, modulo 2^32.

    For 8 rows i, 32 columns c and `2 * num_pairs` terms.  A panel lies at `columns[panel]` with two
    terms of a column side by side: `[num_pairs, 32, 2]`.

    `rows` and `columns` are int16, `out` is int32, all flat; the others are uint64.
    """
    shorts, ints = types.Array(types.int16, 1, "C"), types.Array(types.int32, 1, "C")
    if (rows, columns, out) != (shorts, shorts, ints):
        return None
    if {first, stride, panel, num_pairs, at} != {types.uint64}:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, begin, step, matrix, start, count, target, offset = args

        def pointer(kind: Any, array: Any, index: Any) -> Any:
            return builder.gep(context.make_array(kind)(context, builder, array).data, [index])

        features = _features(context)
        group = _dot_shape(features)[1]
        right = pointer(shorts, matrix, start)
        for base in range(0, ROWS, group):
            left, results = [], []
            for i in range(base, base + group):
                index = builder.add(begin, builder.mul(step, _I64(i)))
                left.append(pointer(shorts, source, index))
                results.append(pointer(ints, target, builder.add(offset, _I64(32 * i))))
            _dot_group(builder, features, left, right, count, results)
        return context.get_dummy_value()

    return types.none(rows, first, stride, columns, panel, num_pairs, out, at), codegen


@_intrinsic
def use_wide_vectors(typingctx: Any) -> Any:
    """Let the calling function use 512-bit vectors; without them it makes no difference."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite's own `add` knows only attributes without a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen
