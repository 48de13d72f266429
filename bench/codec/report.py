"""From points, analyses and speeds to the keys of the report and the tables that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.codec.analysis import bits_at, cheapest, kl_at, select
from bench.codec.quality import Point
from bench.codec.speed import Speed, as_json
from bench.core.output import Table

# Baselines' points that the product is held against, and the chunks.
_HELD = (
    ("cachegen-paper", "x0.5", 1500),
    ("cachegen-paper", "x1.0", 1500),
    ("cachegen-released", "L2", 256),
    ("cachegen-released", "L1", 256),
)
# About what cachegen-paper x0.5 and a level below it do.
CONTRIBUTION_KL = (0.004, 0.001)
_RATES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)


def results_of(
    product: str,
    points: Sequence[Point],
    side: dict[str, list[Point]],
    found: dict[str, Any],
    speeds: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report's `results`, and the samples behind them."""
    parts = found["parts"]
    engines: list[Speed] = speeds["product"]
    results = {
        "product_codec": product,
        "points": [point.as_json() for point in points],
        **{f"{name}_points": [p.as_json() for p in some] for name, some in side.items()},
        "encode_mb_s": {engine.name: engine.encode_mb_s for engine in engines},
        "decode_mb_s": {engine.name: engine.decode_mb_s for engine in engines},
        "entropy_gap": {str(tokens): part.gap for tokens, part in parts.items()},
        "container_overhead": {str(tokens): part.overhead for tokens, part in parts.items()},
        "size_ratio": size_ratios(product, points),
        "kl_against_best_baseline": rate_table(product, points),
        "contribution": contribution(side.get("ablation", [])),
        "layer_sensitivity": [
            {name: row[name] for name in ("layer", "kl")} for row in found["layers"]
        ],
        "entropy_by_grouping": found["grouping"],
        "storing_all_levels_bits": found["storing"],
        "entropy_stage": as_json(speeds["entropy"]),
        "compared_speed": as_json(speeds["others"]),
        "speed_by_head_dim": as_json(speeds["head_dims"]),
        "memcpy_mb_s": speeds["memcpy"],
    }
    samples = {
        "kl_by_window": {
            f"{name} {point.codec} {point.level} {point.chunk_tokens}": point.kl_by_window
            for name, some in (("test", points), *side.items())
            for point in some
        },
        "layer_kl": {row["layer"]: row["samples"] for row in found["layers"]},
        "seconds": {
            engine.name: {"encode": engine.samples[0], "decode": engine.samples[1]}
            for part in ("product", "head_dims", "others", "entropy")
            for engine in speeds[part]
        },
    }
    return results, samples


def size_ratios(product: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """The product's bytes over a baseline's at no higher KL.

    `ratio` is of a level that exists; `ratio_interpolated` lies between two levels.
    """
    rows = []
    for codec, level, chunk_tokens in _HELD:
        held = select(points, codec=codec, level=level, chunk_tokens=chunk_tokens)
        mine = select(points, codec=product, chunk_tokens=chunk_tokens)
        if not held:
            continue
        best, between = cheapest(mine, held[0].kl), bits_at(mine, held[0].kl)
        bits = held[0].bits_per_value
        rows.append(
            {
                "codec": codec,
                "level": level,
                "chunk_tokens": chunk_tokens,
                "bits_per_value": bits,
                "kl": held[0].kl,
                "product_level": best.level if best else None,
                "ratio": best.bits_per_value / bits if best else None,
                "ratio_interpolated": between / bits if between else None,
            }
        )
    return rows


def rate_table(product: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """KL at round rates: the product's, and the least of any baseline's, between levels."""
    rows = []
    names = dict.fromkeys(point.codec for point in points)
    for chunk_tokens in dict.fromkeys(point.chunk_tokens for point in points):
        for rate in _RATES:
            found = {}
            for name in names:
                kl = kl_at(select(points, codec=name, chunk_tokens=chunk_tokens), rate)
                if kl is not None:
                    found[name] = kl
            mine = found.pop(product, None)
            others = {name: kl for name, kl in found.items() if not name.startswith(product)}
            best = min(others, key=lambda name: others[name]) if others else None
            rows.append(
                {
                    "chunk_tokens": chunk_tokens,
                    "bits_per_value": rate,
                    "kl": mine,
                    "best_baseline": best,
                    "best_baseline_kl": others[best] if best else None,
                }
            )
    return rows


def contribution(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Bits a value that each ablation needs for the same KL, at two of them."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(point.codec for point in points):
        bits = [bits_at(select(points, codec=name), kl) for kl in CONTRIBUTION_KL]
        rows += [
            {"codec": name, "kl": kl, "bits_per_value": value}
            for kl, value in zip(CONTRIBUTION_KL, bits, strict=True)
        ]
    return rows


def tables_of(product: str, results: dict[str, Any]) -> list[Table]:
    """What a person reads."""
    return [
        *(
            _point_table(title, results[key])
            for title, key in (
                ("Test text", "points"),
                ("Shifted domain: Python source code", "shifted_points"),
                ("Synthetic outlier channels", "stress_points"),
                ("Ablations", "ablation_points"),
            )
            if key in results
        ),
        Table(
            f"Bytes of {product} over a baseline's at no higher KL",
            ("baseline", "level", "chunk", "bits", "ratio", "between levels"),
            [
                (
                    row["codec"],
                    row["level"],
                    row["chunk_tokens"],
                    row["bits_per_value"],
                    row["ratio"],
                    row["ratio_interpolated"],
                )
                for row in results["size_ratio"]
            ],
        ),
        Table(
            "KL at round rates, between levels: the product's and the best baseline's",
            ("chunk", "bits", "KL", "baseline", "its KL"),
            [
                (
                    row["chunk_tokens"],
                    row["bits_per_value"],
                    _kl(row["kl"]),
                    row["best_baseline"],
                    _kl(row["best_baseline_kl"]),
                )
                for row in results["kl_against_best_baseline"]
            ],
        ),
        Table(
            "Bits a value for the same KL",
            ("codec", "KL", "bits"),
            [
                (row["codec"], str(row["kl"]), row["bits_per_value"])
                for row in results["contribution"]
            ],
        ),
        Table(
            "Bits a coefficient by grouping, and bits to store all levels",
            ("what", "bits"),
            [
                *results["entropy_by_grouping"].items(),
                *results["storing_all_levels_bits"].items(),
            ],
        ),
        _speed_table(results),
    ]


def _point_table(title: str, points: Sequence[dict[str, Any]]) -> Table:
    return Table(
        title,
        ("codec", "level", "chunk", "bits", "KL", "KL p99", "ppl +", "top-1", "recall"),
        [
            (
                point["codec"],
                point["level"],
                point["chunk_tokens"],
                point["bits_per_value"],
                f"{point['kl']:.5f}",
                f"{point['kl_p99']:.4f}",
                f"{point['ppl_delta']:+.3f}",
                f"{point['top1_agreement']:.3f}",
                point["recall"],
            )
            for point in points
        ],
    )


def _kl(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _speed_table(results: dict[str, Any]) -> Table:
    rows: list[Sequence[Any]] = [
        (f"{results['product_codec']}, {name}", results["encode_mb_s"][name], value, None)
        for name, value in results["decode_mb_s"].items()
    ]
    for part in ("speed_by_head_dim", "entropy_stage", "compared_speed"):
        for name, row in results[part].items():
            label = f"symbols: {name}" if part == "entropy_stage" else name
            rows.append((label, row["encode_mb_s"], row["decode_mb_s"], row["bits_per_value"]))
    rows.append(("memcpy", results["memcpy_mb_s"], results["memcpy_mb_s"], 16.0))
    return Table(
        "Speed, MB of raw KV a second, one core", ("what", "encode", "decode", "bits"), rows
    )
