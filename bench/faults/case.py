"""The case `faults`: damage and kills, as `bench.faults` injects them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from bench.core.case import CaseFailedError, Options, Report, with_samples
from bench.core.output import Table

MAX_STALL_MS = 100.0
_COLUMNS = ("injected", "wrong_tokens", "failed_requests", "lost_acknowledged_pages")


def run(options: Options) -> Report:
    """Runs the injections; refuses to report when any did harm.

    Raises:
        CaseFailedError: a fault led to wrong tokens, a failed request, a lost acknowledged page or
            a stall of the scheduler.
    """
    found: Mapping[str, object] = importlib.import_module("bench.faults").run(options.quick)
    report = with_samples(found.get("results", found))  # type: ignore[arg-type]
    by_kind = report.results["by_kind"]
    table = Table("faults", ("kind", *_COLUMNS))
    for kind, counts in by_kind.items():
        table.rows.append((kind, *(counts[column] for column in _COLUMNS)))
        report.n.setdefault(kind, counts["injected"])
    report.tables.append(table)
    harmful = [kind for kind, counts in by_kind.items() if any(counts[c] for c in _COLUMNS[1:])]
    stall_ms = report.results["max_scheduler_stall_ms"]
    if harmful or stall_ms > MAX_STALL_MS:
        print(table.render())
        if harmful:
            raise CaseFailedError(
                f"tokens were wrong, requests failed or pages were lost after {', '.join(harmful)}"
            )
        raise CaseFailedError(
            f"I/O held the scheduler up for {stall_ms:.0f} ms, at most {MAX_STALL_MS:.0f} are"
            f" allowed: {report.results['stalls']}"
        )
    return report
