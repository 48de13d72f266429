"""The case `serve`: what a user of the server sees, with the plugin and without."""

from __future__ import annotations

import shutil
from typing import Any

from bench.core.case import Options, Report, disk_folder
from bench.core.output import Table, format_number
from bench.core.plots import plot_distributions
from bench.core.stats import verdict
from bench.serve import overhead as serve_overhead
from bench.serve import ttft as serve_ttft
from bench.serve.exact import measure_exact
from bench.serve.overhead import CPU_TARGET, THROUGHPUT_TARGET, measure_overhead
from bench.serve.ttft import INTERCEPT_MS, SIDES, measure_ttft

_VISIBLE_TARGET = 1.5
_FACTORS = (10, 30)


def run(options: Options) -> Report:
    """Measures equality, times by tier, and cost without reuse.

    Raises:
        CaseFailedError: an answer differs from plain SGLang's, or a request was not served from
            the tier that its time would be reported for.
    """
    progress, quick = options.progress, options.quick
    with disk_folder("bench-serve-") as folder:
        progress.stage("serve: equality with plain SGLang")
        exact = measure_exact(folder / "exact", 8 if quick else 18, progress)
        progress.stage("serve: time to first token by tier")
        (folder / "ttft").mkdir()
        ttft = measure_ttft(
            folder / "ttft", 6 if quick else 60, progress, 60.0 if quick else float("inf")
        )
        shutil.rmtree(folder / "ttft")
        progress.stage("serve: cost without reuse")
        (folder / "overhead").mkdir()
        overhead = measure_overhead(
            folder / "overhead",
            3 if quick else 12,
            8 if quick else 12,
            progress,
            60.0 if quick else float("inf"),
        )
    report = _report(exact, ttft, overhead)
    longest = max(ttft["prefixes"], key=int)
    path = plot_distributions(
        options.out_dir / "serve.png",
        f"Time to first token behind a prefix of {int(longest):,} tokens, by where it lay",
        "milliseconds",
        {side: ttft["samples"]["ttft_ms"][longest][side] for side in SIDES},
    )
    report.notes.append(f"plot: {path}")
    return report


def _report(exact: dict[str, Any], ttft: dict[str, Any], overhead: dict[str, Any]) -> Report:
    prefixes = ttft["prefixes"]
    longest = prefixes[max(prefixes, key=int)]
    worst_host = max(prefixes.values(), key=lambda p: p["visible_load_host"])
    worst_disk = max(prefixes.values(), key=lambda p: p["visible_load_disk_less_intercept"])
    nothing = {"ttft_p50_ms": None, "ttft_p95_ms": None, "hit_tokens": None}
    results: dict[str, Any] = {
        **{side: longest[side] for side in ("device", "host", "disk")},
        "remote": nothing,
        "recompute": longest["recompute"],
        "visible_load_host": worst_host["visible_load_host"],
        "visible_load_disk": worst_disk["visible_load_disk"],
        "visible_load_disk_less_5_ms": worst_disk["visible_load_disk_less_intercept"],
        "recompute_over_host": longest["recompute_over_host"],
        "recompute_over_disk": longest["recompute_over_disk"],
        "greedy_match": exact["greedy_match"],
        "logprob_match": exact["logprob_match"],
        **{key: value for key, value in overhead.items() if key not in ("samples", "counters")},
        "recompute_over_memcpy": {
            tokens: figures["recompute_over_memcpy"] for tokens, figures in prefixes.items()
        },
        "memcpy_gb_s": ttft["memcpy_gb_s"],
        "raw_disk_read_gb_s": ttft["raw_read_gb_s"],
        "disk_mode": ttft["disk_mode"],
        "by_prefix": prefixes,
        "exact": exact["by_tier"],
        "models": {
            "ttft": serve_ttft.MODEL.describe(),
            "overhead": serve_overhead.MODEL.describe(),
        },
    }
    n = {
        "exact": sum(tier["answers"] for tier in exact["by_tier"].values()),
        "ttft_rounds": longest["rounds"],
        "overhead_pairs": overhead["pairs"],
    }
    samples = {**ttft["samples"], "overhead": overhead["samples"]}
    tables = [_ttft_table(prefixes), _load_table(prefixes), _cost_table(results)]
    return Report(results, samples, n, tables, _notes(results))


def _ttft_table(prefixes: dict[str, Any]) -> Table:
    table = Table(
        "time to first token by tier",
        ("prefix", "from", "p50 ms", "p95 ms", "reused tokens", "x memcpy of the KV"),
    )
    for tokens, figures in prefixes.items():
        for side in SIDES:
            row = figures[side]
            table.rows.append(
                (
                    int(tokens),
                    side,
                    row["ttft_p50_ms"],
                    row["ttft_p95_ms"],
                    row["hit_tokens"],
                    row["ttft_p50_ms"] / figures["memcpy_ms"],
                )
            )
    return table


def _load_table(prefixes: dict[str, Any]) -> Table:
    table = Table(
        "visible load: what a tier adds to the device hit, over the machine's own limit",
        ("prefix", "tier", "limit ms", "added ms", "visible load", "95 %", "allowed"),
    )
    for tokens, p in prefixes.items():
        for tier, limit, extra in (
            ("host", p["memcpy_ms"], 0.0),
            ("disk", p["raw_read_ms"], INTERCEPT_MS),
        ):
            load = p[f"visible_load_{tier}"]
            low, high = p[f"visible_load_{tier}_ci95"]
            most = _VISIBLE_TARGET + extra / limit
            says = verdict(load, (low, high), most, at_most=True)
            allowed = f"<= {_VISIBLE_TARGET}" + (f" + {extra:g} ms" if extra else "")
            table.rows.append(
                (
                    int(tokens),
                    tier,
                    limit,
                    load * limit,
                    load,
                    f"{low:.2f} to {high:.2f}",
                    f"{allowed} {says}",
                )
            )
    return table


def _cost_table(results: dict[str, Any]) -> Table:
    table = Table(
        "without reuse: with the plugin / without it",
        ("figure", "with", "without", "ratio", "95 %", "target"),
    )
    cpu, speed = results["cpu_ms_per_token"], results["tokens_per_s"]
    rows = (
        ("CPU ms per token", cpu, "cpu_ratio_no_reuse", CPU_TARGET, "<="),
        ("tokens per second", speed, "throughput_ratio_no_reuse", THROUGHPUT_TARGET, ">="),
    )
    for name, values, key, target, sign in rows:
        low, high = results[f"{key}_ci95"]
        ratio = results[key]
        says = verdict(ratio, (low, high), target, at_most=sign == "<=")
        table.rows.append(
            (
                name,
                values["with"],
                values["without"],
                f"{ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{sign} {target} {says}",
            )
        )
    return table


def _notes(results: dict[str, Any]) -> list[str]:
    factors = ", ".join(
        f"{format_number(factor)} times at {int(tokens):,} tokens"
        for tokens, factor in results["recompute_over_memcpy"].items()
    )
    low, high = _FACTORS
    outside = [f for f in results["recompute_over_memcpy"].values() if not low <= f <= high]
    notes = [
        (
            f"Recompute over memcpy of the KV: {factors}. Model {results['models']['ttft']}. One "
            f"core copies {format_number(results['memcpy_gb_s'])} GB/s and the disk reads "
            f"{format_number(results['raw_disk_read_gb_s'])} GB/s ({results['disk_mode']} I/O)."
        ),
        (
            f"Equality: {results['exact']} compared with plain SGLang's device hits, one request "
            f"at a time, bundled model: greedy {results['greedy_match']:.0%}, log-probabilities "
            f"{results['logprob_match']:.0%}."
        ),
        f"Cost without reuse: {results['models']['overhead']}; random prompts, each sent once.",
    ]
    notes.insert(
        1,
        "Times to first token were taken with the CPU runtime's backend cpu_extend, which attends "
        "from the new tokens only (SGLang's torch_native repeats the prefix's attention behind a "
        f"hit). All layers but each {serve_ttft.FULL_EVERY}th see {serve_ttft.WINDOW} tokens back, "
        "as full attention in every layer takes 60 times memcpy at 8,192 tokens on this engine; "
        "the KV of every layer is saved and loaded whole.",
    )
    if outside:
        notes.insert(1, f"The factor is not between {low} and {high} everywhere.")
    return notes
