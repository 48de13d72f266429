"""`hier-kv prune URL`: removes records from a store that servers share.

Servers may use the store meanwhile: a record that was removed is a miss for them.
"""

from __future__ import annotations

import time

from sglang_ext.cli.server_stats import amount, number_of
from sglang_ext.cli.stored.choice import Choice, Removed
from sglang_ext.cli.stored.store_inspect import opened_store
from sglang_ext.tiers.errors import TierConfigError, TierError
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.records.soundness import is_damage
from sglang_ext.tiers.remote.base import RemoteKey
from sglang_ext.tiers.remote.offline.listing import Listing
from sglang_ext.tiers.remote.offline.stored_records import StoredRecord, check_record

_DIGITS = 16
"""Of a digest, for people; as in the names of a disk tier's folders."""


def prune_store(text: str, choice: Choice, seals: RecordSeals, *, is_dry: bool) -> Removed:
    """Removes what was chosen.

    Args:
        text: the URL.
        choice: what goes.
        seals: what proves records.
        is_dry: whether to say only what would go.

    Raises:
        UsageError: the URL cannot work.
        TierConfigError: the store fails.
        OSError: a folder cannot be read.
    """
    with opened_store(text) as (url, listing, records):
        if choice.before_s and any(record.age_s is None for record in records):
            raise TierConfigError(
                f"--older-than needs the time when each value was used last, and {url.shown} does"
                " not say it (Redis with an LFU policy counts uses instead); give --namespace,"
                " --damaged or --all"
            )
        removed = Removed(url.shown, is_dry)
        now_s = time.time()
        for record in records:
            if _goes(listing, record, choice, seals, now_s):
                _remove(listing, record, removed)
        return removed


def _goes(
    listing: Listing, record: StoredRecord, choice: Choice, seals: RecordSeals, now_s: float
) -> bool:
    if not choice.is_damaged:
        return choice.takes(record.key.namespace.hex(), now_s - (record.age_s or 0.0))
    found = check_record(listing, record, seals)
    return found is not None and is_damage(*found)


def _brief(key: RemoteKey) -> str:
    """A record's name as people read it: its digests by their first digits."""
    adapter = f" of adapter {key.lora.hex()[:_DIGITS]}" if key.lora else ""
    return f"{key.namespace.hex()[:_DIGITS]}/{key.page_hash.hex()[:_DIGITS]} {key.level}{adapter}"


def _remove(listing: Listing, record: StoredRecord, removed: Removed) -> None:
    names = record.names
    try:
        if not removed.is_dry:
            listing.remove(names)
        more = f" and {number_of(len(names) - 1, 'part')}" if len(names) > 1 else ""
        rest = f"{more}, {amount(record.num_bytes)}"
        is_whole = record.first is not None
        brief = f"{_brief(record.key)}{rest}"
        removed.add(f"{names[0]}{rest}", int(is_whole), record.num_bytes, brief=brief)
    except (TierError, OSError) as error:
        removed.fail(names[0], error)
