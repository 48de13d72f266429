"""Page-locks the arena for CUDA, so that copies between it and the device run asynchronously."""

from __future__ import annotations

import atexit
import logging

import torch

from sglang_ext.tiers.host import HostArena

logger = logging.getLogger(__name__)


def pin_memory(arena: HostArena) -> None:
    """Registers the arena with CUDA; where that fails, copies are slower but right."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(arena.address, arena.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "hier-kv: %d bytes of DRAM could not be page-locked (CUDA error %s); copies will be "
            "slower. Raise the memlock limit or lower --hier-kv-host-size.",
            arena.nbytes,
            error,
        )
        return
    address = arena.address
    atexit.register(lambda: runtime.cudaHostUnregister(address))
