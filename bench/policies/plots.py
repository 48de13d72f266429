"""Plots of the policy bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.plots import COLOURS, figure, save

_GREY, _BLUE, _ORANGE, _GREEN, _RED = COLOURS
_STYLE = {
    "belady": ("Belady", _GREEN),
    "lookahead": ("look-ahead", _BLUE),
    "lru": ("LRU", _ORANGE),
    "off": ("off", _GREY),
}
_PAPER = "paper"


def plot_models(path: Path, values: Mapping[str, Any], labels: Sequence[str]) -> Path:
    """Hit rates of each model: bars by policy, the paper's figures as marks."""
    fig, axes = figure(9.0, 3.6, ncols=len(labels), sharey=True)
    names = list(values)
    for axis, label in zip(axes, labels, strict=True):
        for number, (policy, (shown, colour)) in enumerate(_STYLE.items()):
            places = [at + (number - 1.5) * 0.2 for at in range(len(names))]
            rates = [100 * values[name][label][policy]["hit_rate"] for name in names]
            axis.bar(places, rates, 0.19, color=colour, label=shown)
            stated = [values[name][label][_PAPER].get(policy) for name in names]
            marks = [(x, 100 * y) for x, y in zip(places, stated, strict=True) if y is not None]
            if marks:
                axis.scatter(*zip(*marks, strict=True), marker="_", s=120, color=_RED, zorder=3)
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"{label} (red: the paper)", fontsize=10)
    axes[0].set_ylabel("hit rate, %")
    axes[0].legend(fontsize=8)
    return save(fig, path)


def plot_sweep(
    path: Path, title: str, label: str, points: Sequence[Mapping[str, Any]], key: str
) -> Path:
    """Hit rate by one changed value, on a log axis; the paper's points where it has some."""
    fig, axes = figure(6.5, 3.6)
    _lines(axes, points, [point[key] for point in points])
    stated = [(point[key], 100 * point[_PAPER]) for point in points if point.get(_PAPER)]
    if stated:
        axes.scatter(*zip(*stated, strict=True), marker="x", color=_RED, label="paper", zorder=3)
    axes.set_xscale("log")
    axes.set_xticks([point[key] for point in points], [f"{point[key]:g}" for point in points])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("hit rate, %")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return save(fig, path)


def plot_comparisons(path: Path, sections: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Hit rate by capacity: a row for each load, a column for each workload."""
    loads = sorted({point["load"] for points in sections.values() for point in points})
    fig, axes = figure(
        3.4 * len(sections), 2.9 * len(loads), nrows=len(loads), ncols=len(sections),
        sharey=True, squeeze=False,
    )  # fmt: skip
    for column, (name, points) in enumerate(sections.items()):
        for row, load in enumerate(loads):
            axis = axes[row][column]
            mine = [point for point in points if point["load"] == load]
            shares = [100 * point["share"] for point in mine]
            _lines(axis, mine, shares)
            axis.set_xscale("log")
            axis.set_xticks(shares, [f"{share:g}" for share in shares])
            axis.minorticks_off()
            axis.set_title(f"{name}, load {load:g}", fontsize=10)
            axis.set_xlabel("capacity, % of footprint")
        axes[0][0].set_ylabel("hit rate, %")
    axes[0][0].legend(fontsize=8)
    return save(fig, path)


def _lines(axis: Any, points: Sequence[Mapping[str, Any]], places: Sequence[float]) -> None:
    for policy, (shown, colour) in _STYLE.items():
        if any(policy not in point for point in points):
            continue
        rates = [100 * point[policy]["hit_rate"] for point in points]
        axis.plot(places, rates, marker="o", markersize=4, color=colour, label=shown)
    axis.grid(alpha=0.3)
