"""Key files: one key or several, of which the first writes and all read."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from sglang_ext.tiers.errors import TierConfigError

KEY_BYTES = 32
"""What `write_key_file` makes, and the least that a key may have."""

_MAX_FILE_BYTES = 1 << 16
_MAX_KEYS = 16
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


def read_key_file(path: Path) -> tuple[bytes, ...]:
    """The keys in a file, in its order.

    A key is a line: at least 32 bytes, as hex or base64. Empty lines and those that begin with `#`
    are left out.

    Raises:
        TierConfigError: one sentence, without a key in it.
    """
    text = _read(path)
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(
        _parse(path, number, line)
        for number, line in enumerate(lines, start=1)
        if line and not line.startswith("#")
    )
    if not keys or len(keys) > _MAX_KEYS:
        raise TierConfigError(
            f"--hier-kv-key-file: {path} must hold from 1 to {_MAX_KEYS} keys, one a line, got"
            f" {len(keys)}; `hier-kv keygen FILE` makes one"
        )
    if len(set(keys)) < len(keys):
        raise TierConfigError(f"--hier-kv-key-file: {path} holds a key twice; remove one of them")
    return keys


def write_key_file(path: Path) -> None:
    """Writes a new random key to a file that does not exist, which only its owner may read.

    Raises:
        FileExistsError: it exists; nothing is changed.
        OSError: it cannot be written; names the file, of which nothing is left.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk, which the next try would find to hold a file
        with contextlib.suppress(OSError):
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _read(path: Path) -> str:
    try:
        # Not blocking: a pipe must not hold the server's start up.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TierConfigError(
                    f"--hier-kv-key-file must be a file, but {path} is none; give a file"
                )
            if status.st_mode & 0o077:
                raise TierConfigError(
                    f"--hier-kv-key-file: {path} may be read or written by others (mode"
                    f" {stat.S_IMODE(status.st_mode):04o}); make it its owner's alone with chmod"
                    " 600"
                )
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise TierConfigError(
            f"--hier-kv-key-file: {path} cannot be read ({error.strerror}); give a file that"
            " `hier-kv keygen FILE` made"
        ) from error
    return data.decode("utf-8", errors="replace")


def _parse(path: Path, number: int, line: str) -> bytes:
    key = b""
    if _HEX.fullmatch(line):
        key = bytes.fromhex(line)
    else:
        try:
            key = base64.b64decode(line, validate=True)
        except (binascii.Error, ValueError):
            key = b""
    if len(key) < KEY_BYTES:
        raise TierConfigError(
            f"--hier-kv-key-file: line {number} of {path} must be a key of at least {KEY_BYTES}"
            " bytes in hex or base64, and is none; `hier-kv keygen FILE` makes one"
        )
    return key
