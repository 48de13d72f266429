"""The remote tier's stores: values that many servers share, behind one interface.

`remote_store.py` is the facade (`RemoteStore`), `base.py` the interface of an engine, `url.py`
reads `--hier-kv-remote-url`, `registry.py` finds the engine of a URL's scheme; the engines are in
`engines/`. docs/remote.md tells how to run their stores.
"""

from sglang_ext.tiers.remote.base import Outcome, RemoteKey, level_name
from sglang_ext.tiers.remote.items import GetRequest, GetResult, HeadResult, PutItem
from sglang_ext.tiers.remote.registry import (
    engine_schemes,
    open_engine,
    open_listing,
    register_engine,
)
from sglang_ext.tiers.remote.remote_store import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.url import parse_remote_url
from sglang_ext.tiers.remote.url_options import RemoteUrl

__all__ = [
    "GetRequest",
    "GetResult",
    "HeadResult",
    "Outcome",
    "PutItem",
    "RemoteKey",
    "RemoteStore",
    "RemoteStoreConfig",
    "RemoteUrl",
    "engine_schemes",
    "level_name",
    "open_engine",
    "open_listing",
    "parse_remote_url",
    "register_engine",
]
