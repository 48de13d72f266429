"""xxh3_64 of many byte ranges in one call that lets go of the GIL once.

Threads that take the checksums of small records one by one spend more time on handing the GIL to
each other than on hashing. So the records of a run are hashed together, by the C function of the
package `xxhash`, which is called through its address.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from sglang_ext.tiers.compiled import compiled_for
from sglang_ext.tiers.records.record import ByteArray

# Names of the C function. The first, which picks the fastest instructions of the machine, is not
# in the package's builds for all platforms.
_SYMBOLS = ("XXH3_64bits_dispatch", "XXH3_64bits")
_I64 = ir.IntType(64)


def digests(arrays: Sequence[ByteArray]) -> list[int]:
    """Returns the xxh3_64 of each array; the GIL is free while several are hashed.

    Args:
        arrays: u8 [n], contiguous.

    Raises:
        ValueError: an array is of another kind.
    """
    if _FUNCTION == 0 or len(arrays) == 1:
        return [int(xxhash.xxh3_64_intdigest(_checked(array).data)) for array in arrays]
    addresses = [_checked(array).__array_interface__["data"][0] for array in arrays]
    found = np.empty(len(arrays), np.uint64)
    lengths = np.array([array.size for array in arrays], np.uint64)
    _digest_all(_FUNCTION, np.array(addresses, np.uint64), lengths, found)
    return found.tolist()


def is_plain(array: object) -> TypeGuard[ByteArray]:
    """Whether `digests` takes an array: contiguous, u8, one axis."""
    return (
        isinstance(array, np.ndarray)
        and array.dtype == np.uint8
        and array.ndim == 1
        and bool(array.flags.c_contiguous)
    )


def _checked(array: ByteArray) -> ByteArray:
    if not is_plain(array):
        raise ValueError("a checksum is taken of contiguous u8 [n] arrays")
    return array


def _find_function() -> int:
    """The address of the C function; 0 where the package's library does not export it."""
    try:
        library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    except (AttributeError, ImportError, OSError):
        return 0
    for symbol in _SYMBOLS:
        function = getattr(library, symbol, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _call(typingctx: Any, function: Any, data: Any, size: Any) -> Any:
    """Compiles the call `function(data, size)`; `function` and `data` are addresses.

    The function's address is an argument, not a constant of the compiled code: it differs from
    process to process, and the code is kept on disk.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(_I64, (pointer, _I64)).as_pointer()
        called = builder.inttoptr(args[0], kind)
        return builder.call(called, (builder.inttoptr(args[1], pointer), args[2]))

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


_call_hash = cast("Callable[..., Any]", intrinsic(_call))


_ARRAY = types.uint64[::1]


@compiled_for(types.void(types.uint64, _ARRAY, _ARRAY, _ARRAY))
def _digest_all(
    function: int,
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint64],
) -> None:
    for at in range(len(out)):
        out[at] = _call_hash(function, addresses[at], sizes[at])


def _proven(function: int) -> int:
    """The address, if what it points to gives a sample's xxh3_64; else 0."""
    sample = np.arange(1021, dtype=np.uint32).view(np.uint8)
    found = np.zeros(1, np.uint64)
    sizes = np.array([sample.size], np.uint64)
    if function:
        address = sample.__array_interface__["data"][0]
        _digest_all(function, np.array([address], np.uint64), sizes, found)
    return function if int(found[0]) == xxhash.xxh3_64_intdigest(sample.data) else 0


_FUNCTION = _proven(_find_function())
