"""``python -m bench CASE``: runs a benchmark, prints tables, writes one JSON object."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.core import trace_flags
from bench.core.case import (
    ALLOW_DIRTY,
    CASES,
    OUT_DIR,
    Options,
    commit_header,
    run_case,
)
from bench.core.machine import describe_machine
from bench.core.output import Progress
from bench.core.reporting import exit_status, print_report, write_json


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.trace = trace_flags.parse(parser, args)
    names = [args.case] if args.case != "all" else _all_that_run_here()
    objects: dict[str, dict[str, Any]] = {}

    def run() -> None:
        commit_header()  # before minutes of work, not after
        with Progress() as progress:
            for name in names:
                progress.stage(f"{name}: {CASES[name].summary}")
                objects[name], report = run_case(name, options(args, progress))
                progress.done()
                print_report(name, report)
        result = objects[args.case] if args.case != "all" else _merged(objects)
        write_json(args.json or OUT_DIR / f"{args.case}.json", result)

    return exit_status(run)


def _all_that_run_here() -> list[str]:
    has_cuda = torch.cuda.is_available()
    return [name for name, case in CASES.items() if has_cuda or not case.needs_cuda]


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(_case_help(name) for name in CASES)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measures the plugin on this machine. Servers run on the CPU runtime.",
        epilog=f"cases, and the keys of `results` in their JSON:\n{cases}\n\n"
        "The JSON holds case, commit, machine, n, samples (the raw values behind every ratio) and\n"
        "results. Plots go to build/bench/. A tree with uncommitted changes is refused, unless\n"
        f'{ALLOW_DIRTY}=1 is set; the JSON then has "dirty": true. A case whose own correctness\n'
        "check fails reports nothing and exits with 1. Run it on an otherwise idle machine:\n"
        "the server and the load share its cores.\n\n"
        "examples:\n"
        "  python -m bench tiers --quick\n"
        "  python -m bench serve --json build/serve.json",
    )
    parser.add_argument("case", choices=[*CASES, "all"], help="what to measure")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions, at most 4 minutes, the same keys"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="codec: a Hugging Face model instead of tinylm"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="codec: text; 60 %% calibrates, the rest tests"
    )
    trace_flags.add_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: build/bench/CASE.json")
    return parser


def options(args: argparse.Namespace, progress: Progress) -> Options:
    """What the command line says of how to run a case."""
    return Options(
        args.quick, progress, model=args.model, text=args.text, trace=args.trace,
        prefetch_policy=args.prefetch_policy, chunk_tokens=args.chunked_prefill_size,
    )  # fmt: skip


def _case_help(name: str) -> str:
    case = CASES[name]
    keys = textwrap.fill(
        case.keys, 92, initial_indent=" " * 10, subsequent_indent=" " * 10, break_long_words=False
    )
    return f"  {name:8} {case.summary}\n{keys}"


def _merged(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "case": "all",
        **commit_header(),
        "machine": describe_machine(),
        **{
            part: {name: each[part] for name, each in objects.items()}
            for part in ("n", "samples", "results")
        },
    }


if __name__ == "__main__":
    sys.exit(main())
