"""The paper's figures 11 to 13, for the product's streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.core.plots import COLOURS, figure, save

_SIDES = ("text", "8-bit", "uniform, equal KL", "ours")


def plot_all(folder: Path, sweeps: dict[str, Any]) -> None:
    """Writes the three figures."""
    _plot_ttft(folder / "stream-bandwidth.png", sweeps["bandwidth"], "gbps", "Gbps, 16K tokens")
    _plot_ttft(folder / "stream-context.png", sweeps["context"], "tokens", "tokens, 3 Gbps")
    _plot_ttft(
        folder / "stream-concurrency.png",
        sweeps["concurrency"],
        "requests",
        "requests at once, 9.6K tokens, 3 Gbps",
    )
    _plot_violations(folder / "stream-slo.png", sweeps["slo"])


def _plot_ttft(path: Path, rows: list[dict[str, float]], key: str, label: str) -> None:
    fig, axes = figure(6.5, 4.0)
    for side, colour in zip(_SIDES, COLOURS[1:], strict=True):
        axes.plot(
            [row[key] for row in rows], [row[side] for row in rows], "o-", color=colour, label=side
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("time to first token, s")
    axes.legend(fontsize=8)
    save(fig, path)


def _plot_violations(path: Path, rows: list[dict[str, Any]]) -> None:
    fig, (left, right) = figure(9.0, 3.8, ncols=2)
    sides = ("quantised", "text", "fixed", "adaptive", "oracle")
    for side, colour in zip(sides, COLOURS, strict=True):
        slos = [row["slo_s"] for row in rows]
        left.plot(
            slos, [row["violation_rate"][side] for row in rows], "o-", color=colour, label=side
        )
        if side not in ("quantised", "text"):
            right.plot(slos, [row["kl"][side] for row in rows], "o-", color=colour, label=side)
    left.set_ylabel("share of late first tokens")
    right.set_ylabel("KL")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("deadline, s")
        axes.legend(fontsize=8)
    save(fig, path)
