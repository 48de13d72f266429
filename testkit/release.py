"""Builds the wheel and the source archive, and installs each where nothing else is.

``python -m testkit.release [--served]`` (`make dist`); both are left in ``dist/``. The wheel is
built from the source archive, so that nothing but what the archive holds can be in it. It is tried
with every Python that `pyproject.toml` names and this machine has, the archive with the one that
runs this. Under the others, which run no other tests, it is tested as far as that goes without
torch, and with `--served` under one of them with a server (`pythons/served.py`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sglang_ext import __version__
from testkit.pythons import alone, interpreters, pins, served

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
_PINNED = ROOT / "runtime_cpu" / "constraints.txt"
TOOLS = ("build==1.6.1", "twine==7.0.0")
# Of this folder: what is made here, perhaps at this very time (`.ci/run`).
_NOT_BUILT = (
    *(".git", ".hypothesis", ".venv", ".*_cache"),
    *("*.egg-info", "__pycache__", "build", "dist"),
)
_LOADS_PLUGIN = (
    "from importlib.metadata import entry_points; "
    "[plugin] = entry_points(group='sglang.srt.plugins'); print(plugin.load().__module__)"
)
# A newer Python may warn of what an older one took, also in modules that need torch or SGLang.
_COMPILES = (
    "import compileall, sglang_ext; [folder] = sglang_ext.__path__; "
    "print(bool(compileall.compile_dir(folder, quiet=1, force=True)) or exit(1))"
)
_PINS = "from importlib.metadata import requires; print(*requires('sglang'), sep='\\n')"
# What there is without SGLang and torch; each prints something.
TRIED = {
    "compiled without a warning": ("python", "-W", "error", "-c", _COMPILES),
    "help": ("hier-kv", "--help"),
    "version": ("python", "-c", "import sglang_ext; print(sglang_ext.__version__)"),
    "plugin": ("python", "-c", _LOADS_PLUGIN),
}


class ReleaseError(RuntimeError):
    """What was built cannot be released."""


class Trial(NamedTuple):
    """An installation that is tried.

    Attributes:
        what: is tried.
        python: the interpreter.
        folder: for the environment.
        built: the wheel or the archive.
        is_tested: whether tests are run, too: not under the Python of all other tests, wherever
            this machine has that, too.
        is_served: whether one of these is with a server.
    """

    what: str
    python: Path
    folder: Path
    built: Path
    is_tested: bool = False
    is_served: bool = False


def main() -> None:
    """Builds, checks and tries; ends with one sentence where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m testkit.release", description=__doc__)
    parser.add_argument("--served", action="store_true", help="downloads 3 GB, and holds 6")
    args = parser.parse_args()
    try:
        check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
        with tempfile.TemporaryDirectory(prefix="hier-kv-release-") as scratch:
            release(Path(scratch), is_served=args.served)
    except ReleaseError as error:
        sys.exit(f"release: {error}")


def check_changelog(text: str, version: str) -> None:
    """Raises where the newest entry is of another version."""
    newest = re.search(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    if newest is None or newest[1] != version:
        found = "none" if newest is None else newest[1]
        raise ReleaseError(
            f"the newest entry of CHANGELOG.md should be of version {version}, it is of {found}"
        )


def release(scratch: Path, *, is_served: bool) -> None:
    """Builds both, and installs each into environments of its own; see `trials`."""
    call([sys.executable, "-m", "venv", scratch / "tools"])
    tools = scratch / "tools" / "bin"
    install(tools, tools, ["--upgrade", "-c", str(_PINNED), "pip"])  # as `make dev` does
    install(tools, tools, TOOLS)
    shutil.rmtree(DIST, ignore_errors=True)
    # Of a copy: an editable installation writes into the tree what a build writes there, too.
    tree, left_out = scratch / "tree", shutil.ignore_patterns(*_NOT_BUILT)
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    call([tools / "python", "-m", "build", "--outdir", DIST, tree])
    built = sorted(DIST.iterdir())
    if sorted(path.suffix for path in built) != [".gz", ".whl"]:
        raise ReleaseError(f"a wheel and a source archive should be built, there are {built}")
    call([tools / "python", "-m", "twine", "check", "--strict", *built])
    for path in built:
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)
    with ThreadPoolExecutor() as pool:  # they wait for what they install
        tried = trials(scratch, built, is_served=is_served)
        if is_served and not any(each.is_served for each in tried):
            raise ReleaseError(
                f"a server is tried with Python {served.VERSION} by another Python, which this "
                "machine should have; leave --served (SERVED=1) out"
            )
        found = [(each.what, pool.submit(try_out, each, tools)) for each in tried]
    for what, lines in found:
        print("\n".join([what, *lines.result()]), flush=True)
    print("release: both can be installed and used")


def trials(scratch: Path, built: Sequence[Path], *, is_served: bool) -> list[Trial]:
    """What is tried; prints which Pythons are not here.

    Args:
        scratch: for the environments.
        built: the wheel and the archive.
        is_served: whether one of them is tried with a server.
    """
    archive, wheel = sorted(built, key=lambda path: path.suffix)
    found = [Trial("source archive", Path(sys.executable), scratch / "archive", archive)]
    this = ".".join(map(str, sys.version_info[:2]))
    for version in interpreters.supported():
        what, python = f"wheel, Python {version}", interpreters.find(version)
        if python is None:
            print(f"{what}: not on this machine", flush=True)
        else:
            is_tested = version != this
            has_server = is_served and is_tested and version == served.VERSION
            found.append(Trial(what, python, scratch / version, wheel, is_tested, has_server))
    return found


def try_out(trial: Trial, tools: Path) -> list[str]:
    """Installs one into an environment of its own, and tries what there is without SGLang.

    Args:
        trial: the installation.
        tools: the folder of programs of an environment that has pip.

    Raises:
        ReleaseError: something fails.
    """
    folder = trial.folder
    call([trial.python, "-m", "venv", "--without-pip", folder])
    bin_folder = folder / "bin"
    install(tools, bin_folder, [str(trial.built)])
    tried = {what: call([bin_folder / program, *args]) for what, (program, *args) in TRIED.items()}
    if trial.is_tested:
        install(tools, bin_folder, alone.requirements())
        tried["tests without torch"] = _passed(
            alone.run(bin_folder / "python", folder / "tested"), trial, "tests without torch"
        )
    if trial.is_served:
        _install_server(tools, folder)
        tried["a server"] = _passed(
            served.run(bin_folder / "python", folder / "served"), trial, "a test with a server"
        )
        if "skipped" in tried["a server"]:
            raise ReleaseError(f"no server was tried with {trial.python}: {tried['a server']}")
    return [f"  {what}: {printed.splitlines()[0]}" for what, printed in tried.items()]


def _passed(done: subprocess.CompletedProcess[str], trial: Trial, what: str) -> str:
    """The last line of tests.

    Raises:
        ReleaseError: one failed.
    """
    if done.returncode:
        raise ReleaseError(f"{what} failed with {trial.python}:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1]


def _install_server(tools: Path, folder: Path) -> None:
    """Brings SGLang, and what it needs on a CPU, into the environment of a trial."""
    bin_folder, constraints = folder / "bin", folder / "constraints.txt"
    constraints.write_text("\n".join(pins.constraints()))
    install(tools, bin_folder, ["--no-deps", pins.sglang()])
    torch = pins.torch_of(call([bin_folder / "python", "-c", _PINS]).splitlines())
    install(tools, bin_folder, ["-c", str(constraints), *served.requirements(torch)])


def install(tools: Path, bin_folder: Path, requirements: Sequence[str]) -> None:
    """Installs these into an environment by the pip of another one.

    A pip of its own would take longer to install than most of what is tried, and bytecode of all
    that is installed longer still, of which little is imported.
    """
    pip = (tools / "python", "-m", "pip", "--python", bin_folder / "python")
    call([*pip, "install", "--quiet", "--no-input", "--no-compile", *requirements])


def call(command: Sequence[str | Path]) -> str:
    """Runs a command outside of this tree; returns what it printed.

    Raises:
        ReleaseError: it failed.
    """
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
