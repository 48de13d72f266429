"""Engines by URL scheme. An engine's module is imported only when its scheme is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.base import RemoteEngine
from sglang_ext.tiers.remote.url_options import Options, RemoteUrl

_PACKAGE = "sglang_ext.tiers.remote.engines"
_ENGINES: dict[str, str] = {
    "redis": f"{_PACKAGE}.redis_engine",
    "rediss": f"{_PACKAGE}.redis_engine",
    "mooncake": f"{_PACKAGE}.mooncake_engine",
    "file": f"{_PACKAGE}.file_engine",
}


def register_engine(scheme: str, module: str) -> None:
    """Registers a module as the home of the engine for a scheme.

    Args:
        scheme: lower case letters.
        module: name of a module that has `options(scheme) -> Options` and
            `open_engine(url) -> RemoteEngine`.

    Raises:
        ValueError: the scheme is taken, or is not one.
    """
    if scheme in _ENGINES:
        raise ValueError(f"scheme {scheme!r} is already registered as {_ENGINES[scheme]!r}")
    if not scheme.isalpha() or not scheme.islower():
        raise ValueError(f"a scheme is lower case letters, got {scheme!r}")
    _ENGINES[scheme] = module


def engine_schemes() -> tuple[str, ...]:
    """Returns the registered schemes, sorted."""
    return tuple(sorted(_ENGINES))


def scheme_options(scheme: str) -> Options:
    """Returns the options that a URL of this scheme may have.

    Raises:
        TierConfigError: no engine has this scheme.
    """
    options: Options = _module(scheme).options(scheme)
    return options


def open_engine(url: RemoteUrl) -> RemoteEngine:
    """Makes the engine of a URL. Does not connect: a store that is down is no error here.

    Raises:
        TierConfigError: the engine cannot work as asked, or a package that it needs is not there.
    """
    engine: Any = _module(url.scheme).open_engine(url)
    if not isinstance(engine, RemoteEngine):
        raise TypeError(f"{_ENGINES[url.scheme]} must make a RemoteEngine, got {type(engine)}")
    return engine


def _module(scheme: str) -> Any:
    if scheme not in _ENGINES:
        known = ", ".join(name + "://" for name in engine_schemes())
        raise TierConfigError(
            f"--hier-kv-remote-url must begin with one of {known}, got {scheme + '://'!r}"
        )
    return importlib.import_module(_ENGINES[scheme])
