"""The sections of the policy bench's report: figures and a table each, from the simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.output import Table
from bench.policies.jobs import POLICIES, VARIANTS, Figures, Result
from bench.policies.order import ORDERS
from bench.policies.plan import DISKS_GB, DOCUMENT_KIB, LOADS, SHARES, SWEPT, required_gb
from bench.policies.workloads.models import CHAT_MODELS, Model
from bench.policies.workloads.setups import HOST_GB
from bench.policies.workloads.sharegpt import THINK_S

Results = Mapping[str, Result]
Section = tuple[Any, list[Table]]

_LARGE = "128G/10T"
_SMALL = "128G/2T"
HEADLINE = ("hit_rate", "turn_hit_rate", "turn_hit_cap", "host_share")
# 4.3.3, LLaMA-13B: hits of all turns, and those from DRAM.
PAPER_POLICIES = {
    _LARGE: {"lookahead": 0.86, "lru": 0.58, "fifo": 0.48},
    _SMALL: {"lookahead": 0.129 + 0.27, "lru": 0.129, "fifo": 0.095},
}
PAPER_CAPACITY = {0.1: 0.51, 0.25: 0.98}
_MIN_GAP = 0.005  # between LRU and Belady, for a share of it to mean anything


def headline(figures: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """The keys that every run of the case has, by policy."""
    return {
        policy: {key: figures[policy][key] for key in HEADLINE if key in figures[policy]}
        for policy in POLICIES
        if policy in figures
    }


def gap_closed(figures: Mapping[str, Figures]) -> float | None:
    """Share of the look-ahead's way from LRU to the optimum; None where there is none to go."""
    low, high = (figures[name]["hit_rate"] for name in ("lru", "belady"))
    if high - low < _MIN_GAP:
        return None
    return float((figures["lookahead"]["hit_rate"] - low) / (high - low))


def models_section(results: Results) -> Section:
    """4.2 and 4.3.3: each model at both sizes of disk, beside the paper."""
    tokens = Table(
        "hit rate, % of reusable prompt tokens; DRAM: share of the look-ahead's hits from there",
        ("model", "DRAM/SSD", "look-ahead", "off", "LRU", "FIFO", "waiting, then LRU", "Belady",
         "DRAM", "off's DRAM", "offered load", "queue"),
    )  # fmt: skip
    turns = Table(
        "hits by turns, % of all turns, first turns included: ours (paper's)",
        ("model", "DRAM/SSD", "cap", "look-ahead", "off", "LRU", "FIFO", "waiting, then LRU",
         "Belady"),
    )  # fmt: skip
    values: dict[str, Any] = {}
    for model in _models(results):
        values[model.name] = {}
        for label in DISKS_GB:
            result = results[f"{model.name} {label}"]
            values[model.name][label] = _model_values(model, label, result)
            f, where = result.figures, (model.name, label)
            rates = [100 * f[name]["hit_rate"] for name in POLICIES]
            shares = [100 * f[name]["host_share"] for name in ("lookahead", "off")]
            queue = round(f["lookahead"]["queue_mean"])
            tokens.rows.append((*where, *rates, *shares, result.offered_load, queue))
            turns.rows.append((*where, *_turn_cells(f, _paper_rates(model, label))))
        values[model.name]["gain"] = _gain(model, results[f"{model.name} {_LARGE}"].figures)
    return values, [tokens, turns, _gain_table(values)]


def _model_values(model: Model, label: str, result: Result) -> dict[str, Any]:
    return {
        **headline(result.figures),
        "gap_closed": gap_closed(result.figures),
        "offered_load": result.offered_load,
        "offered_load_reuse": result.offered_load_reuse,
        "queue_mean": result.figures["lookahead"]["queue_mean"],
        "paper": _paper_rates(model, label),
    }


def _turn_cells(f: Mapping[str, Figures], paper: Mapping[str, float]) -> list[str]:
    cells = [f"{100 * f['lookahead']['turn_hit_cap']:.1f}"]
    for name in POLICIES:
        stated = f" ({100 * paper[name]:.1f})" if name in paper else ""
        cells.append(f"{100 * f[name]['turn_hit_rate']:.1f}{stated}")
    return cells


def _paper_rates(model: Model, label: str) -> dict[str, float]:
    if model.name == CHAT_MODELS[0].name:
        return PAPER_POLICIES[label]
    return {"lookahead": model.paper.hit_rate} if model.paper and label == _LARGE else {}


def _gain(model: Model, figures: Mapping[str, Figures]) -> dict[str, Any]:
    """4.2: what reuse gains over recomputation, ours and the paper's."""
    ahead, again = figures["lookahead"], figures["recompute"]
    disk_gb = DISKS_GB[_LARGE]
    costs = [
        model.cost_dollars(ahead["gpu_s"], HOST_GB, disk_gb),
        model.cost_dollars(again["gpu_s"], 0, 0),
    ]
    return {
        "ttft_saved": 1 - ahead["ttft_mean_s"] / again["ttft_mean_s"],
        "prefill_speedup": ahead["prefill_tokens_per_s"] / again["prefill_tokens_per_s"],
        "gpu_time_speedup": again["gpu_s"] / ahead["gpu_s"],
        "prefill_time_speedup": again["prefill_gpu_s"]
        / (ahead["prefill_gpu_s"] + ahead["wait_load_s"]),
        "cost_saved": 1 - costs[0] / costs[1],
        "cost_dollars": costs,
        "gpu_s": [ahead["gpu_s"], again["gpu_s"]],
        "ttft_mean_s": [ahead["ttft_mean_s"], again["ttft_mean_s"]],
        "paper": None if model.paper is None else {
            "ttft_saved": model.paper.ttft_saved,
            "prefill_speedup": model.paper.prefill_speedup,
            "gpu_time_speedup": model.paper.gpu_time_speedup,
            "cost_saved": model.paper.cost_saved,
        },
    }  # fmt: skip


def _gain_table(values: Mapping[str, Any]) -> Table:
    table = Table(
        "over recomputation, 128G/10T: ours (paper's)",
        ("model", "prefill throughput x", "GPU time x", "TTFT saved %", "cost saved %", "cost $"),
    )
    for name, value in values.items():
        gain, paper = value["gain"], value["gain"]["paper"]
        table.rows.append(
            (
                name,
                f"{gain['prefill_speedup']:.1f} ({paper['prefill_speedup']:.1f})",
                f"{gain['gpu_time_speedup']:.2f} ({paper['gpu_time_speedup']:.1f})",
                f"{100 * gain['ttft_saved']:.0f} ({100 * paper['ttft_saved']:.0f})",
                f"{100 * gain['cost_saved']:.0f} ({100 * paper['cost_saved']:.0f})",
                gain["cost_dollars"][0],
            )
        )
    return table


def overflow_section(results: Results) -> Section:
    """4.3.4: points of hit rate that position-free truncation saves."""
    table = Table(
        "4.3.4 overflow: hit rate % with position-free truncation and without",
        ("model", "with", "without", "points", "paper"),
    )
    values = {}
    for model in _models(results):
        on, off = (
            results[f"{model.name} {name}"].figures["lookahead"] for name in (_LARGE, "no overflow")
        )
        values[model.name] = {
            "with": on["hit_rate"],
            "without": off["hit_rate"],
            "turns_with": on["turn_hit_rate"],
            "turns_without": off["turn_hit_rate"],
            "paper_loss": model.paper.overflow_loss if model.paper else None,
        }
        points = [100 * each["hit_rate"] for each in (on, off)]
        paper = 100 * model.paper.overflow_loss if model.paper else None
        table.rows.append((model.name, *points, points[0] - points[1], paper))
    return values, [table]


def tiers_section(results: Results) -> Section:
    """4.3.6: HBM only, with DRAM, with SSD."""
    table = Table(
        "4.3.6 tiers: hit rate % (paper's)", ("model", "HBM 10G", "+ DRAM 128G", "+ SSD 10T")
    )
    values = {}
    for model in _models(results):
        names = ("hbm", "hbm+dram", _LARGE)
        rates = [results[f"{model.name} {name}"].figures["lookahead"]["hit_rate"] for name in names]
        paper = [0.0, model.paper.hit_rate_dram, model.paper.hit_rate] if model.paper else rates
        values[model.name] = {
            name: {"hit_rate": rate, "paper": stated}
            for name, rate, stated in zip(("hbm", "hbm_dram", "hbm_dram_ssd"), rates, paper,
                                          strict=True)
        }  # fmt: skip
        cells = [f"{100 * a:.1f} ({100 * b:.1f})" for a, b in zip(rates, paper, strict=True)]
        table.rows.append((model.name, *cells))
    return values, [table]


def capacity_section(results: Results, ratios: Sequence[float]) -> Section:
    """4.3.5: hit rate by capacity over CCpUT, LLaMA-13B."""
    whole_gb = required_gb(CHAT_MODELS[0])
    table = Table(
        f"4.3.5 capacity / CCpUT ({whole_gb / 1000:.1f} TB, TTL one hour), {CHAT_MODELS[0].name}: "
        "hit rate %",
        ("ratio", "capacity TB", "look-ahead", "LRU", "waiting, then LRU", "Belady", "paper"),
    )
    points = []
    for ratio in ratios:
        figures = results[f"capacity {ratio:g}"].figures
        paper = PAPER_CAPACITY.get(ratio)
        points.append({"ratio": ratio, "paper": paper, **headline(figures)})
        rates = [100 * figures[name]["hit_rate"] for name in SWEPT]
        table.rows.append((f"{ratio:g}", ratio * whole_gb / 1000, *rates, _times_100(paper)))
    return points, [table]


def think_section(results: Results, thinks_s: Sequence[float]) -> Section:
    """Hit rate by mean think time, LLaMA-13B."""
    table = Table(
        f"think time, {CHAT_MODELS[0].name}, 128G/10T: hit rate %",
        ("mean s", "look-ahead", "LRU", "waiting, then LRU", "Belady", "DRAM %", "queue"),
    )
    points = []
    for think_s in thinks_s:
        name = f"think {think_s:g} s" if think_s != THINK_S else f"{CHAT_MODELS[0].name} {_LARGE}"
        figures = results[name].figures
        points.append({"think_s": think_s, **headline(figures)})
        rates = [100 * figures[name]["hit_rate"] for name in SWEPT]
        ahead = figures["lookahead"]
        row = (think_s, *rates, 100 * ahead["host_share"], round(ahead["queue_mean"]))
        table.rows.append(row)
    return points, [table]


def comparison_section(results: Results, name: str, title: str) -> Section:
    """A workload at each load and capacity."""
    table = Table(
        f"{title}: hit rate %",
        ("load", "capacity %", "look-ahead", "queue only", "returns only", "off", "LRU", "FIFO",
         "waiting, then LRU", "Belady", "gap closed %", "DRAM %", "queue"),
    )  # fmt: skip
    points = []
    for load in LOADS:
        for share in SHARES:
            result = results.get(f"{name} {load:g} {share:g}")
            if result is None:
                continue
            points.append(point(result, load=load, share=share))
            table.rows.append((load, 100 * share, *comparison_cells(result.figures)))
    return points, [table]


def point(result: Result, **where: float) -> dict[str, Any]:
    """One workload at one load and capacity."""
    f = result.figures
    return {
        **where,
        **headline(f),
        **{name: {key: f[name][key] for key in HEADLINE} for name in VARIANTS if name in f},
        "gap_closed": gap_closed(f),
        "offered_load": result.offered_load,
        "offered_load_reuse": result.offered_load_reuse,
        "queue_mean": {name: each["queue_mean"] for name, each in f.items() if name not in ORDERS},
        "ttft_p95_s": {name: each["ttft_p95_s"] for name, each in f.items() if name not in ORDERS},
    }


def comparison_cells(f: Mapping[str, Figures]) -> list[float | None]:
    """The policies' hit rates in %, the gap closed, DRAM's share and the mean queue."""
    names = ("lookahead", *VARIANTS, "off", *ORDERS)
    rates = [100 * f[name]["hit_rate"] if name in f else None for name in names]
    ahead = f["lookahead"]
    closed = gap_closed(f)
    return [*rates, _times_100(closed), 100 * ahead["host_share"], round(ahead["queue_mean"])]


def documents_section(results: Results) -> Section:
    """4.3.8: tasks on a long document."""
    table = Table(
        "4.3.8 six tasks on one document, Mistral-7B, batch 1: means of the second to sixth task",
        ("document", "TTFT ms", "recompute ms", "saved %", "prefill x", "GPU time x"),
    )
    points = []
    for kib in DOCUMENT_KIB:
        figures = results[f"document {kib}K"].figures
        ahead, again = figures["lookahead"], figures["recompute"]
        values = {
            "document_tokens": kib * 1024,
            "ttft_ms": 1e3 * ahead["ttft_mean_s"],
            "recompute_ttft_ms": 1e3 * again["ttft_mean_s"],
            "prefill_speedup": ahead["prefill_tokens_per_s"] / again["prefill_tokens_per_s"],
            "gpu_time_speedup": again["gpu_s"] / ahead["gpu_s"],
        }
        points.append(values)
        saved = 100 * (1 - values["ttft_ms"] / values["recompute_ttft_ms"])
        table.rows.append(
            (f"{kib}K", values["ttft_ms"], values["recompute_ttft_ms"], saved,
             values["prefill_speedup"], values["gpu_time_speedup"])
        )  # fmt: skip
    return points, [table]


def _models(results: Results) -> list[Model]:
    """The models of this run."""
    return [model for model in CHAT_MODELS if f"{model.name} {_LARGE}" in results]


def _times_100(value: float | None) -> float | None:
    return None if value is None else 100 * value
