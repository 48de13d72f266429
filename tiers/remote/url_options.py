"""What a store's URL may say: readers of its values, the options of a scheme, and a URL as read."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_SIZE_BYTES = 1 << 60
_MIN_FOLDER_BYTES = 64 << 10
_MIN_LIFE_S, _MAX_LIFE_S = 1.0, 3650 * 86400.0
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 0.001, 86400.0


def number_with_unit(text: str, units: Mapping[str, float], what: str) -> float:
    """Returns the value of `text`, a positive number and one of `units`.

    Raises:
        ValueError: it is none; the message says what one looks like.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([A-Za-z]*)", text)
    if match is None or match[2] not in units or float(match[1]) <= 0:
        shown = ", ".join(unit for unit in units if unit)
        raise ValueError(f"a positive {what} such as 4{next(u for u in units if u)} ({shown})")
    return float(match[1]) * units[match[2]]


def size(text: str) -> int:
    """Reads a size: bytes, or a number and KB, MB, GB or TB, which are powers of 1024."""
    num_bytes = int(number_with_unit(text, _SIZE_UNITS, "size"))
    if not 1 <= num_bytes <= _MAX_SIZE_BYTES:
        raise ValueError(f"a positive size of at most {_MAX_SIZE_BYTES >> 40}TB")
    return num_bytes


def folder_size(text: str) -> int:
    """Reads how much may lie in a folder."""
    num_bytes = size(text)
    if num_bytes < _MIN_FOLDER_BYTES:
        raise ValueError(f"a size of at least {_MIN_FOLDER_BYTES >> 10}KB, such as 100GB")
    return num_bytes


def life_s(text: str) -> float:
    """Reads how long a value stays: a number and s, m, h or d."""
    return _between(number_with_unit(text, _TIME_UNITS, "time"), _MIN_LIFE_S, _MAX_LIFE_S)


def timeout_s(text: str) -> float:
    """Reads how long a call may take: a number and s, m, h or d."""
    return _between(number_with_unit(text, _TIME_UNITS, "time"), _MIN_TIMEOUT_S, _MAX_TIMEOUT_S)


def _between(seconds: float, least_s: float, most_s: float) -> float:
    if not least_s <= seconds <= most_s:
        raise ValueError(f"a positive time from {least_s:g}s to {most_s:.0f}s")
    return seconds


def yes_or_no(text: str) -> bool:
    """Reads `yes` or `no`."""
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def count(text: str) -> int:
    """Reads a number from 1 to 64."""
    if not is_number(text, 64) or int(text) < 1:
        raise ValueError("a number from 1 to 64")
    return int(text)


def name_prefix(text: str) -> str:
    """Reads a prefix of names."""
    if not _PREFIX.fullmatch(text):
        raise ValueError("1 to 32 letters, digits, dots, hyphens and underscores")
    return text


def readable_file(text: str) -> Path:
    """Reads the path of a file that is there and can be read."""
    path = Path(text)
    try:
        # Opening a pipe waits until somebody writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("a file that can be read (this is none)")
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"a file that can be read ({error.strerror})") from error
    return path


def is_number(text: str, most: int) -> bool:
    """Whether `text` is a number from 0 to `most` in plain digits."""
    return bool(re.fullmatch(r"[0-9]{1,9}", text)) and int(text) <= most


def one_of(*choices: str) -> Callable[[str], str]:
    """Makes a reader of one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read


@dataclass(frozen=True)
class Options:
    """What a URL of one scheme may say.

    Attributes:
        readers: for each option of the query, what reads its text; ValueError says what is wanted.
        default_port: of the store; 0 where a URL names no host.
        path: `db` for a number, `folder` for an absolute path, `none`.
        max_hosts: how many HOST:PORT may be given, with commas between.
        has_login: whether USER@ may stand in front of the host, and a password goes with it.
    """

    readers: Mapping[str, Callable[[str], Any]]
    default_port: int = 0
    path: str = "none"
    max_hosts: int = 1
    has_login: bool = False


# What every scheme may say; `RemoteStoreConfig` of remote_store.py has what they mean.
COMMON_READERS: Mapping[str, Callable[[str], Any]] = {
    "prefix": name_prefix,
    "ttl": life_s,
    "timeout": timeout_s,
    "part": size,
    "calls": count,
}


@dataclass(frozen=True)
class RemoteUrl:
    """A store's address and settings, checked.

    Attributes:
        scheme: of a registered engine.
        hosts: (host, port), as given.
        path: what stands behind the host, decoded.
        user: login name, or "".
        password: or ""; from `password-file` or the environment. Not part of the repr.
        options: values of the query by name, as their readers gave them.
        shown: the URL without its secrets, for logs and reports.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    user: str
    password: str = field(repr=False)
    options: Mapping[str, Any]
    shown: str


def prefix_of(url: RemoteUrl) -> str:
    """What the names of a deployment's values begin with."""
    prefix: str = url.options.get("prefix", "hkv")
    return prefix
