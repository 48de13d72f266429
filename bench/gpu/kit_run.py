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
from dataclasses import dataclass
from functools import partial
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
        except Exception as error:  # of any kind: a library that does not load is an OSError
            lacking.append(f"{name} ({type(error).__name__}: {error})")
    return lacking


def put_stand_ins(site: Path) -> None:
    """Puts stand-ins where the machine has not the package itself: not over a real one."""
    for package in sorted(STAND_INS.iterdir()):
        if importlib.util.find_spec(package.name) is None:
            shutil.copytree(package, site / package.name, dirs_exist_ok=True)
            print(f"{package.name}: a stand-in")


def cannot_serve(lacking: list[str]) -> str:
    """Why SGLang's server cannot be imported; empty where it can."""
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


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 where a part failed, or 2 where the machine lacks something."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="what would take longer than that is left out"
    )
    flags = parser.parse_args(argv)
    began_s = time.monotonic()
    lacking, lacking_servers = missing(NEEDED), missing(NEEDED_BY_SERVERS)
    for who, names in (("", lacking), (" for servers", lacking_servers)):
        if names:
            print(f"missing{who}: " + ", ".join(names), flush=True)
    device = None
    if not lacking:
        from bench.gpu.case import SELFTEST, device_or_none

        device = device_or_none()
        if device is None:
            hint = f"{SELFTEST}=1 tries the kit without one"
            lacking.append(f"a CUDA device, torch sees none ({hint})")
            print(f"missing: {lacking[0]}", flush=True)
    result = _earlier(Path("COMMIT").read_text().strip())
    result["missing"] = [*lacking, *lacking_servers]
    if lacking:
        _write(result)
        return 2
    site = Path("site").resolve()
    if site.is_dir():
        put_stand_ins(site)
    result["machine"] = _machine(device)
    why_not = cannot_serve(lacking_servers) if "servers" in flags.parts else ""
    if why_not:
        print(f"no servers: {why_not}", flush=True)
    run = _Run(device, flags.quick, result, began_s + 60 * flags.minutes, why_not)
    failed = False
    for part in _PARTS:
        if part in flags.parts:
            failed |= not _run_part(part, run)
            result[part]["gpu"] = result["machine"]["gpu"]
            _write(result)  # whatever becomes of the next part
    return int(failed)


@dataclass(frozen=True)
class _Run:
    """What the parts are given.

    Attributes:
        device: where they run.
        is_quick: fewer repetitions.
        result: what is written.
        until_s: when the kit should be done; what is left then is left out.
        why_no_servers: empty where there can be some.
    """

    device: Any
    is_quick: bool
    result: dict[str, Any]
    until_s: float
    why_no_servers: str


def _earlier(commit: str) -> dict[str, Any]:
    """What parts of the same kit found before; another kit's file is put aside."""
    try:
        found = json.loads(_RESULT.read_text())
        if found["commit"] == commit:
            return dict(found)
        _RESULT.replace(f"gpu-{str(found['commit'])[:9]}.json")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        _RESULT.replace("gpu-unreadable.json")
    return {"commit": commit}


def _write(result: dict[str, Any]) -> None:
    """Puts the file in place at once: who is stopped meanwhile has the one before."""
    new = _RESULT.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1))
    new.replace(_RESULT)
    print(f"{_RESULT} written", flush=True)


def _machine(device: Any) -> dict[str, Any]:
    import torch

    from bench.core.machine import describe_machine

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none, self-test"
    return {**describe_machine(), "gpu": name, "cuda": torch.version.cuda}


def _run_part(part: str, run: _Run) -> bool:
    """Runs one part and adds what it found; returns whether it went well."""
    result = run.result
    result.pop(part, None)  # what it found before is another run's
    started_s = time.monotonic()
    print(f"== {part}", flush=True)
    try:
        result[part] = _OF_PART[part](run)
    except Exception as error:  # of any kind: what the other parts find is worth having
        so_far = result.get(part, {}).get("so_far")
        result[part] = {"failed": f"{type(error).__name__}: {error}"}
        if so_far:
            result[part]["so_far"] = so_far
        print(f"failed: {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        print(f"== {part}: {time.monotonic() - started_s:.0f} s", flush=True)
    return True


def _kernels(run: _Run) -> dict[str, Any]:
    from bench.gpu import codec_kernels
    from bench.gpu.kernels import check_kernels

    number = check_kernels(run.device)
    print(f"{number} cases, all bits came back")
    codecs = codec_kernels.check()
    for name, line in codecs.items():
        print(f"{name}: {line}")
    return {"cases": number, "codecs": codecs}


def _copies(run: _Run) -> dict[str, Any]:
    from bench.gpu.case import measure_copies

    return _reported(measure_copies, run)


def _servers(run: _Run) -> dict[str, Any]:
    if run.why_no_servers:
        raise RuntimeError(f"missing for servers: {run.why_no_servers}")
    from bench.gpu.case import measure_servers

    def keep(found: dict[str, Any]) -> None:
        run.result["servers"] = {"so_far": found}
        _write(run.result)

    return _reported(partial(measure_servers, keep=keep, until_s=run.until_s), run)


def _reported(measure: Callable[..., Any], run: _Run) -> dict[str, Any]:
    from bench.core.case import Options
    from bench.core.output import Progress

    with Progress() as progress:
        report = measure(Options(quick=run.is_quick, progress=progress), run.device)
    for table in report.tables:
        print(table.render())
    print(*report.notes, sep="\n")
    return {"results": report.results, "samples": report.samples}


_OF_PART: dict[str, Callable[[_Run], dict[str, Any]]] = {
    "kernels": _kernels,
    "copies": _copies,
    "servers": _servers,
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
