"""Reads `--hier-kv-remote-url`.

What is wrong with it is said at start, in one sentence, and secrets in it are never shown.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.password import read_password, refuse_inline
from sglang_ext.tiers.remote.registry import scheme_options
from sglang_ext.tiers.remote.url_options import COMMON_READERS, Options, RemoteUrl, is_number

_FLAG = "--hier-kv-remote-url"
_MAX_DATABASE = 99_999
_MAX_PORT = 65535
# A name that does not fit in the domain name system cannot even be looked up.
_MAX_HOST_CHARS, _MAX_LABEL_CHARS = 253, 63
_SHOWN_CHARS = 60


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
    if not is_number(port, _MAX_PORT) or int(port) < 1:
        # No number, and it may be a password whose @HOST was left out.
        got = f", got {port}" if is_number(port, 999_999_999) else ""
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
    if options.path == "db" and (not path or is_number(path, _MAX_DATABASE)):
        return path
    if path:
        raise TierConfigError(
            f"{_FLAG}: a {scheme}:// URL ends with its port, got {_cut('/' + path)}"
        )
    return path
