"""What `run.sh` of a kit does on the machine with the device."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# What the kernels and copies need of the machine, and what servers do besides.
NEEDED = ("numpy", "torch", "triton", "numba", "llvmlite", "xxhash", "psutil")
NEEDED_BY_SERVERS = ("transformers", "aiohttp", "requests", "uvloop", "safetensors")
_RESULT = "gpu.json"
STAND_INS = Path(__file__).resolve().parent / "stubs"
_PARTS = ("kernels", "copies", "servers")
# Seconds that a part may take at most, of those that are left; servers may have all of them.
_LONGEST_S = {"kernels": 180.0, "copies": 120.0}
# Processes that compile kernels.
_MOST_PROCESSES = 8


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
    flags = _flags(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * flags.minutes
    lacking, lacking_servers = ([], []) if flags.checked else _missing_here()
    result = _earlier(flags.out, Path("COMMIT").read_text().strip())
    if not flags.checked:
        result["missing"] = [*lacking, *lacking_servers]
    if lacking:
        _write(flags.out, result)
        return 2
    site = Path("site").resolve()
    if site.is_dir() and not flags.checked:
        put_stand_ins(site)
    asks_servers = "servers" in flags.parts and not flags.checked
    why_not = cannot_serve(lacking_servers) if asks_servers else ""
    if why_not:
        print(f"no servers: {why_not}", flush=True)
    if len(flags.parts) > 1:
        return _each_in_a_process(flags, result, until_s, why_not)
    return _here(flags, result, until_s, why_not)


def _flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="what would take longer than that is left out"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), help="folder for gpu.json and the servers' logs"
    )
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _missing_here() -> tuple[list[str], list[str]]:
    """What the machine lacks, and what it lacks for servers; both are said."""
    lacking, lacking_servers = missing(NEEDED), missing(NEEDED_BY_SERVERS)
    for who, names in (("", lacking), (" for servers", lacking_servers)):
        if names:
            print(f"missing{who}: " + ", ".join(names), flush=True)
    if not lacking:
        from bench.gpu.case import SELFTEST, device_or_none

        if device_or_none() is None:
            hint = f"{SELFTEST}=1 tries the kit without one"
            lacking.append(f"a CUDA device, torch sees none ({hint})")
            print(f"missing: {lacking[0]}", flush=True)
    return lacking, lacking_servers


def _here(
    flags: argparse.Namespace, result: dict[str, Any], until_s: float, why_no_servers: str
) -> int:
    """Runs one part in this process."""
    from bench.gpu.case import device_or_none

    device = device_or_none()
    result["machine"] = _machine(device)
    run = _Run(device, flags.quick, result, until_s, why_no_servers, flags.out)
    (part,) = flags.parts
    is_well = _run_part(part, run)
    result[part]["gpu"] = result["machine"]["gpu"]
    _write(flags.out, result)
    return int(not is_well)


def _each_in_a_process(
    flags: argparse.Namespace, result: dict[str, Any], until_s: float, why_no_servers: str
) -> int:
    """Runs each part in a process of its own: one that crashes, or hangs, ends no other.

    CUDA's errors stay with a process, and what a part found so far is in the file.
    """
    parts = [part for part in _PARTS if part in flags.parts]
    for part in parts:
        result.pop(part, None)  # what it found before is another run's
    _write(flags.out, result)
    failed = False
    for part in parts:
        if part == "servers" and why_no_servers:
            ended = f"missing for servers: {why_no_servers}"
        else:
            ended = _in_a_process(part, flags, max(until_s - time.monotonic(), 1.0))
        result = _earlier(flags.out, result["commit"])
        failed |= ended != ""
        if not ended or "failed" in result.get(part, {}):  # why is in the file
            continue
        print(f"failed: {part}: {ended}", flush=True)
        so_far = result.get(part, {}).get("so_far")
        result[part] = {"failed": ended, **({"so_far": so_far} if so_far else {})}
        _write(flags.out, result)
    return int(failed)


def _in_a_process(part: str, flags: argparse.Namespace, left_s: float) -> str:
    """Empty where a part went well, else how its process ended."""
    limit_s = min(left_s, _LONGEST_S.get(part, left_s))
    command = [sys.executable, "-u", "-m", "bench.gpu.kit_run", "--checked", "--parts", part]
    command += ["--out", str(flags.out), "--minutes", str(left_s / 60)]
    if flags.quick:
        command.append("--quick")
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it took over {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started; servers see to themselves
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"its process ended with {code}" if code else ""


@dataclass(frozen=True)
class _Run:
    """What the parts are given.

    Attributes:
        device: where they run.
        is_quick: fewer repetitions.
        result: what is written.
        until_s: when the kit should be done; what is left then is left out.
        why_no_servers: empty where there can be some.
        out: folder for what is left.
    """

    device: Any
    is_quick: bool
    result: dict[str, Any]
    until_s: float
    why_no_servers: str
    out: Path


def _earlier(out: Path, commit: str) -> dict[str, Any]:
    """What parts of the same kit found before; another kit's file is put aside."""
    file = out / _RESULT
    try:
        found = json.loads(file.read_text())
        if found["commit"] == commit:
            return dict(found)
        file.replace(out / f"gpu-{str(found['commit'])[:9]}.json")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        file.replace(out / "gpu-unreadable.json")
    return {"commit": commit}


def _write(out: Path, result: dict[str, Any]) -> None:
    """Puts the file in place at once: who is stopped meanwhile has the one before."""
    file, new = out / _RESULT, out / "gpu.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(file)
    print(f"{file} written", flush=True)


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
    from bench.gpu.kernels import check_in_processes, check_kernels

    with ThreadPoolExecutor(1) as beside:
        of_codecs = beside.submit(codec_kernels.check)
        if run.device.type == "cuda":
            number = check_in_processes(min(os.cpu_count() or 1, _MOST_PROCESSES))
        else:
            number = check_kernels(run.device)
        print(f"{number} cases, all bits came back")
        codecs = of_codecs.result()
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
        _write(run.out, run.result)

    measure = partial(measure_servers, keep=keep, until_s=run.until_s, logs=run.out.resolve())
    return _reported(measure, run)


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
