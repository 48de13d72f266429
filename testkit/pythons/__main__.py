"""Tests under the other Pythons, some with servers: ``python -m testkit.pythons [VERSION...]``.

Makes an environment for each in ``build/pythons``, once, with the pinned packages; 6 GB, as torch
comes with CUDA where no other build of it is found. torch is the one that SGLang's release pins,
which is newer than the CPU build that `make dev` installs; ``--torch`` takes another. Its own
triton is taken. SGLang is installed without its dependencies, as `make dev` does. ``--tests`` runs
others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from testkit.pythons import interpreters, pins
from testkit.pythons.interpreters import ROOT

ENVIRONMENTS = ROOT / "build" / "pythons"
# Of those with servers: restored answers bit for bit, every interface of SGLang's, its events.
TESTS = (
    "tests/unit",
    "tests/processes",
    "tests/tiers",
    "tests/e2e/reuse/test_equality.py",
    "tests/e2e/start/test_interfaces.py",
    "tests/e2e/reuse/test_kv_events.py",
)


def main() -> int:
    """Tests under each; the exit status."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    known = interpreters.supported()
    parser = argparse.ArgumentParser(prog="python -m testkit.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", choices=[[], *known], metavar="VERSION")
    parser.add_argument("--torch", default=pins.torch_of(requires("sglang")), metavar="VERSION")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="TEST")
    args = parser.parse_args()
    failed = []
    for version in args.versions or [each for each in known if each != here]:
        python = interpreters.find(version)
        print(f"Python {version}{'' if python else ': not on this machine'}", flush=True)
        if python is not None and not _passes(python, version, args.torch, args.tests):
            failed.append(version)
    print(f"failed under {', '.join(failed)}" if failed else "passed under all that are here")
    return int(bool(failed))


def _passes(python: Path, version: str, torch: str, tests: Sequence[str]) -> bool:
    own = _environment(python, ENVIRONMENTS / f"{version}-torch-{torch}", torch)
    command = [str(own), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    # What the tests start has to find the same packages.
    path = f"{own.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return not subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False
    ).returncode


def _environment(python: Path, folder: Path, torch: str) -> Path:
    """The interpreter of an environment with all that the tests need."""
    own = folder / "bin" / "python"
    if (folder / "done").exists():
        return own
    _run([python, "-m", "venv", folder])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins.constraints()))
    wanted = [*pins.without_torch(pins.extras("cpu", "dev", "gateway")), f"torch=={torch}"]
    install = [str(own), "-m", "pip", "install", "--quiet", "--no-input"]
    _run([*install, "-c", str(constraints), *wanted])
    _run([*install, "--no-deps", pins.sglang(), "-e", str(ROOT)])
    (folder / "done").touch()
    return own


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    sys.exit(main())
