"""Reads `--hier-kv-remote-url`.

What is wrong with it is said at start, in one sentence, and secrets in it are never shown.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.password import read_password, refuse_inline
from sglang_ext.tiers.remote.registry import scheme_options

_FLAG = "--hier-kv-remote-url"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_PORT = 65535
_MAX_DATABASE = 99_999
_MAX_SIZE_BYTES = 1 << 60
_MIN_FOLDER_BYTES = 64 << 10
_MIN_LIFE_S, _MAX_LIFE_S = 1.0, 3650 * 86400.0
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 0.001, 86400.0
# A name that does not fit in the domain name system cannot even be looked up.
_MAX_HOST_CHARS, _MAX_LABEL_CHARS = 253, 63
_SHOWN_CHARS = 60


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
    if not _is_number(text, 64) or int(text) < 1:
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


def _is_number(text: str, most: int) -> bool:
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


# What every scheme may say; `StoreConfig` of store.py has what they mean.
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


def parse_remote_url(text: str) -> RemoteUrl:
    """Reads a URL and checks all that can be checked without asking the store.

    Raises:
        TierConfigError: one sentence; secrets are not in it.
    """
    if not text.isprintable() or any(character.isspace() for character in text):
        raise TierConfigError(f"{_FLAG} must have no spaces or control characters in it")
    try:
        parts = urlsplit(text)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        # The error's own text repeats the host's part of the URL, where a password may stand.
        raise TierConfigError(
            f"{_FLAG} must be SCHEME://PLACE?NAME=VALUE&..., and this cannot be read as one"
        ) from None
    if "://" not in text:
        raise TierConfigError(
            f"{_FLAG} must be SCHEME://PLACE, such as redis://HOST:PORT or file:///FOLDER"
        )
    options = scheme_options(parts.scheme)
    if "@" not in parts.netloc and "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise TierConfigError(
            f"{_FLAG}: '/', '?', '#' and '@' in a user or a path are written %2F, %3F, %23, %40"
        )
    if parts.fragment:
        raise TierConfigError(f"{_FLAG} must have no '#'; write %23 where one is meant")
    login, at, place = parts.netloc.rpartition("@")
    if at and not options.has_login:
        raise TierConfigError(f"{_FLAG}: a {parts.scheme}:// URL has no USER@")
    refuse_inline(login)
    values = _read_query(parts.scheme, query, options)
    hosts = _read_hosts(parts.scheme, place, options)
    path = _read_path(parts.scheme, unquote(parts.path), options)
    password = read_password(values.get("password-file")) if options.has_login else ""
    shown = f"{parts.scheme}://{'***@' if at else ''}{place}{parts.path}"
    return RemoteUrl(parts.scheme, hosts, path, unquote(login), password, values, shown)


def _read_query(scheme: str, query: list[tuple[str, str]], options: Options) -> dict[str, Any]:
    readers = {**COMMON_READERS, **options.readers}
    values: dict[str, Any] = {}
    for name, text in query:
        if name not in readers:
            known = ", ".join(sorted(readers))
            raise TierConfigError(
                f"{_FLAG}: a {scheme}:// URL has no option {_cut(name)}; there are {known}"
            )
        if name in values:
            raise TierConfigError(f"{_FLAG}: option {name!r} is given twice")
        # Who takes `password-file` for the password itself must not find it in a log.
        got = "" if name == "password-file" or "@" in text else f", got {_cut(text)}"
        if not text.isprintable():
            raise TierConfigError(f"{_FLAG}: {name} must be printable text{got}")
        try:
            values[name] = readers[name](text)
        except ValueError as error:
            raise TierConfigError(f"{_FLAG}: {name} must be {error}{got}") from None
    return values


def _cut(text: str) -> str:
    """What was given, for a message."""
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def _read_hosts(scheme: str, place: str, options: Options) -> tuple[tuple[str, int], ...]:
    if options.max_hosts == 0:
        if place not in ("", "localhost"):
            raise TierConfigError(
                f"{_FLAG}: a {scheme}:// URL has three slashes and no host, got host {_cut(place)}"
            )
        return ()
    given = place.split(",")
    if len(given) > options.max_hosts:
        raise TierConfigError(
            f"{_FLAG}: a {scheme}:// URL has at most {options.max_hosts} HOST:PORT, got"
            f" {len(given)}"
        )
    return tuple(_read_host(scheme, text, options.default_port) for text in given)


def _read_host(scheme: str, text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(.*))?", text)
    if match is None:
        raise TierConfigError(
            f"{_FLAG}: a {scheme}:// URL names its host as HOST:PORT, of letters, digits, dots and"
            " hyphens"
        )
    host = match[1].strip("[]")
    labels = host.removesuffix(".").split(".")
    if len(host) > _MAX_HOST_CHARS or not all(
        1 <= len(part) <= _MAX_LABEL_CHARS for part in labels
    ):
        raise TierConfigError(
            f"{_FLAG}: a host's name has at most {_MAX_HOST_CHARS} letters, {_MAX_LABEL_CHARS}"
            " between two dots and none of them empty; correct it"
        )
    port = match[2]
    if port is None:
        return host, default_port
    if not _is_number(port, _MAX_PORT) or int(port) < 1:
        # No number, and it may be a password whose @HOST was left out.
        got = f", got {port}" if _is_number(port, 999_999_999) else ""
        raise TierConfigError(f"{_FLAG}: a port is a number from 1 to {_MAX_PORT}{got}")
    return host, int(port)


def _read_path(scheme: str, path: str, options: Options) -> str:
    if not path.isprintable():
        raise TierConfigError(f"{_FLAG}: the path of a {scheme}:// URL must be printable text")
    if options.path == "folder":
        if not path.startswith("/") or path == "/":
            raise TierConfigError(
                f"{_FLAG}: a {scheme}:// URL names a folder, as in {scheme}:///mnt/kv, got"
                f" {_cut(path)}"
            )
        return path
    path = path.removeprefix("/")
    if options.path == "db" and (not path or _is_number(path, _MAX_DATABASE)):
        return path
    if path:
        raise TierConfigError(
            f"{_FLAG}: a {scheme}:// URL ends with its port, got {_cut('/' + path)}"
        )
    return path
