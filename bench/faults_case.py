"""The case `faults`: damage and kills, as `bench.faults` injects them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from bench.case import CaseFailedError, Options, Report, with_samples
from bench.output import Table

_COLUMNS = ("injected", "wrong_tokens", "failed_requests", "lost_acknowledged_pages")


def run(options: Options) -> Report:
    """Runs the injections; refuses to report when any led to wrong tokens.

    Raises:
        CaseFailedError: a fault led to wrong tokens.
    """
    found: Mapping[str, object] = importlib.import_module("bench.faults").run(options.quick)
    report = with_samples(found.get("results", found))  # type: ignore[arg-type]
    by_kind = report.results["by_kind"]
    table = Table("faults", ("kind", *_COLUMNS))
    for kind, counts in by_kind.items():
        table.rows.append((kind, *(counts[column] for column in _COLUMNS)))
        report.n.setdefault(kind, counts["injected"])
    report.tables.append(table)
    wrong = [kind for kind, counts in by_kind.items() if counts["wrong_tokens"]]
    if wrong:
        print(table.render())
        raise CaseFailedError(f"wrong tokens were served after {', '.join(wrong)}")
    return report
