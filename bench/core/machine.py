"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "sglang", "numba", "numpy", "xxhash")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel and the versions that matter, as plain values."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "l3_mib": _l3_mib(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _l3_mib() -> float | None:
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text[:-1]) / 1024 if text.endswith("K") else float(text.rstrip("M"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
