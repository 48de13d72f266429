"""From a report to the reader: what is printed, the JSON file, the exit status."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.core.case import BadInputError, DirtyTreeError, Report, report_object
from bench.core.output import Progress
from sglang_ext.simulator.trace import TraceError
from testkit.errors import UnexpectedAnswerError


def exit_status(run: Callable[[], None]) -> int:
    """Runs a bench; 0, or 1 (its own check failed) or 2 (it was called wrongly) and the reason."""
    try:
        run()
    except (DirtyTreeError, BadInputError, TraceError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except UnexpectedAnswerError as error:
        print(f"bench: no report, the case's own check failed: {error}", file=sys.stderr)
        return 1
    return 0


def print_report(name: str, report: Report) -> None:
    """Prints tables and notes; the results as JSON where there is no table."""
    for table in report.tables:
        print(f"\n{table.render()}")
    for note in report.notes:
        print(textwrap.fill(note, 100, initial_indent="\n", break_on_hyphens=False))
    if not report.tables:
        print(f"\n{name}\n{json.dumps(report.results, indent=1)}")
    sys.stdout.flush()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{path}")


def run_alone(name: str, make: Callable[[Progress], Report], path: Path | None) -> int:
    """Runs a bench that is a command of its own, not a case; returns the exit status.

    Args:
        name: of the bench.
        make: measures.
        path: where to write the JSON; None for nowhere.
    """

    def run() -> None:
        with Progress() as progress:
            progress.stage(name)
            result, report = report_object(name, lambda: make(progress))
        print_report(name, report)
        if path is not None:
            write_json(path, result)

    return exit_status(run)
