"""Case `codec`: rate against damage of every codec, and how fast the product's is.

Windows of text that no profile or table has seen: the model runs on a prefix, its KV goes through a
codec, and the model's predictions for a given continuation are compared with those on the untouched
cache. Every byte of a container counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.codec import analysis, plots, speed
from bench.codec.bed import Bed, make_bed, stressed_bed
from bench.codec.hier import check_engines, hier_methods, stream_parts
from bench.codec.methods import (
    KVTC_TARGETS,
    Method,
    cachegen_methods,
    exact_methods,
    kvtc_methods,
    simple_methods,
)
from bench.codec.quality import Point, Prepared, measure, recall
from bench.codec.report import results_of, tables_of
from bench.core.case import Options, Report
from sglang_ext.codec import create_codec

PRODUCT = "hier"
CHUNKS = (1500, 256)
_CORE = ("cachegen-paper", "cachegen-released", PRODUCT)
_RATES_NOTE = (
    "Rates count whole chunks with every byte of their container. CacheGen's baselines, int and "
    "KIVI code K as an engine caches it; the others code it before rotation."
)


@dataclass(frozen=True)
class Plan:
    """How much is run.

    Attributes:
        windows: of test text.
        side_windows: of the shifted domain, the stress set and ablations.
        recall_prompts: prompts of the recall test.
        repeats: timed runs of an engine.
    """

    windows: int
    side_windows: int
    recall_prompts: int
    repeats: int

    @classmethod
    def of(cls, options: Options) -> Plan:
        """The plan of a quick or a full run."""
        if options.quick:
            return cls(windows=2, side_windows=1, recall_prompts=2, repeats=3)
        return cls(windows=16, side_windows=6, recall_prompts=10, repeats=9)


def run(options: Options) -> Report:
    """Runs the case; see the module."""
    torch.set_num_threads(1)
    plan = Plan.of(options)
    bed = make_bed(options, plan.windows, plan.side_windows, plan.recall_prompts)
    check_engines(bed.profile, bed.dtype, bed.test[0].capture.planes)
    methods = main_methods(bed)
    points = _points(bed, methods, options, plan)
    side = _side_points(bed, methods, options, plan)
    options.progress.stage("codec: analyses and speed")
    found = _analyses(bed, methods, plan)
    speeds = _speeds(bed, plan, options)
    results, samples = results_of(PRODUCT, points, side, found, speeds)
    _plot(options, points, side, found, speeds)
    return Report(
        results=results,
        samples=samples,
        n={"windows": len(bed.test), "side_windows": len(bed.shifted), "repeats": plan.repeats},
        tables=tables_of(PRODUCT, results),
        notes=[
            f"{bed.corpus.source}.",
            *_recall_note(bed),
            _RATES_NOTE,
        ],
    )


def _recall_note(bed: Bed) -> list[str]:
    if not bed.recall:
        return []
    share = recall(bed.lm, None, bed.recall, CHUNKS[0])
    asked = sum(len(prompt.questions) for prompt, _ in bed.recall)
    return [f"Recall on untouched caches: {share:.3f} of {asked} questions."]


def main_methods(bed: Bed) -> list[Method]:
    """The lossy codecs, as published."""
    planes = [capture.planes for capture in bed.calibration]
    targets = KVTC_TARGETS[::2] if bed.quick else KVTC_TARGETS
    return [
        *core_methods(bed),
        *simple_methods(bed.dtype),
        *kvtc_methods(planes, bed.dtype, targets),
    ]


def core_methods(bed: Bed) -> list[Method]:
    """The product's codec and CacheGen's two: all that a quick run compares everywhere."""
    rotated = [capture.rotated for capture in bed.calibration]
    return [
        *cachegen_methods(rotated, bed.dtype, rotated=True),
        *hier_methods(bed.profile, bed.dtype),
    ]


def extra_methods(bed: Bed) -> list[Method]:
    """Lossless codecs, and CacheGen's on position-free K."""
    planes = [capture.planes for capture in bed.calibration]
    return [
        *exact_methods(bed.dtype, ("zstd", "lossless")),
        *cachegen_methods(planes, bed.dtype, rotated=False),
    ]


def _points(bed: Bed, methods: Sequence[Method], options: Options, plan: Plan) -> list[Point]:
    """Points on the test text; long chunks are asked for recall, and go through the extras."""
    points = []
    options.progress.stage("codec: test text")
    for chunk_tokens in CHUNKS:
        chosen = methods
        if bed.quick and chunk_tokens != CHUNKS[0]:
            chosen = [method for method in methods if method.codec in _CORE]
        for number, method in enumerate(chosen):
            options.progress.update(f"{method.name}, {chunk_tokens} ({number}/{len(chosen)})")
            point = measure(bed.lm, method, bed.test, chunk_tokens)
            if bed.recall and chunk_tokens == CHUNKS[0]:
                asked = recall(bed.lm, method, bed.recall, chunk_tokens)
                point = replace(point, recall=asked)
            points.append(point)
    few = bed.test[: plan.side_windows]
    return points + [measure(bed.lm, method, few, CHUNKS[0]) for method in extra_methods(bed)]


def _side_points(
    bed: Bed, methods: Sequence[Method], options: Options, plan: Plan
) -> dict[str, list[Point]]:
    """Shifted domain, outlier channels, ablations: 1,500-token chunks, fewer windows."""
    side: dict[str, list[Point]] = {}
    core = [m for m in methods if m.codec in _CORE] if bed.quick else methods
    if bed.shifted:
        options.progress.stage("codec: shifted domain")
        side["shifted"] = [measure(bed.lm, method, bed.shifted, CHUNKS[0]) for method in core]
    options.progress.stage("codec: outlier channels")
    stressed = stressed_bed(bed, options, plan.side_windows)
    if stressed is not None:
        side["stress"] = [
            measure(stressed.lm, method, stressed.test, CHUNKS[0])
            for method in (core_methods(stressed) if bed.quick else main_methods(stressed))
        ]
    options.progress.stage("codec: ablations")
    windows = bed.test[: plan.side_windows]
    ablations = [method for method in methods if method.codec == PRODUCT] + bed.ablations()
    side["ablation"] = [measure(bed.lm, method, windows, CHUNKS[0]) for method in ablations]
    return side


def _analyses(bed: Bed, methods: Sequence[Method], plan: Plan) -> dict[str, Any]:
    """CacheGen's own analyses, and what the product's bytes are."""
    windows: list[Prepared] = bed.test[: plan.side_windows]
    product = [method for method in methods if method.codec == PRODUCT]
    released = [method for method in methods if method.codec == "cachegen-released"]
    chunk = np.ascontiguousarray(windows[0].capture.planes)
    parts = {
        tokens: stream_parts(
            bed.profile,
            bed.dtype,
            chunk[:, :tokens],
            bed.profile.default_level,
            bed.profile.raw_tokens,
        )
        for tokens in CHUNKS
    }
    coarse = product[max(0, bed.profile.default_level - 1)]
    return {
        "parts": parts,
        "layers": analysis.layer_sensitivity(bed.lm, coarse, windows),
        "grouping": analysis.grouping_entropy(
            bed.profile, bed.dtype, [window.capture.planes for window in windows]
        ),
        "storing": analysis.storing_levels(bed.profile, bed.dtype, chunk, released),
    }


def _speeds(bed: Bed, plan: Plan, options: Options) -> dict[str, Any]:
    """Engines of the product end to end, its entropy stage, and what they are compared with."""
    planes = np.ascontiguousarray(bed.test[0].capture.planes)
    few = np.ascontiguousarray(planes[:, :64])
    level = bed.profile.default_level
    engines = ["numba", "naive"] + (["triton"] if torch.cuda.is_available() else [])
    product = []
    for engine in engines:
        codec = create_codec(PRODUCT, dtype=bed.dtype, profile=bed.profile, engine=engine)
        is_slow = engine == "naive"
        chunk, repeats = (few, 1) if is_slow else (planes, plan.repeats)
        product.append(speed.codec_speed(engine, codec, chunk, level, repeats))
    others = [speed.zstd_speed(planes, zstd_level, plan.repeats) for zstd_level in (1, 3)]
    released = create_codec("cachegen-released", dtype=bed.dtype)
    others.append(speed.codec_speed("cachegen-released", released, planes, 1, 2))
    lossless = create_codec("lossless", dtype=bed.dtype)
    others.append(speed.codec_speed("lossless", lossless, planes, 0, plan.repeats))
    return {
        "product": product,
        "others": others,
        "head_dims": speed.head_dim_speeds(
            [capture.planes for capture in bed.calibration[:2]], bed.dtype, plan.repeats
        ),
        "entropy": speed.entropy_stage(bed.profile, bed.dtype, planes, plan.repeats),
        "memcpy": speed.memcpy_mb_s(3),
    }


def _plot(
    options: Options,
    points: Sequence[Point],
    side: dict[str, list[Point]],
    found: dict[str, Any],
    speeds: dict[str, Any],
) -> None:
    folder = options.out_dir
    for chunk_tokens in CHUNKS:
        plots.plot_rate_against_damage(
            folder / f"codec-{chunk_tokens}.png",
            f"Test text, chunks of {chunk_tokens} tokens",
            analysis.select(points, chunk_tokens=chunk_tokens),
            PRODUCT,
        )
    for name, title in (
        ("shifted", "Python source code, calibrated on manuals"),
        ("stress", "Synthetic outlier channels"),
        ("ablation", "One idea taken away"),
    ):
        if name in side:
            path = folder / f"codec-{name}.png"
            plots.plot_rate_against_damage(path, title, side[name], PRODUCT)
    plots.plot_layers(
        folder / "codec-layers.png",
        "KL when one layer alone is coded",
        [str(row["layer"]) for row in found["layers"]],
        [row["kl"] for row in found["layers"]],
    )
    rows = [*speeds["product"], *speeds["others"], *speeds["entropy"]]
    plots.plot_speed(
        folder / "codec-speed.png",
        "Speed on one core",
        [(row.name, row.encode_mb_s, row.decode_mb_s) for row in rows],
    )
