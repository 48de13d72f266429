"""The records that a store's values make: each a first value and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.record import VerifyResult
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.records.soundness import Soundness, soundness_of
from sglang_ext.tiers.remote.base import RemoteKey, key_of_name
from sglang_ext.tiers.remote.offline.listing import Listing, StoredValue
from sglang_ext.tiers.remote.record_values import (
    MAX_PART_BYTES,
    checked_facts,
    has_too_many_parts,
    part_names,
)


@dataclass(slots=True)
class StoredRecord:
    """What lies under one key, whole or not.

    Attributes:
        key: what it is.
        first: its first value; None where only parts are there, of a record that is being stored
            or was evicted.
        parts: the others.
    """

    key: RemoteKey
    first: StoredValue | None = None
    parts: dict[str, StoredValue] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What it takes in the store."""
        parts = sum(part.num_bytes for part in self.parts.values())
        return parts + (self.first.num_bytes if self.first else 0)

    @property
    def age_s(self) -> float | None:
        """Seconds since it was stored or read; of parts alone, of the youngest."""
        if self.first is not None:
            return self.first.age_s
        ages = [part.age_s for part in self.parts.values() if part.age_s is not None]
        return min(ages, default=None)

    @property
    def names(self) -> list[str]:
        """Of its values, the first one first: without it the parts are nothing."""
        return [*([self.first.name] if self.first else []), *self.parts]


def find_records(listing: Listing, prefix: str) -> list[StoredRecord]:
    """Every record of a deployment; values that are not named as ours are not looked at.

    Raises:
        RemoteError, OSError: the store does not say.
    """
    found: dict[RemoteKey, StoredRecord] = {}
    for value in listing.values():
        parsed = key_of_name(prefix, value.name)
        if parsed is None:
            continue
        key, is_part = parsed
        record = found.setdefault(key, StoredRecord(key))
        if is_part:
            record.parts[value.name] = value
        else:
            record.first = value
    return list(found.values())


def check_record(
    listing: Listing, record: StoredRecord, seals: RecordSeals
) -> tuple[Soundness, str] | None:
    """Reads a record and says what it is, and why; None where it is not there any more.

    Raises:
        RemoteError: the store failed.
    """
    try:
        return _check(listing, record, seals)
    except OSError:
        return Soundness.UNREADABLE, "io_read"
    except MemoryError:
        return Soundness.UNREADABLE, "no_memory"


def _check(
    listing: Listing, record: StoredRecord, seals: RecordSeals
) -> tuple[Soundness, str] | None:
    if record.first is None:
        return None
    if not 0 <= record.first.num_bytes <= MAX_PART_BYTES:
        return Soundness.CORRUPT, "too_long"
    start = np.empty(record.first.num_bytes, np.uint8)
    start = start[: listing.read(record.first.name, start)]
    if not start.size:
        return None
    facts = checked_facts(start, record.key, seals=seals)
    if isinstance(facts, VerifyResult):
        if seals.is_hidden(start):
            return Soundness.UNREADABLE, "encrypted"
        return soundness_of(facts), facts.value
    if has_too_many_parts(facts, start.size):
        return Soundness.CORRUPT, VerifyResult.BAD_HEADER.value
    names = part_names(record.first.name, facts, start.size)
    whole = np.empty(0, np.uint8)
    # So no more memory is taken than lies there. A server may have stored others since the list.
    if all(name in record.parts or listing.read(name, np.empty(1, np.uint8)) for name in names):
        whole = np.empty(facts.total_bytes, np.uint8)
        whole[: start.size] = start[: whole.size]
    for number, name in enumerate(names, start=1):
        part = whole[number * start.size : (number + 1) * start.size]
        if not part.size or listing.read(name, part) != part.size:
            return Soundness.CORRUPT, "incomplete"
    key = RecordKey(record.key.page_hash, record.key.namespace, record.key.lora)
    (result,) = seals.open([whole], [key])
    return soundness_of(result), result.value
