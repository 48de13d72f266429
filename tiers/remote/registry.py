"""Engines by URL scheme. An engine's module is imported only when its scheme is asked for.

A new store is a module in `engines/` as `EngineModule` says, with a `RemoteEngine` (`base.py`), and
its line here, or the entry point of another package (`sglang_ext/registry.py`). One that comes with
the plugin is named in the help of `--hier-kv-remote-url`, too (`settings/config.py`), and its
server is in `SERVERS` of `tests/tiers/remote/test_store_conformance.py`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from sglang_ext.registry import Registry
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.base import RemoteEngine
from sglang_ext.tiers.remote.offline.listing import Listing
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

register_engine = _ENGINES.register
engine_schemes = _ENGINES.ids


class EngineModule(Protocol):
    """The target of a scheme: a module with these functions.

    If the store can list what lies in it, it has `open_listing(url: RemoteUrl) -> Listing` as well,
    which connects to nothing.
    """

    def options(self, scheme: str) -> Options:
        """The options that a URL of this scheme may have."""

    def open_engine(self, url: RemoteUrl) -> RemoteEngine:
        """Makes the engine of a URL. Does not connect: a store that is down is no error here.

        Raises:
            TierConfigError: the engine cannot work as asked, or a package that it needs is not
                there.
        """


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


def open_listing(url: RemoteUrl) -> Listing:
    """Makes the list of a URL's values. Does not connect.

    Raises:
        TierConfigError: the store has none, or cannot be used as asked.
    """
    module = _module(url.scheme)
    if not hasattr(module, "open_listing"):
        raise TierConfigError(
            f"what lies in {url.shown} cannot be known: a {url.scheme}:// store gives a value to"
            " who knows its name, and lists no names; look at the store's own metrics"
        )
    listing: Listing = module.open_listing(url)
    return listing


def _module(scheme: str) -> Any:
    if scheme not in engine_schemes():
        known = ", ".join(name + "://" for name in engine_schemes())
        raise TierConfigError(
            f"--hier-kv-remote-url must begin with one of {known}, got {scheme + '://'!r}"
        )
    return _ENGINES.load(scheme)
