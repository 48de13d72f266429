"""Page-locks the arena for CUDA, so that copies between it and the device run asynchronously."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.device.ports.cudart import forget_error
from sglang_ext.tiers.host import HostArena

logger = logging.getLogger(__name__)

# The driver is slow at, and may refuse, a large part of the machine's memory in one call.
CHUNK_BYTES = 16 << 30


def pin_memory(
    arena: HostArena,
    runtime: Any,
    chunk_bytes: int = CHUNK_BYTES,
    forget: Callable[[], None] = forget_error,
) -> int:
    """Registers the arena with CUDA; where that fails, copies are slower but right.

    Whole slots at a time: no copy crosses the border of two registrations.

    Args:
        arena: the memory.
        runtime: torch's `cudart`.
        chunk_bytes: most to register in one call; a slot at least.
        forget: takes back CUDA's last error.

    Returns:
        Bytes that are page-locked.
    """
    slots_a_chunk = max(1, chunk_bytes // arena.slot_bytes)
    pinned: list[int] = []
    done = 0
    while done < arena.nbytes:
        size = min(slots_a_chunk * arena.slot_bytes, arena.nbytes - done)
        error = int(runtime.cudaHostRegister(arena.address + done, size, 0))
        if error:
            forget()
            logger.warning(
                "hier-kv: %d of %d bytes of DRAM could not be page-locked (CUDA error %d); copies "
                "will be slower. Raise the memlock limit or lower --hier-kv-host-size.",
                arena.nbytes - done,
                arena.nbytes,
                error,
            )
            break
        pinned.append(arena.address + done)
        done += size
    atexit.register(lambda: [runtime.cudaHostUnregister(address) for address in pinned])
    return done
