"""Engines by URL scheme. An engine's module is imported only when its scheme is asked for."""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.registry import Registry
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.base import RemoteEngine
from sglang_ext.tiers.remote.url_options import Options, RemoteUrl

_PACKAGE = "sglang_ext.tiers.remote.engines"
_ENGINES: Final = Registry(
    "remote store",
    "hier_kv.remote_engines",
    {
        "redis": f"{_PACKAGE}.redis_engine",
        "rediss": f"{_PACKAGE}.redis_engine",
        "mooncake": f"{_PACKAGE}.mooncake_engine",
        "file": f"{_PACKAGE}.file_engine",
    },
    is_id=lambda text: text.isalpha() and text.islower() and text.isascii(),
    id_rule="a scheme is lower case letters",
    error=TierConfigError,
)

# The target of a scheme is a module with `options(scheme) -> Options` and
# `open_engine(url) -> RemoteEngine`.
register_engine = _ENGINES.register
engine_schemes = _ENGINES.ids


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
        raise TierConfigError(
            f"the store of {url.scheme}:// must make a RemoteEngine, got {type(engine).__name__}"
        )
    return engine


def _module(scheme: str) -> Any:
    if scheme not in engine_schemes():
        known = ", ".join(name + "://" for name in engine_schemes())
        raise TierConfigError(
            f"--hier-kv-remote-url must begin with one of {known}, got {scheme + '://'!r}"
        )
    return _ENGINES.load(scheme)
