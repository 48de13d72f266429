"""`hier-kv verify` of a store that servers share."""

from __future__ import annotations

from sglang_ext.cli.progress import Progress
from sglang_ext.cli.stored.store_inspect import opened_store
from sglang_ext.cli.stored.verdict import BadPlace, Verdict
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.records.soundness import Soundness
from sglang_ext.tiers.remote.offline.stored_records import check_record


def verify_store(text: str, seals: RecordSeals) -> Verdict:
    """Reads every record in a store.

    Raises:
        UsageError: the URL cannot work.
        TierConfigError: the store fails.
        OSError: a folder cannot be read.
    """
    with opened_store(text) as (url, listing, records):
        verdict = Verdict(url.shown)
        progress = Progress("read", sum(record.num_bytes for record in records))
        for record in records:
            progress(record.num_bytes)
            if record.first is None:
                verdict.left_out.append(f"{record.names[0]}: its first value is not there")
                continue
            found = check_record(listing, record, seals)
            if found is None:
                verdict.left_out.append(f"{record.first.name}: removed meanwhile")
            elif found[0] is Soundness.SOUND:
                verdict.sound += 1
            else:
                verdict.bad.append(BadPlace(found[0], record.first.name, found[1]))
        progress.end()
        return verdict
