"""The Pythons that the plugin runs on, and where this machine has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CLASSIFIER = re.compile(r"Programming Language :: Python :: (3\.\d+)")
_ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


def supported() -> list[str]:
    """Versions that `pyproject.toml` names in its classifiers, such as "3.12"; the oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [match[1] for each in project["classifiers"] if (match := _CLASSIFIER.fullmatch(each))]
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def find(version: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """An interpreter of a version on `PATH` or below pyenv's folder; None where there is none.

    What pyenv puts on `PATH` is asked for its version, as it may stand for none.
    """
    pyenv = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME", "/")) / ".pyenv")
    on_path = shutil.which(f"python{version}", path=environ.get("PATH", ""))
    below_pyenv = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    candidates = [Path(on_path)] if on_path else []
    return next((path for path in [*candidates, *below_pyenv] if _is_of(path, version)), None)


def _is_of(path: Path, version: str) -> bool:
    try:
        done = subprocess.run(
            [path, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version
