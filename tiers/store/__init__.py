"""The page store: which pages lie in DRAM and on disk, and how they move between the two.

`page_store.py` is the facade; `lookahead.py` has the scheduler's waiting queue. `books/` holds the
state of every page under one lock (`books.py`), `movers/` writes pages to disk (`spiller.py`) and
reads them back (`promoter.py`), `remote/` moves them to and from a remote store. `types.py` has the
words that the parts share, and `gate.py` stops what is of weights that are gone. Everything here
moves bytes; what is in a page is the plugin's business.
"""

from sglang_ext.tiers.store.books.lost_pages import Absence
from sglang_ext.tiers.store.books.write_policy import DEFAULT_POLICY, policy_for_sizes
from sglang_ext.tiers.store.gate import LivePages
from sglang_ext.tiers.store.page_store import PageStore, PageStoreConfig
from sglang_ext.tiers.store.remote.put_share import EVERY_PAGE, PutShare
from sglang_ext.tiers.store.types import (
    Epoch,
    KeySpace,
    LoadTicket,
    Plan,
    SaveTicket,
    TierCounts,
)

__all__ = [
    "DEFAULT_POLICY",
    "EVERY_PAGE",
    "Absence",
    "Epoch",
    "KeySpace",
    "LivePages",
    "LoadTicket",
    "PageStore",
    "PageStoreConfig",
    "Plan",
    "PutShare",
    "SaveTicket",
    "TierCounts",
    "policy_for_sizes",
]
