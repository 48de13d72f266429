"""Shares of the tiers that tenants have by right: how the flag is written, and whose are whose.

`cache_salt:acme=0.3,extra_key:web=0.2`: requests with the salt `acme` have 30 % of each tier, those
with the key `web` and another salt, or none, 20 %, and all others together the rest. `@FILE` stands
for what is in a file: who knows a salt is its tenant, and command lines are shown to many.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.values import shown

logger = logging.getLogger(__name__)

MAX_TENANTS: Final = 15  # as in `tiers/policy/config.py`, which takes long to import
_FIELDS = ("cache_salt", "extra_key")
_FLAG = "--hier-kv-quotas"
_EXAMPLE = "cache_salt:acme=0.3,extra_key:web=0.2"
_FILE_MARK, _COMMENT = "@", "#"
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class Quotas:
    """Who has which share.

    Attributes:
        shares: of each tier, in the order of the flag.
        numbers: number of each tenant, from 1 on, by what of a request names it.
    """

    shares: tuple[float, ...] = ()
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def number_of(self, cache_salt: str | None, extra_key: str | None) -> int:
        """Number of the tenant whose share a request counts towards; 0: that of all others."""
        number = self.numbers.get(("cache_salt", cache_salt or ""), 0)
        return number or self.numbers.get(("extra_key", extra_key or ""), 0)


def parse_quotas(text: str) -> Quotas:
    """The shares that a flag's text gives; reads its file, if it names one, once in a process.

    Raises:
        HierKVConfigError: it gives none. Nothing of what is in a file is in the message.
    """
    if not text.startswith(_FILE_MARK):
        return _of((part, shown(part)) for part in (text.split(",") if text else ()))
    return _of(_parts_of(Path(text.removeprefix(_FILE_MARK))))


@functools.cache  # or shares and numbers, which are asked for at several places, might not agree
def _parts_of(path: Path) -> tuple[tuple[str, str], ...]:
    """Tenants with their shares, and where each stands; comments are left out."""
    text, mode = _read(path)
    found = [
        (part, f"what stands in line {number} of {path}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith(_COMMENT)
        for part in line.split(",")
    ]
    if not found:
        raise HierKVConfigError(
            f"{_FLAG} {_FILE_MARK}FILE must name a text of at most {_MAX_FILE_BYTES:,} bytes with "
            f"a tenant such as cache_salt:acme=0.3 on each line, and {shown(str(path))} is none; "
            "give one that the server may read."
        )
    if mode & 0o077:
        logger.warning(
            "hier-kv: %s, which names tenants by their salts, may be read or written by others "
            "(mode %04o); make it its owner's alone with chmod 600",
            path,
            mode,
        )
    return tuple(found)


def _read(path: Path) -> tuple[str, int]:
    """A file's text, empty where it has none, and its mode; a pipe is not waited for."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
        return data.decode("utf-8") if len(data) <= _MAX_FILE_BYTES else "", stat.S_IMODE(mode)
    except (OSError, UnicodeDecodeError):
        return "", 0


def _of(parts: Iterable[tuple[str, str]]) -> Quotas:
    """The shares of some tenants: of each its text, and how a message speaks of it."""
    shares: list[float] = []
    numbers: dict[tuple[str, str], int] = {}
    for part, told in parts:
        named, equals, share = part.rpartition("=")
        kind, colon, name = (each.strip() for each in named.partition(":"))
        key = kind, unquote(name)
        if not equals or not colon or kind not in _FIELDS or not name or "=" in name:
            raise HierKVConfigError(
                f"{_FLAG} must be a list such as {_EXAMPLE}, got {told} in it; name each "
                "tenant by cache_salt: or extra_key:, with %2C, %3D and %25 for a comma, = and %."
            )
        if key in numbers:
            raise HierKVConfigError(
                f"{_FLAG} must have each tenant once, got {told} twice; leave one out."
            )
        shares.append(_share(share, told))
        numbers[key] = len(shares)
    if len(shares) > MAX_TENANTS:
        raise HierKVConfigError(
            f"{_FLAG} may have {MAX_TENANTS} tenants, got {len(shares)}; leave the smallest to the "
            "share that all others have together."
        )
    if sum(shares) > 1 + 1e-9:
        raise HierKVConfigError(
            f"{_FLAG} must have shares of at most 1 together, got {sum(shares):g}; give smaller "
            "ones."
        )
    return Quotas(tuple(shares), numbers)


def _share(text: str, told: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:  # and so no NaN
        raise HierKVConfigError(
            f"{_FLAG} must have shares above 0 and up to 1, got {told}; give one such as 0.3."
        )
    return share
