"""`hier-kv inspect` of a disk tier's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.cli.progress import Progress
from sglang_ext.cli.server_stats import amount, number_of
from sglang_ext.tiers.disk.offline.contents import BEING_WRITTEN, Contents, count_contents
from sglang_ext.tiers.disk.offline.survey import find_segments, holders, tier_folders
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.recovery import SegmentState
from sglang_ext.tiers.records.seals import RecordSeals

_STATES = {
    SegmentState.SEALED.value: "sealed",
    SegmentState.RESEALED.value: "never sealed (the next server does it)",
    SegmentState.EMPTY.value: "empty",
    SegmentState.DAMAGED_FOOTER.value: "with a damaged table",
    SegmentState.LOCKED.value: "of another key, or of none (--key-file)",
    SegmentState.FOREIGN.value: "no segments of this namespace, or damaged",
    SegmentState.FUTURE.value: "of a later release",
    SegmentState.UNREADABLE.value: "unreadable",
    BEING_WRITTEN: "being written",
}


def inspect_folder(root: Path, seals: RecordSeals) -> dict[str, Any]:
    """What lies in a folder, as JSON has it.

    Raises:
        TierConfigError: it is no folder of a disk tier.
        OSError: it cannot be read.
    """
    io, folders = FileIO(), tier_folders(root)
    holder = holders(io, root, folders)
    found = [(folder, *find_segments(io, folder)) for folder in folders]
    total = sum(segment.num_bytes for _, _, segments in found for segment in segments)
    progress = Progress("looked at", total, has_lines=False)
    ranks = []
    for folder, namespaces, segments in found:
        contents = count_contents(
            io, namespaces, segments, seals, has_server=bool(holder), on_bytes=progress
        )
        ranks.append({"folder": str(folder), "namespaces": [_facts(each) for each in contents]})
    progress.end()
    return {"folder": str(root), "held_by": holder, "ranks": ranks}


def lines_of_folder(facts: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    namespaces = [each for rank in facts["ranks"] for each in rank["namespaces"]]
    names = ("segments", "bytes", "pages", "pages_being_written")
    total = {name: sum(each[name] for each in namespaces) for name in names}
    holder = facts["held_by"]
    counted = number_of(total["pages"] + total["pages_being_written"], "page")
    counted += f" in {number_of(total['segments'], 'segment')}, {amount(total['bytes'])} in all"
    held = f"{holder} holds it" if holder else "no server holds it"
    lines = [f"{facts['folder']}: {counted}, namespaces: {len(namespaces)}; {held}"]
    for rank in facts["ranks"]:
        if len(facts["ranks"]) > 1:
            lines.append(f"{rank['folder']}:")
        for each in rank["namespaces"]:
            lines += _lines_of(each)
    return lines


def _facts(contents: Contents) -> dict[str, Any]:
    namespace = contents.namespace
    return {
        "namespace": namespace.digest.hex(),
        "folder": namespace.path.name,
        "label": {str(name): str(value) for name, value in namespace.label.items()},
        "slot_bytes": namespace.slot_bytes,
        "segments": contents.segments,
        "bytes": contents.num_bytes,
        "states": dict(contents.states),
        "pages": contents.pages,
        "pages_being_written": contents.pages_being_written,
        "page_bytes": contents.page_bytes,
        "qualities": dict(contents.qualities),
        "codecs": dict(contents.codecs),
        "adapters": dict(contents.adapters),
        "free_slots": contents.free_slots,
        "free_bytes": contents.free_bytes,
        "oldest_s": contents.oldest_s,
        "newest_s": contents.newest_s,
    }


def _lines_of(facts: Mapping[str, Any]) -> list[str]:
    states = {_STATES.get(name, name): num for name, num in facts["states"].items()}
    adapters = {name or "none": num for name, num in facts["adapters"].items()}
    underway = facts["states"].get(BEING_WRITTEN, 0)
    pages = [f"{facts['pages']:,}, {amount(facts['page_bytes'])} in all"]
    if underway:
        pages.append(f"{facts['pages_being_written']:,} in what is being written, at this moment")
    is_counted = facts["segments"] > underway  # else nothing is known but those pages
    free = f"{amount(facts['free_bytes'])} of places without a page"
    if facts["free_slots"]:
        free += f", among them {number_of(facts['free_slots'], 'whole slot')}"
    rows = {
        "label": ", ".join(f"{name} {value}" for name, value in facts["label"].items()),
        "segments": f"{facts['segments']:,}, {amount(facts['bytes'])} in all: {_named(states)}",
        "pages": "; ".join(pages if is_counted else pages[1:]),
        "quality": _named(facts["qualities"]),
        "codec": _named(facts["codecs"]),
        "adapter": _named(adapters),
        "free": free if is_counted else "",
        "used": f"oldest segment {_time(facts['oldest_s'])}, newest {_time(facts['newest_s'])}",
    }
    if not facts["segments"]:
        rows = {"label": rows["label"], "segments": "none"}
    heading = f"namespace {facts['namespace'] or facts['folder'] + '... (its digest is not known)'}"
    return [heading, *(f"  {name:9}{text}" for name, text in rows.items() if text)]


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num:,} {name}" for name, num in counts.items())


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
