"""Case `truncation`: what reuse over a cut costs in quality, and what it saves.

On the bundled model, in process: perplexity, recall and written texts behind one, two and three
cuts, with K moved by the functions of the server's own copies. On the server: hit rate and time to
first token of a workload in which 30 % of the conversations overflow. And the speed of
the content match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.core.case import Options, Report, disk_folder
from bench.core.output import Table
from bench.core.plots import COLOURS, figure, save
from bench.truncation.chat import CONTEXT, Mode
from bench.truncation.kv import PooledLm
from bench.truncation.match import NUM_PAGES, PROMPT_TOKENS, measure_match
from bench.truncation.ppl import NUM_CUTS, Losses, measure_perplexity
from bench.truncation.recall import Recall, measure_recall
from bench.truncation.serve import Served, measure_served
from bench.truncation.texts import Texts, measure_texts

# What the figures are held against: the paper's claim, and what this project asks of itself.
MOST_PPL_RATIO, LEAST_NAIVE_RATIO = 1.01, 1.5
MOST_RECALL_LOSS, MOST_NLL_SHIFT = 0.02, 0.02
MOST_MATCH_MS = 5.0
_CUTS = ("one", "two", "three")


@dataclass(frozen=True)
class Plan:
    """How much is run.

    Attributes:
        windows: of held-out text, scored behind each cut.
        dialogues: of the recall test, some questions each behind each cut.
        texts: chats that are written.
        chats: conversations of the server's workload.
        searches: of each kind of prompt in the content match.
    """

    windows: int
    dialogues: int
    texts: int
    chats: int
    searches: int

    @classmethod
    def of(cls, options: Options) -> Plan:
        """The plan of a quick or a full run."""
        if options.quick:
            return cls(windows=12, dialogues=6, texts=16, chats=10, searches=10)
        return cls(windows=230, dialogues=90, texts=192, chats=40, searches=50)


def run(options: Options) -> Report:
    """Runs the case; see the module.

    Raises:
        CaseFailedError: K is not moved to where it should be, a prompt was not cut or not served,
            or a stored stretch was not found.
    """
    torch.set_num_threads(1)
    plan, tell = Plan.of(options), options.progress.update
    options.progress.stage("truncation: quality on the bundled model")
    model = PooledLm()
    losses = measure_perplexity(model, plan.windows, tell)
    recall = measure_recall(model, plan.dialogues, tell)
    texts = measure_texts(model, plan.texts, tell)
    options.progress.stage("truncation: content match")
    match = measure_match(plan.searches, tell)
    options.progress.stage("truncation: served")
    with disk_folder("bench-truncation-") as folder:
        served = measure_served(folder, plan.chats, tell)
    path = _plot(options.out_dir / "truncation.png", losses, recall)
    report = report_of(losses, recall, texts, match, served)
    report.notes.append(f"plot: {path}")
    return report


def report_of(
    losses: Losses, recall: Recall, texts: Texts, match: dict[str, Any], served: Served
) -> Report:
    """The report of what was measured."""
    results: dict[str, Any] = {
        **{f"ppl_{mode}": losses.perplexity(mode) for mode in losses.by_mode},
        "ppl_ratio_reuse": losses.ratio("reuse"),
        "ppl_ratio_reuse_ci95": losses.interval("reuse"),
        "ppl_ratio_naive": losses.ratio("naive"),
        **{f"recall_{mode}": recall.share(mode) for mode in recall.right},
        "recall_gain_ci95": recall.interval("reuse"),
        "text_nll_ratio": texts.ratio,
        "text_nll_ratio_ci95": texts.interval(),
        "text_same": sum(texts.same) / len(texts.same),
        "text_example": texts.example,
        "match_ms": match["ms"],
        "match_insert_us": match["insert_us"],
        "match_bytes_per_page": match["bytes_per_page"],
        **served.figures(),
    }
    samples = {
        "nll_by_window": losses.by_mode,
        "recall_right": recall.right,
        "text_nll": texts.nll,
        "match_ms": match["samples"],
        "turns": {side: [asdict(turn) for turn in turns] for side, turns in served.turns.items()},
    }
    turns = served.turns["with"]
    n = {
        "windows": len(losses.by_mode["reuse"][0]),
        "recall_questions_each": min(len(asked) for asked in recall.right["reuse"]),
        "texts": len(texts.same),
        "searches": len(match["samples"]["cut"]),
        "chats": len({turn.chat for turn in turns}),
        "chats_over": len({turn.chat for turn in turns if turn.dropped}),
        "cuts": sum(turn.is_new_cut for turn in turns),
    }
    tables = [
        _quality_table(results),
        _summary_table(results),
        _served_table(results),
    ]
    return Report(results, samples, n, tables, _notes(results, n))


def _quality_table(results: dict[str, Any]) -> Table:
    table = Table(
        "behind one, two and three cuts",
        [
            "cuts",
            "ppl recompute",
            "ppl reuse",
            "ppl kept positions",
            "reuse / recompute",
            "95 %",
            "recall recompute",
            "recall reuse",
        ],
    )
    for cut in range(NUM_CUTS):
        low, high = results["ppl_ratio_reuse_ci95"][cut]
        table.rows.append(
            (
                _CUTS[cut],
                results["ppl_recompute"][cut],
                results["ppl_reuse"][cut],
                results["ppl_naive"][cut],
                f"{results['ppl_ratio_reuse'][cut]:.4f}",
                f"{low:.4f} to {high:.4f}",
                results["recall_recompute"][cut],
                results["recall_reuse"][cut],
            )
        )
    return table


def _summary_table(results: dict[str, Any]) -> Table:
    losses = zip(results["recall_recompute"], results["recall_reuse"], strict=True)
    loss = max(exact - reused for exact, reused in losses)
    shift = abs(results["text_nll_ratio"] - 1)
    slowest = max(kind["p50"] for kind in results["match_ms"].values())
    rows: list[tuple[str, float, str, float]] = [
        ("worst ppl, reuse / recompute", max(results["ppl_ratio_reuse"]), "<=", MOST_PPL_RATIO),
        ("least ppl, kept / recompute", min(results["ppl_ratio_naive"]), ">=", LEAST_NAIVE_RATIO),
        ("most recall lost, share", loss, "<=", MOST_RECALL_LOSS),
        ("NLL of written text, shift", shift, "<=", MOST_NLL_SHIFT),
        ("content match, slowest kind, CPU ms", slowest, "<=", MOST_MATCH_MS),
    ]
    table = Table("targets", ("figure", "value", "target", "verdict"))
    for name, value, sign, target in rows:
        holds = value <= target if sign == "<=" else value >= target
        table.rows.append((name, f"{value:.4f}", f"{sign} {target}", "ok" if holds else "missed"))
    return table


def _served_table(results: dict[str, Any]) -> Table:
    table = Table(
        "served: 30 % of the conversations overflow",
        ("truncation", "hit rate", "at cuts", "TTFT p50 ms", "p95", "at cuts p50", "p95"),
    )
    for side in ("with", "without"):
        table.rows.append(
            (
                side,
                f"{results[f'hit_rate_{side}']:.3f}",
                f"{results[f'hit_rate_at_cuts_{side}']:.3f}",
                results[f"ttft_p50_ms_{side}"],
                results[f"ttft_p95_ms_{side}"],
                results[f"ttft_at_cuts_p50_ms_{side}"],
                results[f"ttft_at_cuts_p95_ms_{side}"],
            )
        )
    return table


def _notes(results: dict[str, Any], n: dict[str, int]) -> list[str]:
    example = results["text_example"]
    quality = (
        f"Quality: bundled model, context {CONTEXT}, {n['windows']} windows of held-out text, "
        f"{n['recall_questions_each']} paired questions behind each cut, {n['texts']} chats "
        f"written ({results['text_same']:.0%} of them the same both ways)."
    )
    match = (
        f"Content match: {PROMPT_TOKENS:,} tokens against {NUM_PAGES:,} pages, "
        f"{results['match_insert_us']:.1f} us to insert a page, "
        f"{results['match_bytes_per_page']:.0f} bytes a page."
    )
    rates = (
        "Hit rates count all turns but each conversation's first; without the feature the client "
        "cuts by the same rule. At cuts: the first turn behind each."
    )
    written = (
        f"Written behind three cuts, after {example['prompt'][-60:]!r}: recomputed "
        f"{example['recompute']!r}; reused {example['reuse']!r}."
    )
    return [quality, match, rates, written]


def _plot(path: Path, losses: Losses, recall: Recall) -> Path:
    fig, (left, right) = figure(9.0, 3.8, ncols=2)
    places = list(range(NUM_CUTS))
    modes: tuple[tuple[Mode, str], ...] = (
        ("recompute", "recomputed"),
        ("reuse", "reused, moved"),
        ("naive", "kept positions"),
    )
    colours = (COLOURS[0], COLOURS[1], COLOURS[4])
    asked = [mode for mode, _ in modes if mode in recall.right]
    for number, (mode, label) in enumerate(modes):
        look: dict[str, Any] = {"width": 0.25, "label": label, "color": colours[number]}
        left.bar(_beside(places, number, len(modes)), losses.perplexity(mode), **look)
        if mode in asked:
            at = _beside(places, asked.index(mode), len(asked))
            right.bar(at, recall.share(mode), **look)
    for axes, title in ((left, "Perplexity"), (right, "Recall of facts that were kept")):
        axes.set_xticks(places, [f"{name} cut{'s' if name != 'one' else ''}" for name in _CUTS])
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8)
    right.set_ylim(0, 1)
    return save(fig, path)


def _beside(places: Sequence[int], number: int, count: int) -> list[float]:
    """Where the bars of one of some series stand, the middle of all over the places."""
    return [place + 0.27 * (number - (count - 1) / 2) for place in places]
