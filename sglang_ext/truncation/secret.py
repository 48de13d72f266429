"""The secret that names of truncated lineages are keyed with."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from sglang_ext.tiers.access import FILE_MODE, make_folder, read_own

_FILE_NAME = "truncation.key"
_BYTES = 32


def lineage_secret(disk_dir: str) -> str:
    """The server's secret, as hex.

    With a disk folder it is kept there, so that the next server on that folder finds what this one
    stored of truncated conversations; without one nothing is stored beyond the process.

    Args:
        disk_dir: the disk tier's folder; empty for none.
    """
    fresh = secrets.token_hex(_BYTES)
    if not disk_dir:
        return fresh
    path = Path(disk_dir) / _FILE_NAME
    try:
        make_folder(path.parent)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as file:
            file.write(fresh)
    except FileExistsError:
        return _read(path) or fresh
    except OSError:  # the disk tier will say what is wrong with the folder
        return fresh
    return fresh


def _read(path: Path) -> str:
    """The secret in a file; empty when that holds none, as after a crash while it was written."""
    try:
        text = read_own(path, 4 * _BYTES).decode("ascii").strip()
        return text if len(bytes.fromhex(text)) == _BYTES else ""
    except (OSError, ValueError):
        return ""
