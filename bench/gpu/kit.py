"""Packs what a machine with a CUDA device needs to try the plugin there: `make gpu-kit`.

Such a machine has Python 3.12, torch, triton, transformers and numba, and need have neither SGLang
nor a network. In the kit are the benches of this tree at its commit, the plugin's wheel, SGLang's
without what a dense model does not need, and the wheels that both need. `run.sh` in it says what is
missing, checks the kernels, measures the copies, and starts servers: plain SGLang, the plugin, and
SGLang's own hierarchical cache. `gpu.json` and the servers' logs are left in the folder of `--out`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.core.case import ROOT, commit_header
from bench.gpu import wheels

# Where a machine is sent a copy of the tree, too, that and the kit have 64 MiB together.
MOST_BYTES = 38 << 20
# The benches, what starts servers for them, and the tokenizer of their models, whose weights are
# random: those of the bundled model are as large as SGLang's wheel.
_FOLDERS = (
    *("bench", "testkit", "runtime_cpu", "LICENSE"),
    *(f"tests/assets/tinylm/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
)
_RUN = """#!/usr/bin/env bash
# One command: what is missing, kernels, copies, servers; leaves gpu.json beside this file.
set -e
cd "$(dirname "$0")"
python=${PYTHON:-python3}
if [ -d wheels ] && [ ! -e site/.complete ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade \\
    --target site wheels/*.whl
  touch site/.complete
fi
export PYTHONPATH="$PWD/site${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE # or each of a dozen processes compiles all of SGLang's source
exec "$python" -m bench.gpu.kit_run "$@"
"""


def pack(out: Path, *, with_wheels: bool = True) -> int:
    """Writes the kit; returns its bytes.

    Args:
        out: the archive.
        with_wheels: without them it needs what they hold installed there; nothing is downloaded.

    Raises:
        DirtyTreeError: the tree is not that of its commit.
        RuntimeError: it became too large.
        subprocess.CalledProcessError: a wheel cannot be had.
    """
    commit = commit_header()["commit"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder) / "gpu-kit"
        kit.mkdir()
        _extract(kit, *_FOLDERS)
        (kit / "COMMIT").write_text(f"{commit}\n")
        run = kit / "run.sh"
        run.write_text(_RUN)
        run.chmod(0o755)
        if with_wheels:
            whole = Path(folder) / "tree"
            whole.mkdir()
            _extract(whole)
            wheels.collect(kit / "wheels", whole)
        with tarfile.open(out, "w:gz") as packed:
            packed.add(kit, "gpu-kit")
    size = out.stat().st_size
    if size > MOST_BYTES:
        raise RuntimeError(f"the kit may have {MOST_BYTES} bytes, got {size}")
    return size


def _extract(folder: Path, *paths: str) -> None:
    """What the commit has of these paths, or all of it."""
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "archive", "-o", archive, "HEAD", *paths], cwd=ROOT, check=True)
    with tarfile.open(archive) as tree:
        tree.extractall(folder, filter="tar")
    archive.unlink()


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit.tar.gz")
    parser.add_argument(
        "--without-wheels", action="store_true", help="for a machine that has SGLang and the plugin"
    )
    args = parser.parse_args()
    size = pack(args.out, with_wheels=not args.without_wheels)
    print(f"{args.out}: {size / 2**20:.1f} MiB; unpack it there and run gpu-kit/run.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
