"""Per-request report: how many prompt tokens were reused from which tier.

SGLang's message to its front process types ``cached_tokens_details`` as a flat dict of numbers and
strings, so the nested ``hier_kv`` object crosses as JSON text and is unpacked on the other side.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sglang_ext.tiers.records.quality import Quality

DETAILS_KEY = "hier_kv"


def pack_details(details: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any]:
    """Adds the plugin's report to SGLang's own; in the scheduler process.

    Args:
        details: SGLang's, or None where it has none.
        report: reused tokens by tier; `missed`, tokens that were stored once and computed again,
            by reason; and `quality`, `exact` or `lossy`: the worst of those reused, when any was
            not exact or the request asked for exact ones only.
    """
    packed: dict[str, Any] = dict(details or {})
    # SGLang's own three, for its metrics and its clients: they add up to what was reused.
    packed["device"], packed["host"] = report["device"], report["host"]
    packed["storage"] = report["disk"] + report["remote"]
    packed["storage_backend"] = DETAILS_KEY
    packed[DETAILS_KEY] = json.dumps(report)
    return packed


def pack_quality(details: dict[str, Any] | None, quality: str) -> dict[str, Any]:
    """The same of a decode server, which knows what its KV is worth, and not where it lay.

    Args:
        details: SGLang's, with what the prefill server sent; or None where it has none.
        quality: `exact` or `lossy`: the worst of what was sent and of what was here.
    """
    # The field that clients read; the number behind the name grows as KV gets worse.
    return {**(details or {}), DETAILS_KEY: json.dumps({"quality": quality})}


def unpack_details(self: Any, recv_obj: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of ``TokenizerManager._handle_batch_output``: JSON text -> dict, in place."""
    for details in getattr(recv_obj, "cached_tokens_details", None) or ():
        if details and isinstance(details.get(DETAILS_KEY), str):
            details[DETAILS_KEY] = json.loads(details[DETAILS_KEY])


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for each in counts:
        sums.update(each)
    return dict(sums)


def merge_reports(reports: Collection[dict[str, Any]]) -> dict[str, Any]:
    """The report of several prompts: sums of tokens, and the worst quality where any is told."""
    merged: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            if isinstance(value, int):
                merged[name] = merged.get(name, 0) + value
    missed = _sums(report.get("missed", {}) for report in reports)
    if missed:
        merged["missed"] = missed
    named = [Quality[report["quality"].upper()] for report in reports if "quality" in report]
    return {**merged, "quality": max(named).name.lower()} if named else merged
