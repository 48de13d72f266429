"""KV pools in fp8 as they are on a GPU.

On a CPU SGLang keeps K and V in fp8 only for its kernels of Intel's AMX, with a scale for each
token and head beside them, and refuses e5m2. On a GPU a pool in fp8 is one of bytes: values are
rounded when they are written, and widened when they are read, which `attention.py` does.
"""

from __future__ import annotations

from typing import Any


class _AsOnGpu:
    """SGLang's platform, which says that it is no CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def allow_narrow_pools() -> None:
    """Lets SGLang make pools in fp8; those two modules ask for nothing else if it is a CPU."""
    from sglang.srt.mem_cache import kv_cache_configurator, kv_cache_dtype

    for module in (kv_cache_configurator, kv_cache_dtype):
        if not isinstance(module.current_platform, _AsOnGpu):
            module.current_platform = _AsOnGpu(module.current_platform)
