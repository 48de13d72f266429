"""Modules of the stand-in for `sgl_kernel`, without putting it on this process's path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from runtime_cpu import launch


def load_stub(name: str) -> ModuleType:
    """The module of that name."""
    full_name = f"cpu_{name}"
    if full_name not in sys.modules:
        path = Path(launch.STUBS) / "sgl_kernel" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]
