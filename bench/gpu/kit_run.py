"""What `run.sh` of a kit does on the machine with the device."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What the kernels and copies need of the machine, and what servers do besides.
NEEDED = ("numpy", "torch", "triton", "numba", "llvmlite", "xxhash", "psutil")
NEEDED_BY_SERVERS = ("transformers", "aiohttp", "requests", "uvloop", "safetensors")
_RESULT = Path("gpu.json")
STAND_INS = Path(__file__).resolve().parent / "stubs"
_PARTS = ("kernels", "copies", "servers")


def missing(names: tuple[str, ...]) -> list[str]:
    """Says what is there, and returns what is not."""
    lacking = []
    for name in names:
        try:
            module = importlib.import_module(name)
            print(f"{name} {getattr(module, '__version__', '')}")
        except ImportError as error:
            lacking.append(f"{name} ({error})")
    return lacking


def put_stand_ins(site: Path) -> None:
    """Puts stand-ins where the machine has not the package itself: not over a real one."""
    for package in sorted(STAND_INS.iterdir()):
        if importlib.util.find_spec(package.name) is None:
            shutil.copytree(package, site / package.name)
            print(f"{package.name}: a stand-in")


def cannot_serve() -> str:
    """Why SGLang's server cannot be imported; empty where it can."""
    lacking = missing(NEEDED_BY_SERVERS)
    if lacking:
        return ", ".join(lacking)
    if importlib.util.find_spec("sglang") is None:
        return "sglang: the kit was packed without wheels"
    done = subprocess.run(
        [sys.executable, "-c", "import sglang.srt.entrypoints.http_server"],
        env={**os.environ, "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def main() -> int:
    """Returns 0, 1 where a part failed, or 2 where the machine lacks something."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    flags = parser.parse_args()
    lacking = missing(NEEDED)
    if lacking:
        print("missing: " + ", ".join(lacking))
        return 2
    from bench.core.machine import describe_machine
    from bench.gpu.case import SELFTEST, device_or_none

    device = device_or_none()
    if device is None:
        print(f"missing: a CUDA device, torch sees none ({SELFTEST}=1 tries the kit without one)")
        return 2
    site = Path("site").resolve()
    if site.is_dir():
        put_stand_ins(site)
    result: dict[str, Any] = {
        "commit": Path("COMMIT").read_text().strip(),
        "machine": describe_machine(),
    }
    failed = False
    for part in _PARTS:
        if part in flags.parts:
            failed |= not _run_part(part, device, flags.quick, result)
            _RESULT.write_text(json.dumps(result, indent=1))  # whatever becomes of the next part
    print(f"{_RESULT} written")
    return int(failed)


def _run_part(part: str, device: Any, quick: bool, result: dict[str, Any]) -> bool:
    """Runs one part and adds what it found; returns whether it went well."""
    started_s = time.monotonic()
    print(f"== {part}", flush=True)
    try:
        result[part] = _OF_PART[part](device, quick)
    except Exception as error:  # of any kind: what the other parts find is worth having
        result[part] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"failed: {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        print(f"== {part}: {time.monotonic() - started_s:.0f} s", flush=True)
    return True


def _kernels(device: Any, quick: bool) -> dict[str, Any]:
    from bench.gpu.kernels import check_kernels

    number = check_kernels(device)
    print(f"{number} cases, all bits came back")
    return {"cases": number}


def _copies(device: Any, quick: bool) -> dict[str, Any]:
    from bench.gpu.case import measure_copies

    return _reported(measure_copies, device, quick)


def _servers(device: Any, quick: bool) -> dict[str, Any]:
    why_not = cannot_serve()
    if why_not:
        raise RuntimeError(f"missing for servers: {why_not}")
    from bench.gpu.case import measure_servers

    return _reported(measure_servers, device, quick)


def _reported(measure: Callable[..., Any], device: Any, quick: bool) -> dict[str, Any]:
    from bench.core.case import Options
    from bench.core.output import Progress

    with Progress() as progress:
        report = measure(Options(quick=quick, progress=progress), device)
    for table in report.tables:
        print(table.render())
    print(*report.notes, sep="\n")
    return {"results": report.results, "samples": report.samples}


_OF_PART: dict[str, Callable[[Any, bool], dict[str, Any]]] = {
    "kernels": _kernels,
    "copies": _copies,
    "servers": _servers,
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
