"""The coder's inner loops in AVX-512, for numba: a tile of one or of several groups at a time.

LLVM vectorises all of the loops in `cpu.py` but the exchange of words, where each lane's place
depends on the lanes before it. AVX-512 VBMI2 has an instruction for it in either direction, and
this file spells the whole step out in LLVM's language, so that states stay in registers as well.
Several groups at a time hide the latency of the table lookups. `cpu.py` does the same without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

_I1, _I8, _I16 = ir.IntType(1), ir.IntType(8), ir.IntType(16)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi2", "popcnt")
_CURSORS = 3  # words of `cursors` a group takes


def _supported() -> bool:
    # With a CPU given by hand, numba compiles for that one.
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return False
    features = binding.get_host_cpu_features()
    # The names of LLVM's functions, below, are those of opaque pointers.
    return binding.llvm_version_info[0] >= 17 and all(features.get(name) for name in _NEEDED)


SUPPORTED = _supported()


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    # What numba makes of it is called without the typing context.
    return cast("Callable[..., Any]", intrinsic(function))


def _vector(kind: ir.IntType, num: int) -> ir.VectorType:
    return ir.VectorType(kind, num)


def _splat(kind: ir.IntType, num: int, value: int) -> ir.Constant:
    return ir.Constant(_vector(kind, num), [value] * num)


def _call(builder: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    signature = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, args)


def _part(builder: Any, vector: Any, first: int, num: int) -> Any:
    places = ir.Constant(_vector(_I32, num), list(range(first, first + num)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)


def _join(builder: Any, parts: Sequence[Any]) -> Any:
    joined = list(parts)
    while len(joined) > 1:
        places = ir.Constant(
            _vector(_I32, 2 * joined[0].type.count), list(range(2 * joined[0].type.count))
        )
        pairs = zip(joined[::2], joined[1::2], strict=True)
        joined = [builder.shuffle_vector(low, high, places) for low, high in pairs]
    return joined[0]


def _at(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _load(builder: Any, data: Any, index: Any, kind: ir.IntType, num: int) -> Any:
    vector = _vector(kind, num)
    return builder.load(_at(builder, data, index, vector), align=kind.width // 8)


def _store(builder: Any, value: Any, data: Any, index: Any) -> None:
    align = value.type.element.width // 8
    builder.store(value, _at(builder, data, index, value.type), align=align)


def _gather(builder: Any, table: Any, index: Any, kind: ir.IntType) -> Any:
    """Entries `index` (int32 lanes) of a table of 32- or 64-bit words."""
    num = index.type.count
    name = {32: "dpi", 64: "dpq"}[kind.width]
    zero, all_lanes = _splat(kind, num, 0), _splat(_I1, num, 1)
    data = builder.bitcast(table, _I8.as_pointer())
    args = (zero, data, index, all_lanes, _I32(kind.width // 8))
    return _call(builder, f"llvm.x86.avx512.mask.gather.{name}.512", _vector(kind, num), args)


def _count(builder: Any, mask: Any) -> Any:
    return builder.zext(builder.ctpop(builder.bitcast(mask, _I32)), _I64)


@dataclass(frozen=True)
class _Way:
    """One group being coded: its variables on the stack, which LLVM makes registers."""

    state: list[Any]
    at: Any
    end: Any
    base: Any  # of the tile's first symbol
    classes: Any


def _begin(builder: Any, data: Sequence[Any], way: int, num_tokens: Any, kind: ir.IntType) -> _Way:
    cursors, states, classes = data[1], data[2], data[4]
    num = 512 // kind.width
    state = [cgutils.alloca_once(builder, _vector(kind, num)) for _ in range(32 // num)]
    for i, part in enumerate(state):
        loaded = _load(builder, states, _I64(32 * way + num * i), _I32, num)
        builder.store(loaded if kind == _I32 else builder.zext(loaded, _vector(kind, num)), part)
    at, end, tile = (
        builder.load(builder.gep(cursors, [_I64(_CURSORS * way + i)])) for i in range(_CURSORS)
    )
    lanes = builder.mul(tile, _I64(32))
    narrow = _load(builder, classes, lanes, _I16, 32)
    return _Way(
        state,
        cgutils.alloca_once_value(builder, at),
        end,
        builder.mul(lanes, num_tokens),
        builder.zext(narrow, _vector(_I32, 32)),
    )


def _finish(builder: Any, data: Sequence[Any], number: int, way: _Way) -> None:
    cursors, states = data[1], data[2]
    for i, part in enumerate(way.state):
        value = builder.load(part)
        num = value.type.count
        _store(
            builder,
            builder.trunc(value, _vector(_I32, num)) if num < 16 else value,
            states,
            _I64(32 * number + num * i),
        )
    builder.store(builder.load(way.at), builder.gep(cursors, [_I64(_CURSORS * number)]))


def _rows(builder: Any, way: _Way, context: Any, index: Any, bits: int) -> Any:
    """Where the tables of 32 symbols begin."""
    classes = way.classes
    if context is not None:
        added = _load(builder, context, index, _I8, 32)
        classes = builder.add(classes, builder.zext(added, classes.type))
    return builder.shl(classes, _splat(_I32, 32, bits))


def _lookup(builder: Any, x: Any, rows: Any, lut: Any) -> tuple[Any, Any]:
    """Symbols of 16 lanes in state x, and their states with these taken out."""
    slot = builder.and_(x, _splat(_I32, 16, 4095))
    entry = _gather(builder, lut, builder.or_(rows, slot), _I32)
    freq = builder.add(builder.lshr(entry, _splat(_I32, 16, 20)), _splat(_I32, 16, 1))
    bias = builder.and_(builder.lshr(entry, _splat(_I32, 16, 8)), _splat(_I32, 16, 4095))
    scaled = builder.mul(freq, builder.lshr(x, _splat(_I32, 16, 12)))
    return builder.trunc(entry, _vector(_I8, 16)), builder.add(scaled, bias)


def _refill(builder: Any, way: _Way, states: Sequence[Any], low: Sequence[Any], words: Any) -> None:
    """The next word into each lane that is low; reads those words and none beyond."""
    pointer = builder.bitcast(builder.gep(words, [builder.load(way.at)]), _I8.as_pointer())
    args = (pointer, _join(builder, low), _splat(_I16, 32, 0))
    taken = _call(builder, "llvm.masked.expandload.v32i16", _vector(_I16, 32), args)
    wide = builder.zext(taken, _vector(_I32, 32))
    for i, x in enumerate(states):
        upper = builder.shl(x, _splat(_I32, 16, 16))
        filled = builder.or_(upper, _part(builder, wide, 16 * i, 16))
        builder.store(builder.select(low[i], filled, x), way.state[i])


def _decode_token(
    builder: Any, loop: Any, ways: Sequence[_Way], data: Sequence[Any], context: Any, failed: Any
) -> None:
    """One symbol of each lane of each way; leaves the loop if words run out, of way failed - 1."""
    offset = builder.mul(loop.index, _I64(32))
    over, taken = _I1(0), []
    for way in ways:
        index = builder.add(way.base, offset)
        rows = _rows(builder, way, context, index, 12)
        symbols, states = zip(
            *(
                _lookup(builder, builder.load(x), _part(builder, rows, 16 * i, 16), data[3])
                for i, x in enumerate(way.state)
            ),
            strict=True,
        )
        _store(builder, _join(builder, symbols), data[6], index)
        low = [builder.icmp_unsigned("<", x, _splat(_I32, 16, 65536)) for x in states]
        after = builder.add(builder.load(way.at), _count(builder, _join(builder, low)))
        over = builder.or_(over, builder.icmp_unsigned(">", after, way.end))
        taken.append((way, states, low, after))
    with builder.if_then(over, likely=False):
        for number, (way, _, _, after) in reversed(list(enumerate(taken))):
            ran_out = builder.icmp_unsigned(">", after, way.end)
            first = builder.select(ran_out, _I64(number + 1), builder.load(failed))
            builder.store(first, failed)
        loop.do_break()
    for way, states, low, after in taken:
        _refill(builder, way, states, low, data[0])
        builder.store(after, way.at)


def _encode_token(
    builder: Any, token: Any, way: _Way, data: Sequence[Any], context: Any, least: Any
) -> None:
    """Push 32 symbols; `least` becomes the least frequency of each of 8 columns of lanes."""
    index = builder.add(way.base, builder.mul(token, _I64(32)))
    rows = _rows(builder, way, context, index, 8)
    symbols = builder.zext(_load(builder, data[6], index, _I8, 32), rows.type)
    places = builder.or_(rows, symbols)
    words, full, quarters = [], [], []

    def splat(value: int) -> Any:
        return _splat(_I64, 8, value)

    for i, part in enumerate(way.state):
        entry = _gather(builder, data[3], _part(builder, places, 8 * i, 8), _I64)
        x, freq = builder.load(part), builder.and_(entry, splat(8191))
        words.append(builder.trunc(x, _vector(_I16, 8)))
        full.append(builder.icmp_unsigned(">=", builder.lshr(x, splat(20)), freq))
        quarters.append((part, x, freq, entry))
    mask = _join(builder, full)
    count = _count(builder, mask)
    at = builder.sub(builder.load(way.at), count)
    packed = _call(
        builder,
        "llvm.x86.avx512.mask.compress.v32i16",
        _vector(_I16, 32),
        (_join(builder, words), _splat(_I16, 32, 0), mask),
    )
    # Not the instruction that packs into memory, which some CPUs do word by word.
    first = builder.trunc(builder.sub(builder.shl(_I64(1), count), _I64(1)), _I32)
    pointer = builder.bitcast(builder.gep(data[0], [at]), _I8.as_pointer())
    args = (packed, pointer, _I32(2), builder.bitcast(first, _vector(_I1, 32)))
    _call(builder, "llvm.masked.store.v32i16.p0", ir.VoidType(), args)
    builder.store(at, way.at)
    for i, (part, x, freq, entry) in enumerate(quarters):
        x = builder.select(full[i], builder.lshr(x, splat(16)), x)
        increment = builder.and_(builder.lshr(entry, splat(30)), splat(1))
        product = builder.mul(builder.add(x, increment), builder.lshr(entry, splat(32)))
        shift = builder.and_(builder.lshr(entry, splat(25)), splat(31))
        quotient = builder.lshr(builder.lshr(product, splat(32)), shift)
        before = builder.and_(builder.lshr(entry, splat(13)), splat(4095))
        moved = builder.mul(quotient, builder.sub(splat(4096), freq))
        builder.store(builder.add(builder.add(x, moved), before), part)
        smaller = builder.icmp_unsigned("<", freq, builder.load(least))
        builder.store(builder.select(smaller, freq, builder.load(least)), least)


def _coder(encoding: bool, num_ways: int, with_context: bool) -> Callable[..., Any]:
    def typed(
        typingctx: Any,
        words: Any,
        cursors: Any,
        states: Any,
        lut: Any,
        classes: Any,
        context: Any,
        symbols: Any,
        num_tokens: Any,
    ) -> Any:
        arrays = (words, cursors, states, lut, classes, context, symbols)
        table = types.uint64 if encoding else types.uint32
        u8, u16, u32, u64 = types.uint8, types.uint16, types.uint32, types.uint64
        kinds = (u16, u64, u32, table, u16, u8, u8)
        if arrays != tuple(types.Array(kind, 1, "C") for kind in kinds) or num_tokens != u64:
            return None

        def codegen(cgctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            # llvmlite's own `add` knows only attributes without a value.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            data = [
                cgctx.make_array(kind)(cgctx, builder, arg).data
                for kind, arg in zip(arrays, args, strict=False)
            ]
            tokens = args[len(arrays)]
            kind = _I64 if encoding else _I32
            ways = [_begin(builder, data, way, tokens, kind) for way in range(num_ways)]
            contexts = data[5] if with_context else None
            if encoding:
                least = cgutils.alloca_once_value(builder, _splat(_I64, 8, 1))
                with cgutils.for_range(builder, tokens) as loop:
                    token = builder.sub(builder.sub(tokens, _I64(1)), loop.index)
                    for way in ways:
                        _encode_token(builder, token, way, data, contexts, least)
                zero = builder.icmp_unsigned("==", builder.load(least), _splat(_I64, 8, 0))
                bits = builder.bitcast(zero, _I8)
                result = builder.zext(bits, _I64)
            else:
                failed = cgutils.alloca_once_value(builder, _I64(0))
                with cgutils.for_range(builder, tokens) as loop:
                    _decode_token(builder, loop, ways, data, contexts, failed)
                result = builder.load(failed)
            for number, way in enumerate(ways):
                _finish(builder, data, number, way)
            return result

        return types.uint64(*arrays, num_tokens), codegen

    return _intrinsic(typed)


# Each takes `(words, cursors, states, lut, classes, context, symbols, num_tokens)` and codes a tile
# of one group, or of each of four. `cursors` has three words for each group: the index in `words`,
# which moves, where to end (decoding only), and the tile; `states` has 32. What comes back is 0 or,
# decoding, the first group whose words ran out, plus 1; encoding, anything else if a symbol has
# frequency 0.
decode_1, decode_1_context = _coder(False, 1, False), _coder(False, 1, True)
decode_4, decode_4_context = _coder(False, 4, False), _coder(False, 4, True)
encode_1, encode_1_context = _coder(True, 1, False), _coder(True, 1, True)
