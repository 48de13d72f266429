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
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from testkit.pythons import interpreters
from testkit.pythons.interpreters import ROOT

ENVIRONMENTS = ROOT / "build" / "pythons"
# Of those with servers: restored answers bit for bit, every interface of SGLang's, its events.
TESTS = (
    "tests/unit",
    "tests/tiers",
    "tests/e2e/reuse/test_equality.py",
    "tests/e2e/start/test_interfaces.py",
    "tests/e2e/reuse/test_kv_events.py",
)
_CHOSEN_BY_TORCH = re.compile(r"(torch|triton)\b(?!-)")


def main() -> int:
    """Tests under each; the exit status."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    known = interpreters.supported()
    parser = argparse.ArgumentParser(prog="python -m testkit.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", choices=[[], *known], metavar="VERSION")
    parser.add_argument("--torch", default=torch_of_sglang(), metavar="VERSION")
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


def torch_of_sglang() -> str:
    """The version of torch that the installed SGLang pins, such as "2.14.1"."""
    found = [re.match(r"torch==([\d.]+)", each) for each in requires("sglang") or ()]
    [version] = [match[1] for match in found if match]
    return version


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
    pins = (ROOT / "runtime_cpu" / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(map(str, _without_torch(pins))))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = [pin for name in ("cpu", "dev", "gateway") for pin in extras[name]]
    wanted = [*_without_torch(pinned), f"torch=={torch}"]
    install = [str(own), "-m", "pip", "install", "--quiet", "--no-input"]
    _run([*install, "-c", str(constraints), *wanted])
    _run([*install, "--no-deps", _sglang(), "-e", str(ROOT)])
    (folder / "done").touch()
    return own


def _without_torch(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not _CHOSEN_BY_TORCH.match(line)]


def _sglang() -> str:
    found = re.search(r"^SGLANG := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    sys.exit(main())
