"""Packs what a machine with a CUDA device needs to try the plugin's way there: `make gpu-kit`.

Such a machine has Python, torch and triton, and need have neither SGLang nor a network. The kit is
this tree at its commit; `run.sh` in it says what is missing, checks the kernels and measures the
copies, and leaves `gpu.json`. A server is not started by it: SGLang is not packed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.core.case import ROOT, commit_header

MOST_BYTES = 60 << 20
_FOLDERS = ("sglang_ext", "kernels", "tiers", "bench", "testkit", "LICENSE", "pyproject.toml")
_RUN = """#!/usr/bin/env bash
# One command: what is missing, kernels, copies; leaves gpu.json beside this file.
cd "$(dirname "$0")" && exec "${PYTHON:-python3}" -m bench.gpu.kit_run "$@"
"""


def pack(out: Path) -> int:
    """Writes the kit; returns its bytes.

    Raises:
        DirtyTreeError: the tree is not that of its commit.
        RuntimeError: it became too large.
    """
    commit = commit_header()["commit"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder) / "gpu-kit"
        kit.mkdir()
        archive = Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "-o", archive, "HEAD", *_FOLDERS], cwd=ROOT, check=True)
        with tarfile.open(archive) as tree:
            tree.extractall(kit, filter="tar")
        (kit / "COMMIT").write_text(f"{commit}\n")
        run = kit / "run.sh"
        run.write_text(_RUN)
        run.chmod(0o755)
        with tarfile.open(out, "w:gz") as packed:
            packed.add(kit, "gpu-kit")
    size = out.stat().st_size
    if size > MOST_BYTES:
        raise RuntimeError(f"the kit may have {MOST_BYTES} bytes, got {size}")
    return size


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit.tar.gz")
    args = parser.parse_args()
    size = pack(args.out)
    print(f"{args.out}: {size / 2**20:.1f} MiB; unpack it there and run gpu-kit/run.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
