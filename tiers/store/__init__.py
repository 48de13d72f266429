"""The page store: which pages lie in DRAM and on disk, and how they move between the two.

`page_store.py` is the facade. `directory.py` holds the state of every page under one lock,
`spiller.py` writes pages to disk, `promoter.py` reads them back, `types.py` has the words that the
parts share; `gate.py` is the door to the device. Everything here moves bytes; what is in a page is
the plugin's business.
"""

from sglang_ext.tiers.store.gate import LivePages
from sglang_ext.tiers.store.page_store import PageStore, StoreConfig
from sglang_ext.tiers.store.types import (
    Epoch,
    KeySpace,
    LoadTicket,
    Plan,
    SaveTicket,
    TierCounts,
)

__all__ = [
    "Epoch",
    "KeySpace",
    "LivePages",
    "LoadTicket",
    "PageStore",
    "Plan",
    "SaveTicket",
    "StoreConfig",
    "TierCounts",
]
