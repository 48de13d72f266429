"""What `run.sh` of a kit does on the machine with the device."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# What the copies and kernels need of the machine; SGLang is not among them.
NEEDED = ("numpy", "torch", "triton", "numba", "llvmlite", "xxhash", "psutil")


def missing() -> list[str]:
    """Says what is there, and returns what is not."""
    lacking = []
    for name in NEEDED:
        try:
            module = importlib.import_module(name)
            print(f"{name} {getattr(module, '__version__', '')}")
        except ImportError as error:
            lacking.append(f"{name} ({error})")
    return lacking


def main() -> int:
    """Returns 0, 1 where a check failed, or 2 where the machine lacks something."""
    started_s = time.monotonic()
    lacking = missing()
    if lacking:
        print("missing: " + ", ".join(lacking))
        return 2
    from bench.core.case import CaseFailedError, Options
    from bench.core.machine import describe_machine
    from bench.core.output import Progress
    from bench.gpu.case import SELFTEST, device_or_none, run
    from bench.gpu.kernels import check_kernels

    device = device_or_none()
    if device is None:
        print(f"missing: a CUDA device, torch sees none ({SELFTEST}=1 tries the kit without one)")
        return 2
    result: dict[str, Any] = {"commit": Path("COMMIT").read_text().strip()}
    try:
        result["kernel_cases"] = check_kernels(device)
        print(f"kernels: {result['kernel_cases']} cases, all bits came back")
        with Progress() as progress:
            report = run(Options(quick=True, progress=progress))
    except CaseFailedError as error:
        print(f"failed: {error}")
        return 1
    for table in report.tables:
        print(table.render())
    print(*report.notes, sep="\n")
    result |= {
        "machine": describe_machine(),
        "results": report.results,
        "samples": report.samples,
        "seconds": time.monotonic() - started_s,
    }
    Path("gpu.json").write_text(json.dumps(result, indent=1))
    print(f"gpu.json written after {result['seconds']:.0f} s")
    print("no server was started: the kit has no SGLang")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
