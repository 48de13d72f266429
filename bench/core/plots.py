"""Plots as PNG files, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BLUE, _GREY, _RED = "#2f6f9f", "#9aa5ad", "#c0392b"
COLOURS = (_GREY, _BLUE, "#e08e3c", "#5a9e6f", _RED)


def figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, on the file-only backend."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(width, height), layout="constrained", **options)
    return fig, axes


def save(fig: Any, path: Path) -> Path:
    """Writes the figure and frees it."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)
    return path


def plain_log_axis(axes: Any, low: float, high: float) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5 of each decade, around these values."""
    places = [scale * 10.0**power for power in range(-6, 10) for scale in (1, 2, 5)]
    first = max(place for place in places if place <= low)
    last = min(place for place in places if place >= high)
    chosen = [place for place in places if first <= place <= last]
    axes.set_xscale("log")
    axes.set_xticks(chosen, [f"{place:,.10g}" for place in chosen])
    axes.set_xticks([], minor=True)
    axes.set_xlim(first, last)


def plot_bars(
    path: Path,
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    *,
    intervals: Sequence[Sequence[float]],
    targets: Sequence[float],
) -> Path:
    """Horizontal bars with their 95 % intervals and a mark at each target."""
    fig, axes = figure(8.0, 0.4 * len(names) + 1.2)
    places = range(len(names))
    errors = [
        [max(value - low, 0.0) for value, (low, _) in zip(values, intervals, strict=True)],
        [max(high - value, 0.0) for value, (_, high) in zip(values, intervals, strict=True)],
    ]
    axes.barh(places, values, color=_BLUE, xerr=errors, ecolor=_GREY)
    axes.scatter(targets, places, marker="|", s=220, color=_RED, zorder=3, label="target")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return save(fig, path)


def plot_distributions(
    path: Path, title: str, label: str, groups: Mapping[str, Sequence[float]]
) -> Path:
    """One box a group, 5th to 95th percentile, and every value as a point, on a log axis."""
    fig, axes = figure(8.0, 4.0)
    shown = {name: values for name, values in groups.items() if values}
    axes.boxplot(list(shown.values()), whis=(5, 95), showfliers=False)
    axes.set_xticks(range(1, len(shown) + 1), list(shown))
    for place, values in enumerate(shown.values(), start=1):
        axes.scatter([place] * len(values), values, s=8, color=_BLUE, alpha=0.5)
    axes.set_ylabel(label)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    return save(fig, path)
