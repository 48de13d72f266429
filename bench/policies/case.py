"""The case `policies`: what the queue's look-ahead is worth, simulated in virtual time.

The store, its policy and the waiting room are the server's own code; the machine, its clock and its
users are simulated (engine.py and virtual_store.py in sglang_ext/simulator). docs/policies.md tells
the workloads and reads the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.core.case import Options, Report
from bench.core.output import Table
from bench.core.trace_flags import TraceFlags
from bench.policies import sections
from bench.policies.checks import check_all
from bench.policies.jobs import POLICIES, VARIANTS, Job, Result, simulate_all
from bench.policies.overlap import measure_ratios, measure_read_buffer
from bench.policies.plan import (
    DISKS_GB,
    FULL,
    LOADS,
    QUICK,
    Sizes,
    chat_jobs,
    document_jobs,
    for_servers,
    session_jobs,
    trace_jobs,
)
from bench.policies.plots import plot_comparisons, plot_models, plot_sweep
from bench.policies.speed import decisions_per_s
from bench.policies.workloads.setups import (
    trace_at,
    trace_factor,
    trace_footprint,
    trace_system,
)
from sglang_ext.simulator.trace import Line, read_trace

_HEADLINE_JOB = "LLaMA-13B 128G/10T"
_COMPARED = {
    "trace": "published production trace",
    "agents": "agents",
    "documents": "documents (RAG)",
}


def run(options: Options) -> Report:
    """Simulates the paper's set-up and other workloads, or the trace that the options name.

    Raises:
        CaseFailedError: a simulation broke a law that holds for all of them.
        TraceError: the trace cannot be read.
    """
    if options.trace is not None:
        return _run_trace(options, options.trace)
    sizes = QUICK if options.quick else FULL
    jobs = for_servers(
        [*chat_jobs(sizes), *trace_jobs(sizes), *session_jobs(sizes), *document_jobs()],
        options.prefetch_policy,
        options.chunk_tokens,
    )
    options.progress.stage("policies: simulations")
    results = simulate_all(jobs, options.progress)
    check_all(jobs, results)
    report = _report(sizes, results)
    _add_speed(report, options)
    _plot(report, options.out_dir)
    return report


def _report(sizes: Sizes, results: Mapping[str, Result]) -> Report:
    buffer, buffer_table = measure_read_buffer()
    ratios, ratios_table = measure_ratios()
    parts = {
        "models": sections.models_section(results),
        "overflow": sections.overflow_section(results),
        "tiers": sections.tiers_section(results),
        "capacity": sections.capacity_section(results, sizes.capacity_ratios),
        "think_time": sections.think_section(results, sizes.thinks_s),
        "ratios": (ratios, [ratios_table]),
        "read_buffer": (buffer, [buffer_table]),
        "long_documents": sections.documents_section(results),
        **{
            name: sections.comparison_section(results, name, title)
            for name, title in _COMPARED.items()
        },
    }
    report = Report(
        sections.headline(results[_HEADLINE_JOB].figures),
        *_raw(results),
        [table for _, tables in parts.values() for table in tables],
    )
    report.results |= {name: values for name, (values, _) in parts.items()}
    report.results["sizes"] = {"scale": sizes.scale, "agents": sizes.agents,
                               "documents": sizes.documents}  # fmt: skip
    if sizes.scale < 1:
        report.notes.append(
            f"Quick: {sizes.scale:.2%} of the conversations with {sizes.scale:.2%} of the SSD and"
            f" {sizes.host_scale:.0%} of DRAM, one model, and the first part of the trace; one"
            " capacity of the other workloads. Only the full run is comparable with the paper."
        )
    return report


def _raw(results: Mapping[str, Result]) -> tuple[dict[str, Any], dict[str, int]]:
    """Every simulation's own numbers, and the turns behind each."""
    samples = {name: result.figures for name, result in results.items()}
    turns = {name: next(iter(each.values()))["num_turns"] for name, each in samples.items()}
    return {"simulations": samples}, turns


def _add_speed(report: Report, options: Options) -> None:
    options.progress.stage("policies: speed of a decision")
    speed = decisions_per_s()
    report.results["decisions_per_s"] = speed["decisions_per_s"]
    report.samples["decision_speed"] = speed
    report.tables.append(
        Table(
            "policy decisions, 1,000 waiting requests and 1 million pages",
            ("figure", "value"),
            [(name, value) for name, value in speed.items() if isinstance(value, (int, float))],
        )
    )


def _plot(report: Report, out_dir: Path) -> None:
    values = report.results
    plots = [
        plot_models(out_dir / "policies.png", values["models"], list(DISKS_GB)),
        plot_sweep(
            out_dir / "policies-capacity.png", "LLaMA-13B by capacity (4.3.5)",
            "capacity / CCpUT", values["capacity"], "ratio",
        ),
        plot_sweep(
            out_dir / "policies-think.png", "LLaMA-13B, 128G/10T, by think time",
            "mean think time, s", values["think_time"], "think_s",
        ),
        plot_comparisons(
            out_dir / "policies-workloads.png", {name: values[name] for name in _COMPARED}
        ),
    ]  # fmt: skip
    report.notes.append(f"plots: {', '.join(str(path) for path in plots)}")


def _run_trace(options: Options, flags: TraceFlags) -> Report:
    limit = QUICK.trace_requests if options.quick else None
    lines = read_trace(flags.path, limit=limit)
    system = trace_system(
        lines, flags.host_gb * 1e9, flags.disk_gb * 1e9,
        kv_bytes_per_token=flags.kv_bytes_per_token,
        prefill_tokens_per_s=flags.prefill_tokens_per_s,
    )  # fmt: skip
    factors = {"own times": 1.0}
    factors |= {f"load {load:g}": trace_factor(lines, system, load) for load in LOADS}
    jobs = [
        Job(name, partial(trace_at, flags.path, limit, factor), system, (*POLICIES, *VARIANTS))
        for name, factor in factors.items()
    ]
    jobs = for_servers(jobs, options.prefetch_policy, options.chunk_tokens)
    options.progress.stage("policies: simulations")
    results = simulate_all(jobs, options.progress)
    check_all(jobs, results)
    report = _trace_report(lines, flags, results)
    _add_speed(report, options)
    return report


def _trace_report(lines: list[Line], flags: TraceFlags, results: Mapping[str, Result]) -> Report:
    footprint_gb = trace_footprint(lines, flags.kv_bytes_per_token) / 1e9
    share = 100 * (flags.host_gb + flags.disk_gb) / footprint_gb
    table = Table(
        f"{flags.path.name}: {len(lines):,} requests, footprint {footprint_gb:,.0f} GB, DRAM and "
        f"SSD {share:.1f} % of it: hit rate %",
        ("times", "offered load", "look-ahead", "queue only", "returns only", "off", "LRU", "FIFO",
         "waiting, then LRU", "Belady", "gap closed %", "DRAM %", "queue"),
        [(name, each.offered_load, *sections.comparison_cells(each.figures))
         for name, each in results.items()],
    )  # fmt: skip
    values: dict[str, Any] = sections.headline(results["own times"].figures)
    values["by_load"] = {name: sections.point(result) for name, result in results.items()}
    values["footprint_gb"] = footprint_gb
    return Report(values, *_raw(results), [table])
