"""`hier-kv inspect` of a store that servers share."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_ext.cli.server_stats import amount, number_of
from sglang_ext.cli.usage import of_the_command_line
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote import RemoteUrl, open_listing, parse_remote_url
from sglang_ext.tiers.remote.base import RemoteError
from sglang_ext.tiers.remote.offline.listing import Listing
from sglang_ext.tiers.remote.offline.stored_records import StoredRecord, find_records
from sglang_ext.tiers.remote.url_options import prefix_of


@contextlib.contextmanager
def opened_store(text: str) -> Iterator[tuple[RemoteUrl, Listing, list[StoredRecord]]]:
    """A URL as read, its store, and the records in it.

    Raises:
        UsageError: the URL cannot work.
        TierConfigError: the store does not say what lies in it.
        OSError: a folder cannot be read.
    """
    with of_the_command_line():
        url = parse_remote_url(text)
    listing = open_listing(url)
    try:
        yield url, listing, find_records(listing, prefix_of(url))
    except RemoteError as error:
        raise TierConfigError(
            f"{url.shown} cannot be looked at ({error}); is it up, and its URL and password right?"
        ) from error
    finally:
        listing.close()


def inspect_store(text: str) -> dict[str, Any]:
    """What lies in a store, as JSON has it.

    Raises:
        UsageError, TierConfigError, OSError: as `opened_store`.
    """
    with opened_store(text) as (url, _, records):
        namespaces: dict[str, list[StoredRecord]] = {}
        for record in records:
            namespaces.setdefault(record.key.namespace.hex(), []).append(record)
        return {
            "store": url.shown,
            "prefix": prefix_of(url),
            "namespaces": [_facts(name, found) for name, found in sorted(namespaces.items())],
        }


def lines_of_store(facts: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    namespaces = facts["namespaces"]
    records = sum(each["records"] for each in namespaces)
    num_bytes = sum(each["bytes"] for each in namespaces)
    counted = f"{number_of(records, 'record')}, {amount(num_bytes)} in all"
    place = f"{facts['store']}, prefix {facts['prefix']}"
    lines = [f"{place}: {counted}, namespaces: {len(namespaces)}"]
    for each in namespaces:
        lines.append(f"namespace {each['namespace']}")
        lines += [
            f"  {kind:16}{found['records']:,}, {amount(found['bytes'])} in all"
            for kind, found in each["kinds"].items()
        ]
        if each["parts_alone"]:
            alone = number_of(each["parts_alone"], "record")
            lines.append(f"  {alone} of which only later parts are there")
        if each["oldest_s"] is not None:
            youngest, oldest = _ago(each["newest_s"]), _ago(each["oldest_s"])
            lines.append(f"  stored or read from {oldest} to {youngest} ago")
    return lines


def _facts(namespace: str, records: list[StoredRecord]) -> dict[str, Any]:
    whole = [record for record in records if record.first is not None]
    counts, sizes = Counter[str](), Counter[str]()
    for record in whole:
        counts[record.key.level] += 1
        sizes[record.key.level] += record.num_bytes
    ages = [record.age_s for record in whole if record.age_s is not None]
    return {
        "namespace": namespace,
        "records": len(whole),
        "bytes": sum(record.num_bytes for record in records),
        "kinds": {kind: {"records": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)},
        "parts_alone": len(records) - len(whole),
        "oldest_s": max(ages, default=None),
        "newest_s": min(ages, default=None),
    }


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
