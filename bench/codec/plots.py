"""Plots of the codec bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.codec.quality import Point
from bench.core.plots import COLOURS, figure, save

_MARKERS = "osv^Dd*XPp<>"
_PRODUCT_COLOUR = COLOURS[1]


def plot_rate_against_damage(path: Path, title: str, points: Sequence[Point], product: str) -> Path:
    """A line for each codec: bits a value, and KL on a log axis."""
    fig, axes = figure(8.5, 5.5)
    for number, name in enumerate(dict.fromkeys(point.codec for point in points)):
        mine = sorted(
            (point for point in points if point.codec == name), key=lambda p: p.bits_per_value
        )
        values = [(point.bits_per_value, point.kl) for point in mine if point.kl > 0]
        if not values:
            continue  # exact: nothing to show on a log axis
        is_product = name == product
        axes.plot(
            *zip(*values, strict=True),
            label=name,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=2.5 if is_product else 1.0,
            color=_PRODUCT_COLOUR if is_product else f"C{1 + number % 9}",
            zorder=3 if is_product else 2,
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per value, all bytes counted")
    axes.set_ylabel("KL of next-token distributions, nats")
    axes.grid(alpha=0.3, which="both")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7)
    return save(fig, path)


def plot_layers(path: Path, title: str, names: Sequence[str], values: Sequence[float]) -> Path:
    """A bar for each layer or group of layers."""
    fig, axes = figure(7.0, 3.5)
    axes.bar(range(len(names)), values, color=_PRODUCT_COLOUR)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("KL, nats")
    axes.set_title(title, fontsize=10)
    return save(fig, path)


def plot_speed(path: Path, title: str, rows: Sequence[tuple[str, float, float]]) -> Path:
    """Encode and decode speed side by side, MB of raw KV a second."""
    fig, axes = figure(8.0, 0.45 * len(rows) + 1.4)
    places = range(len(rows))
    axes.barh([at - 0.2 for at in places], [row[1] for row in rows], 0.38, label="encode")
    axes.barh([at + 0.2 for at in places], [row[2] for row in rows], 0.38, label="decode")
    axes.set_yticks(places, [row[0] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel("MB of raw KV per second, one core")
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return save(fig, path)
