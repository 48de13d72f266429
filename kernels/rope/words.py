"""Values of the KV dtype as machine words, for numba, which knows no bfloat16.

A pool's dtype is told by the integer type of its words: bf16 = uint16, fp16 = int16 (so that the
two 16-bit formats are two types to numba), fp32 = uint32.  Every function is one intrinsic, so that
the arithmetic stays in 32 bits (numba widens int32 + int32) and loops over it vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from sglang_ext.compiling import jit as kept_jit

_F = TypeVar("_F", bound=Callable[..., Any])
_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BF16, _FP16, _FP32 = types.uint16, types.int16, types.uint32
_CANONICAL_NAN = {_BF16: 0x7FC0, _FP16: 0x7E00, _FP32: 0x7FC00000}


def jit(**options: Any) -> Callable[[_F], _F]:
    """`numba.njit` with this package's settings: frees the GIL, cached, no exceptions on 0/0.

    Never `fastmath`: a contracted or reassociated operation would change stored bits.
    """
    return kept_jit(**{"nogil": True, "error_model": "numpy", **options})


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    # What numba makes of it is called without the typing context.
    return cast("Callable[..., Any]", intrinsic(function))


def _widths(kind: Any) -> tuple[ir.IntType, ir.IntType]:
    """The integer types of a word and of two."""
    return (_I32, _I64) if kind == _FP32 else (_I16, _I32)


def _is_word(kind: Any) -> bool:
    return kind in _CANONICAL_NAN


def _decode(builder: Any, kind: Any, word: Any) -> Any:
    if kind == _BF16:
        return builder.bitcast(builder.shl(builder.zext(word, _I32), _I32(16)), _F32)
    if kind == _FP16:
        return builder.fpext(builder.bitcast(word, ir.HalfType()), _F32)
    return builder.bitcast(word, _F32)


def _round_bf16(builder: Any, value: Any) -> Any:
    """The fp32 bits of `value` rounded to bf16: half a step up, and back to even from a tie."""
    up = builder.add(builder.bitcast(value, _I32), _I32(0x8000))
    tie = builder.icmp_unsigned("==", builder.and_(up, _I32(0xFFFF)), _I32(0))
    return builder.and_(up, builder.select(tie, _I32(0xFFFE0000), _I32(0xFFFF0000)))


def _encode(builder: Any, kind: Any, value: Any) -> Any:
    if kind == _BF16:
        return builder.trunc(builder.lshr(_round_bf16(builder, value), _I32(16)), _I16)
    if kind == _FP16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), _I16)
    return builder.bitcast(value, _I32)


@_intrinsic
def decode(typingctx: Any, word: Any) -> Any:
    """The fp32 value of a word."""
    if not _is_word(word):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _decode(builder, word, args[0])

    return types.float32(word), codegen


@_intrinsic
def nearest(typingctx: Any, value: Any, like: Any) -> Any:
    """`value` (fp32) rounded to the grid of `like`'s dtype, ties to even, still fp32.

    A NaN stays a NaN: those that arise here have zero low halves, so the carry cannot run over.
    """
    if value != types.float32 or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == _BF16:
            return builder.bitcast(_round_bf16(builder, args[0]), _F32)
        return _decode(builder, like, _encode(builder, like, args[0]))

    return types.float32(value, like), codegen


@_intrinsic
def near(typingctx: Any, value: Any, like: Any) -> Any:
    """As `nearest`, but for bf16 ties go away from zero, which costs half as much."""
    if value != types.float32 or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == _BF16:
            up = builder.add(builder.bitcast(args[0], _I32), _I32(0x8000))
            return builder.bitcast(builder.and_(up, _I32(0xFFFF0000)), _F32)
        return _decode(builder, like, _encode(builder, like, args[0]))

    return types.float32(value, like), codegen


@_intrinsic
def rounds_to(typingctx: Any, value: Any, target: Any, like: Any) -> Any:
    """Whether `value` rounds to `target`, both fp32, the latter on the grid and not NaN.

    For bf16 without rounding: the values that do are an interval around `target`, also counted in
    bits, and open at both ends, half a grid step away, where the word is odd.
    """
    if (value, target) != (types.float32, types.float32) or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == _BF16:
            bits, wanted = (builder.bitcast(arg, _I32) for arg in args[:2])
            odd = builder.and_(builder.lshr(wanted, _I32(16)), _I32(1))
            reach = builder.sub(_I32(0x8000), odd)
            low = builder.sub(wanted, reach)
            return builder.icmp_unsigned("<=", builder.sub(bits, low), builder.add(reach, reach))
        word = _encode(builder, like, args[0])
        return builder.icmp_unsigned("==", word, _encode(builder, like, args[1]))

    return types.boolean(value, target, like), codegen


@_intrinsic
def beside(typingctx: Any, value: Any, towards: Any, like: Any) -> Any:
    """The grid point next to `value` in the direction of the sign of `towards`, all fp32.

    From a zero, inwards, there is none: what comes then is a NaN.  (`step` knows better and costs
    twice as much.)
    """
    if (value, towards) != (types.float32, types.float32) or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, sign = (builder.bitcast(arg, _I32) for arg in args[:2])
        opposed = builder.and_(builder.xor(bits, sign), _I32(0x80000000))
        if like == _FP16:
            word = builder.zext(_encode(builder, like, args[0]), _I32)
            back = builder.lshr(opposed, _I32(30))
            moved = builder.sub(builder.add(word, _I32(1)), back)
            return _decode(builder, like, builder.trunc(moved, _I16))
        one, shift = (0x10000, 14) if like == _BF16 else (1, 30)
        back = builder.lshr(opposed, _I32(shift))
        return builder.bitcast(builder.sub(builder.add(bits, _I32(one)), back), _F32)

    return types.float32(value, towards, like), codegen


@_intrinsic
def encode(typingctx: Any, value: Any, like: Any) -> Any:
    """The word nearest to `value` (fp32), ties to even; every NaN becomes the one quiet NaN."""
    if value != types.float32 or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _encode(builder, like, args[0])
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, ir.Constant(word.type, _CANONICAL_NAN[like]), word)

    return like(value, like), codegen


@_intrinsic
def pack(typingctx: Any, value: Any, like: Any) -> Any:
    """The word of an fp32 value that lies on the grid already."""
    if value != types.float32 or not _is_word(like):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like != _BF16:
            return _encode(builder, like, args[0])
        return builder.trunc(builder.lshr(builder.bitcast(args[0], _I32), _I32(16)), _I16)

    return like(value, like), codegen


@_intrinsic
def same(typingctx: Any, a: Any, b: Any) -> Any:
    """Whether two fp32 values have the same bits."""
    if (a, b) != (types.float32, types.float32):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = (builder.bitcast(value, _I32) for value in args)
        return builder.icmp_unsigned("==", first, second)

    return types.boolean(a, b), codegen


@_intrinsic
def step(typingctx: Any, word: Any, places: Any) -> Any:
    """The word `places` (int32) grid points further along the number line; -0 lies below +0."""
    if not _is_word(word) or places != types.int32:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = word != _FP32
        magnitude = _I32(0x7FFF if narrow else 0x7FFFFFFF)

        def mirror(bits: Any) -> Any:
            # Sign and magnitude to two's complement; it is its own inverse.
            return builder.xor(bits, builder.and_(builder.ashr(bits, _I32(31)), magnitude))

        key = mirror(builder.sext(args[0], _I32) if narrow else args[0])
        moved = mirror(builder.add(key, args[1]))
        return builder.trunc(moved, _I16) if narrow else moved

    return word(word, places), codegen


@_intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` in fp32 with one rounding."""
    if (a, b, c) != (types.float32,) * 3:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(a, b, c), codegen


@_intrinsic
def wide(typingctx: Any, value: Any, like: Any) -> Any:
    """`value` (fp32) in the precision un-rotation needs: fp64 for fp32 words, else as it is."""
    if value != types.float32 or not _is_word(like):
        return None
    to_double = like == _FP32

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(args[0], ir.DoubleType()) if to_double else args[0]

    return (types.float64 if to_double else types.float32)(value, like), codegen


# What a row loop writes overlaps neither what it reads nor what it writes elsewhere. LLVM learns it
# from scopes (language reference, "noalias"), and leaves out the comparisons of all addresses that
# would come before every loop: there are two loops a head, each of a few vectors.
_SCOPES = ("out1", "out2", "marks")


def _scopes(builder: Any, names: tuple[str, ...]) -> Any:
    module = builder.module
    domain = module.add_metadata(["sglang_ext.kernels.rope rows"])
    return module.add_metadata([module.add_metadata([name, domain]) for name in names])


def _set_scope(builder: Any, store: Any, scope: str) -> None:
    store.set_metadata("alias.scope", _scopes(builder, (scope,)))
    others = tuple(name for name in _SCOPES if name != scope)
    store.set_metadata("noalias", _scopes(builder, others))


@_intrinsic
def load_pair(typingctx: Any, words: Any, index: Any) -> Any:
    """Words `index` and `index + 1` in one load, which vectorises; two strided ones do not."""
    kind = getattr(words, "dtype", None)
    if words != types.Array(kind, 1, "C") or not _is_word(kind) or index != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(words)(context, builder, args[0])
        narrow, wide = _widths(kind)
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), wide.as_pointer())
        both = builder.load(pointer, align=narrow.width // 8)
        both.set_metadata("noalias", _scopes(builder, _SCOPES))
        first = builder.trunc(both, narrow)
        second = builder.trunc(builder.lshr(both, wide(narrow.width)), narrow)
        return context.make_tuple(builder, signature.return_type, (first, second))

    return types.UniTuple(kind, 2)(words, index), codegen


@_intrinsic
def store_pair(typingctx: Any, words: Any, index: Any, first: Any, second: Any) -> Any:
    """Set words `index` and `index + 1` in one store."""
    kind = getattr(words, "dtype", None)
    if words != types.Array(kind, 1, "C") or not _is_word(kind) or index != types.uint64:
        return None
    if (first, second) != (kind, kind):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(words)(context, builder, args[0])
        narrow, wide = _widths(kind)
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), wide.as_pointer())
        low, high = (builder.zext(arg, wide) for arg in args[2:])
        both = builder.or_(low, builder.shl(high, wide(narrow.width)))
        store = builder.store(both, pointer, align=narrow.width // 8)
        _set_scope(builder, store, _SCOPES[0])
        return context.get_dummy_value()

    return types.none(words, index, first, second), codegen


@_intrinsic
def fetch(typingctx: Any, array: Any, index: Any) -> Any:
    """`array[index]`, of which a row loop writes nothing."""
    if not isinstance(array, types.Array) or array.ndim != 1 or index != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        value = builder.load(builder.gep(data, [args[1]]), align=array.dtype.bitwidth // 8)
        value.set_metadata("noalias", _scopes(builder, _SCOPES))
        return value

    return array.dtype(array, index), codegen


def _put(scope: str) -> Any:
    def put(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
        """Sets `array[index]`, which the row loop neither reads nor writes elsewhere."""
        if not isinstance(array, types.Array) or array.ndim != 1 or index != types.uint64:
            return None
        if value != array.dtype:
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(array)(context, builder, args[0]).data
            pointer = builder.gep(data, [args[1]])
            store = builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
            _set_scope(builder, store, scope)
            return context.get_dummy_value()

        return types.none(array, index, value), codegen

    return _intrinsic(put)


put_first, put_second, put_mark = (_put(scope) for scope in _SCOPES)


@_intrinsic
def mark_bits(typingctx: Any, marks: Any, start: Any) -> Any:
    """The 64 marks (uint8, 0 or not) from index `start` on as the bits of a uint64."""
    if marks != types.Array(types.uint8, 1, "C") or start != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(marks)(context, builder, args[0])
        vector = ir.VectorType(ir.IntType(8), 64)
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), vector.as_pointer())
        loaded = builder.load(pointer, align=1)
        zero = ir.Constant(vector, [0] * 64)
        return builder.bitcast(builder.icmp_unsigned("!=", loaded, zero), _I64)

    return types.uint64(marks, start), codegen


@_intrinsic
def trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Index of the lowest set bit of a uint64 that is not 0."""
    if value != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(value), codegen


@_intrinsic
def on_a_line(typingctx: Any, words: Any, index: Any) -> Any:
    """Whether word `index` of an array lies at the start of a cache line of 64 bytes."""
    if not isinstance(words, types.Array) or words.ndim != 1 or index != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(words)(context, builder, args[0])
        address = builder.ptrtoint(builder.gep(array.data, [args[1]]), _I64)
        return builder.icmp_unsigned("==", builder.and_(address, _I64(63)), _I64(0))

    return types.boolean(words, index), codegen


@_intrinsic
def stream_line(typingctx: Any, source: Any, a: Any, out: Any, b: Any) -> Any:
    """Copy 64 bytes to the line that word `b` of `out` begins, past the caches.

    A line that is written whole and not read soon need not be fetched first. Ends with `fence`.
    """
    if getattr(source, "dtype", 0) != getattr(out, "dtype", 1) or (a, b) != (types.uint64,) * 2:
        return None
    itemsize = out.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(_I64, 8)
        pointers = []
        for kind, array, index in ((source, args[0], args[1]), (out, args[2], args[3])):
            data = context.make_array(kind)(context, builder, array).data
            pointers.append(builder.bitcast(builder.gep(data, [index]), line.as_pointer()))
        store = builder.store(builder.load(pointers[0], align=itemsize), pointers[1], align=64)
        hint = builder.module.add_metadata([ir.Constant(_I32, 1)])
        store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.none(source, a, out, b), codegen


@_intrinsic
def fence(typingctx: Any) -> Any:
    """Make streamed lines visible before anything this thread writes later."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@_intrinsic
def use_wide_vectors(typingctx: Any) -> Any:
    """Let the calling function use 512-bit vectors; without them it makes no difference.

    LLVM prefers 256 bits on most AVX-512 machines, fearing a lower clock; the row loops here gain
    about half again from the full width.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite's own `add` knows only attributes without a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen
