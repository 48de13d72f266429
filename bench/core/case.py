"""What a benchmark case is, and the JSON object that it leaves.

A case is a function from `Options` to `Report`, found by name in `CASES` and imported only when it
runs. It raises `CaseFailedError` when its own correctness check fails; nothing is reported then.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core.machine import describe_machine
from bench.core.output import Progress, Table
from bench.core.trace_flags import TraceFlags
from sglang_ext.simulator.types import CHUNK_TOKENS
from sglang_ext.simulator.virtual_store import DEFAULT_PREFETCH_POLICY
from testkit.errors import UnexpectedAnswerError

ROOT = Path(__file__).resolve().parents[2]
OUT_DIR = ROOT / "build" / "bench"
ALLOW_DIRTY = "BENCH_ALLOW_DIRTY"


class CaseFailedError(UnexpectedAnswerError):
    """A case's own correctness check failed, so its figures would mean nothing."""


class BadInputError(ValueError):
    """What the command line names cannot be used; the text says what was expected and what came."""


class DirtyTreeError(RuntimeError):
    """The working tree differs from its commit, so figures could not be traced to code."""


@dataclass(frozen=True)
class Options:
    """How a case is run.

    Attributes:
        quick: end within 4 minutes, with fewer repetitions and the same keys.
        progress: where long work says how far it is.
        out_dir: folder for plots; it exists.
        model: a model's folder instead of the bundled one, for cases that take one.
        text: a text file for that model.
        trace: a request trace for the case `policies`, with its machine.
        prefetch_policy: of that case's servers.
        chunk_tokens: alike, their `--chunked-prefill-size`.
    """

    quick: bool
    progress: Progress
    out_dir: Path = OUT_DIR
    model: Path | None = None
    text: Path | None = None
    trace: TraceFlags | None = None
    prefetch_policy: str = DEFAULT_PREFETCH_POLICY
    chunk_tokens: int = CHUNK_TOKENS


@dataclass
class Report:
    """What a case found.

    Attributes:
        results: the figures, by the keys that `python -m bench --help` lists.
        samples: the raw values behind every ratio.
        n: number of samples behind each figure or group of figures.
        tables: what a person reads.
        notes: sentences under the tables.
    """

    results: dict[str, Any]
    samples: dict[str, Any] = field(default_factory=dict)
    n: dict[str, int] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """An entry of the registry.

    Attributes:
        module: where the function `run` is.
        summary: one line for `--help`.
        keys: the keys of `results`, for `--help`.
        needs_cuda: left out of `all` where there is no CUDA device.
    """

    module: str
    summary: str
    keys: str
    needs_cuda: bool = False

    def load(self) -> Callable[[Options], Report]:
        """Imports the case and returns its function."""
        run: Callable[[Options], Report] = importlib.import_module(self.module).run
        return run


CASES: dict[str, Case] = {
    "serve": Case(
        "bench.serve.case",
        "time to first token by tier, equality with plain SGLang, cost where nothing is reused",
        "device|host|disk|remote|recompute: {ttft_p50_ms, ttft_p95_ms, hit_tokens}, "
        "visible_load_host, visible_load_disk, greedy_match, logprob_match, cpu_ratio_no_reuse, "
        "throughput_ratio_no_reuse",
    ),
    "tiers": Case(
        "bench.tiers.case",
        "copies with rotation against memcpy, disk tier against raw I/O, page index",
        "memcpy_gb_s, host_save_gb_s, host_load_gb_s, disk_write_gb_s, disk_read_gb_s, "
        "raw_disk_write_gb_s, raw_disk_read_gb_s, index: [{pages, lookups_per_s, bytes_per_page}]",
    ),
    "codec": Case(
        "bench.codec.case",
        "rate against damage of every codec, speed of the product's engines",
        "product_codec, points: [{codec, level, chunk_tokens, bits_per_value, kl, kl_p99, "
        "ppl_delta, top1_agreement, recall}], shifted_points, stress_points, ablation_points, "
        "encode_mb_s, decode_mb_s: {engine: MB/s}, entropy_gap: {1500, 256}, size_ratio, "
        "kl_against_best_baseline, contribution, layer_sensitivity, entropy_by_grouping, "
        "storing_all_levels_bits, entropy_stage, compared_speed",
    ),
    "stream": Case(
        "bench.stream.case",
        "KV over a network: adaptive levels against fixed ones, 8 bits, text and an oracle",
        "traces: {name: {slo_ms, violation_rate, ttft_ms, kl: {adaptive, fixed, quantised, text, "
        "oracle}}}, sweeps: {bandwidth, context, concurrency, slo, crossover, steady, falling}, "
        "real_link: [{gbps, measured_s, virtual_s}], damage_by_level, bytes_by_level, uniform",
    ),
    "truncation": Case(
        "bench.truncation.case",
        "quality and hits of conversations that outgrow their context; speed of the content match",
        "ppl_recompute, ppl_reuse, ppl_naive, recall_recompute, recall_reuse: [one, two, three "
        "cuts], hit_rate_with, hit_rate_without, ppl_ratio_reuse, ppl_ratio_naive, "
        "text_nll_ratio, text_same, text_example, match_ms, hit_rate_at_cuts_with|without, "
        "ttft_p50_ms_with|without, ttft_at_cuts_p50_ms_with|without",
    ),
    "policies": Case(
        "bench.policies.case",
        "hit rates of look-ahead, LRU, FIFO and Belady's optimum, simulated in virtual time",
        "lookahead|lru|fifo|belady: {hit_rate, turn_hit_rate, turn_hit_cap, host_share}, "
        "decisions_per_s, models, overflow, tiers, capacity, think_time, ratios, read_buffer, "
        "long_documents, trace, agents, documents; with --trace: by_load and footprint_gb instead "
        "of the sections",
    ),
    "faults": Case(
        "bench.faults.case",
        "damage and kills: wrong tokens, failed requests, lost pages",
        "by_kind: {name: {injected, wrong_tokens, failed_requests, lost_acknowledged_pages}}, "
        "num_injected, max_scheduler_stall_ms, stalls, kills, slow_disk, open, part_s, seed",
    ),
    "gpu": Case(
        "bench.gpu.case",
        "on a CUDA device: loads and saves of 8,192 tokens of an 8B model against bare copies",
        "whole_in|whole_out|pages_in|pages_out|load|save: _gb_s, load_ms, load_queue_ms, save_ms, "
        "load_of_link, save_of_link, device, device_bytes, kv_bytes, tokens",
        needs_cuda=True,
    ),
    "ranks": Case(
        "bench.ranks.case",
        "two tensor parallel and two data parallel ranks with late stores, against plain SGLang",
        "tp|dp: {requests, aborted, reused_tokens, token_differences, plain_token_differences, "
        "exact, exact_asked, steps, reductions_per_step, divergences}",
    ),
}


def run_case(name: str, options: Options) -> tuple[dict[str, Any], Report]:
    """Runs one case; returns its JSON object and its report.

    Raises:
        DirtyTreeError: the tree is dirty and `BENCH_ALLOW_DIRTY` is not set.
        CaseFailedError: the case's correctness check failed.
    """
    options.out_dir.mkdir(parents=True, exist_ok=True)
    result, report = report_object(name, lambda: CASES[name].load()(options))
    return {**result, "quick": options.quick}, report


def report_object(name: str, make: Callable[[], Report]) -> tuple[dict[str, Any], Report]:
    """Makes a report, and the JSON object of it. The tree is looked at before, not after.

    Raises:
        DirtyTreeError: as `commit_header` says.
    """
    header = commit_header()
    report = make()
    return {
        "case": name,
        **header,
        "machine": describe_machine(),
        "n": report.n,
        "samples": report.samples,
        "results": report.results,
    }, report


@contextmanager
def disk_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder on a disk, where the system's may be memory."""
    root = ROOT / "build"
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as name:
        yield Path(name)


def commit_header() -> dict[str, Any]:
    """The commit that runs; `"dirty": true` beside it where a dirty tree is allowed.

    Raises:
        DirtyTreeError: the tree is dirty and that is not allowed, or it is no git tree.
    """
    commit = _git("rev-parse", "HEAD").strip()
    if not _git("status", "--porcelain").strip():
        return {"commit": commit}
    if os.environ.get(ALLOW_DIRTY) == "1":
        return {"commit": commit, "dirty": True}
    raise DirtyTreeError(
        "the working tree has changes that are in no commit, so figures could not be traced; "
        f"commit them, or set {ALLOW_DIRTY}=1 to have the report marked as dirty"
    )


def with_samples(results: Mapping[str, Any]) -> Report:
    """A report from a plain dict: `samples` and `n` are split off where they are there."""
    values = dict(results)
    return Report(
        samples=dict(values.pop("samples", {})), n=dict(values.pop("n", {})), results=values
    )


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DirtyTreeError(
            f"git {' '.join(args)} failed ({done.stderr.strip()}); a report names the commit that "
            "it is about, so run it in a git checkout"
        )
    return done.stdout
