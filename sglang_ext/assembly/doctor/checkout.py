"""In a checkout made for a machine without a GPU SGLang is imported with stand-ins."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import sglang_ext

# Of a checkout alone; `runtime_cpu/launch.py` puts it on the path of servers, with this variable.
_STAND_INS = Path(sglang_ext.__file__).resolve().parents[1] / "runtime_cpu" / "stubs"
_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def use_stand_ins() -> None:
    """Lets SGLang be imported here as its servers there do; nothing where it can be without."""
    if find_spec("torchvision") is None and _STAND_INS.is_dir():
        sys.path.insert(0, str(_STAND_INS))
        os.environ.setdefault(_CPU_ENGINE, "1")
