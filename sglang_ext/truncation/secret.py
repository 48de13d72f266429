"""The secret that names of truncated lineages are keyed with."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from sglang_ext.tiers.access import FILE_MODE, is_trusted_file, make_folder, read_own, shown

_FILE_NAME = "truncation.key"
_BYTES = 32


def lineage_secret(disk_dir: str) -> str:
    """The server's secret, as hex.

    With a disk folder it is kept there, so that the next server on that folder finds what this one
    stored of truncated conversations; without one nothing is stored beyond the process. What lies
    in its place and is of no use is left as it is (`secret_problem`).

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


def secret_problem(disk_dir: str) -> str:
    """What is to be said of the file with the secret in a disk tier's folder; "" for nothing.

    Args:
        disk_dir: the folder.
    """
    path = Path(disk_dir) / _FILE_NAME
    try:
        status = path.lstat()
    except OSError:  # it is made at a start, or the disk tier says what is wrong with the folder
        return ""
    mode = stat.S_IMODE(status.st_mode)
    if _read(path):
        if not mode & 0o077:
            return ""
        return (
            f"{shown(path)} may be read or written by others (mode {mode:04o}); make it its "
            "owner's alone with chmod 600"
        )
    why, advice = "holds no key", "put it back from a copy"
    is_readable = os.access(path, os.R_OK, effective_ids=True)
    if stat.S_ISREG(status.st_mode) and not (is_readable and is_trusted_file(path)):
        why = f"is user {status.st_uid}'s (mode {mode:04o}) and no key for user {os.geteuid()}"
        advice = "give it to the server's user alone"
    return (
        f"{shown(path)} {why}: what was stored of cut prompts with that key is not found, and what "
        f"is stored now is not at the next start; {advice}, or remove it and a start makes a new "
        "one"
    )


def _read(path: Path) -> str:
    """The secret in a file.

    Empty when that holds none, as after a crash while it was written, or is another user's, who
    would know it.
    """
    if not is_trusted_file(path):
        return ""
    try:
        text = read_own(path, 4 * _BYTES).decode("ascii").strip()
        return text if len(bytes.fromhex(text)) == _BYTES else ""
    except (OSError, ValueError):
        return ""
