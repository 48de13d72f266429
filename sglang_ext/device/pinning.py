"""Page-locks the arena for CUDA, so that copies between it and the device run asynchronously."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.device.ports import numa
from sglang_ext.device.ports.cudart import forget_error
from sglang_ext.tiers.anonymous_memory import keep_from_children
from sglang_ext.tiers.host import HostArena

logger = logging.getLogger(__name__)

# The driver is slow at, and may refuse, a large part of the machine's memory in one call.
CHUNK_BYTES = 16 << 30


def place_near(arena: HostArena, gpu: Any) -> None:
    """Has the arena lie in the memory nearest to a GPU, on a machine with several NUMA nodes.

    To be called before `pin_memory`, after which no page moves. Memory of another rank's is left
    to that one: it has one place, whoever maps it.

    Args:
        arena: the memory.
        gpu: its properties, as torch has them.
    """
    if arena.is_borrowed:
        return
    places: list[Any] = [
        getattr(gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    ]
    if None in places:  # of a torch that does not say; copies are right wherever DRAM lies
        logger.info("hier-kv: torch does not say where the GPU is: DRAM lies on any NUMA node")
        return
    address = numa.pci_address(*places)
    node = numa.node_near(address)
    if node is None:
        return
    if problem := numa.prefer_node(arena.address, arena.nbytes, node):
        logger.warning(
            "hier-kv: DRAM is not placed on NUMA node %d, which is nearest to the GPU at %s, as "
            "%s; copies may cross nodes.", node, address, problem,
        )  # fmt: skip
    else:
        logger.info(
            "hier-kv: DRAM lies on NUMA node %d, nearest to the GPU at %s, as far as it has room",
            node, address,
        )  # fmt: skip


def pin_memory(
    arena: HostArena,
    runtime: Any,
    chunk_bytes: int = CHUNK_BYTES,
    forget: Callable[[], None] = forget_error,
) -> int:
    """Registers the arena with CUDA; where that fails, copies are slower but right.

    Whole slots at a time: no copy crosses the border of two registrations. They end before the
    arena's memory does, or with the process. Processes that are forked have none of it.

    Args:
        arena: the memory.
        runtime: torch's `cudart`.
        chunk_bytes: most to register in one call; a slot at least.
        forget: takes back CUDA's last error.

    Returns:
        Bytes that are page-locked.
    """
    keep_from_children(arena.address, arena.nbytes)
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

    def unpin() -> None:
        atexit.unregister(unpin)
        while pinned:
            runtime.cudaHostUnregister(pinned.pop())

    arena.before_unmap(unpin)
    atexit.register(unpin)
    return done
