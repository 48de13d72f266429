"""Case `stream`: a context's coded KV over a network, in virtual time with real sizes.

The product's planner against fixed levels, uniform quantisation, recomputation and an oracle that
knows the link; and the same planner over a real socket, so that virtual time can be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError, Options, Report
from bench.core.output import Table
from bench.core.stats import median
from bench.stream import plots
from bench.stream.content import CHUNK_TOKENS, RAW_BYTES_PER_TOKEN, Content, make_content
from bench.stream.links import (
    GBPS,
    Link,
    SteadyLink,
    falling_link,
    random_chunk_link,
    random_timed_link,
)
from bench.stream.real import compare_with_virtual
from bench.stream.served import serve
from bench.stream.sim import (
    REQUEST_S,
    Served,
    fixed,
    oracle,
    quantised,
    stream,
    text,
)
from sglang_ext.streaming import ChunkOffer, QualityScale, StreamCosts

SLOS_S = (1.0, 0.5)
CONTEXT_TOKENS = 9600
NUM_TRACES = 20
SIDES = ("adaptive", "fixed", "quantised", "text", "oracle")
# NVIDIA's data sheet of the A40: 149.7 TFLOPS in bfloat16, half of which a prefill is taken to get.
# Mistral-7B: 7.24 billion parameters, 32 layers of width 4,096.
_A40_FLOPS, _PARAMETERS, _LAYERS, _WIDTH = 0.5 * 149.7e12, 7.24e9, 32, 4096
_LAUNCH_S = 0.01
_GPU_DECODE = 100e9  # bytes a second, decoded; a parameter, not a measurement

_NOTE = (
    "Sizes: the product's encoder on KV in the shape of Mistral-7B (32 layers, 8 heads of 128) "
    "with the bundled model's statistics; KL: the bundled model's at the same level. Prefill: "
    f"{_A40_FLOPS / 1e12:.0f} TFLOPS (half of an A40's). Decoding: {_GPU_DECODE / 1e9:.0f} GB/s, "
    "a parameter."
)
_INTERVAL_S = 0.1  # of traces over time
_MAX_TOKENS = 15_000
_TIE = 1.02  # the oracle's grid of levels is coarser than the planner's time


def prefill_a40_s(num_new: int, num_before: int) -> float:
    """Seconds of an A40-class GPU to compute new tokens behind others, from FLOPs."""
    attention = 4 * _LAYERS * _WIDTH * num_new * (num_before + num_new / 2)
    return _LAUNCH_S + (2 * _PARAMETERS * num_new + attention) / _A40_FLOPS


@dataclass(frozen=True)
class World:
    """What all parts of the case share."""

    content: Content
    quality: QualityScale
    costs: StreamCosts

    def offers(self, num_tokens: int) -> list[ChunkOffer]:
        """A context's chunks."""
        return self.content.offers(num_tokens)

    def quantised(
        self, link: Link, num_tokens: int, bits: int = 8, concurrency: int = 1
    ) -> list[Served]:
        """Uniform quantisation of some bits."""
        size = self.content.uniform_bytes(bits, num_tokens)
        kl = self.content.uniform[bits][1]
        return quantised(self.offers(num_tokens), size, self.costs, kl, link, concurrency)


def run(options: Options) -> Report:
    """Runs the case; see the module."""
    quick = options.quick
    options.progress.stage("stream: content")
    content = make_content(4 if quick else 16, 3 if quick else 7, options.progress)
    quality = QualityScale(content.damage, content.profile.default_level)
    costs = StreamCosts(RAW_BYTES_PER_TOKEN, _GPU_DECODE, prefill_a40_s, REQUEST_S)
    world = World(content, quality, costs)
    options.progress.stage("stream: traces")
    traces, samples = _traces(world, options.progress.update)
    options.progress.stage("stream: sweeps")
    sweeps = {
        "bandwidth": _bandwidths(world),
        "context": _contexts(world),
        "concurrency": _concurrency(world),
        "slo": _slos(world),
        "crossover": _crossovers(world),
        "steady": _steady(world),
        "falling": _falling(world),
    }
    options.progress.stage("stream: real sockets")
    real = compare_with_virtual(
        content, (0.1, 0.3, 1.0) if quick else (0.1, 0.3, 1.0, 3.0), 1 if quick else 5
    )
    options.progress.stage("stream: the server's remote tier")
    served = serve(content, (0.1, 0.3), 2 if quick else 4, 1 if quick else 5)
    _check(traces, sweeps)
    results = {
        "traces": traces,
        "sweeps": sweeps,
        "real_link": real,
        "served": served,
        "damage_by_level": list(content.damage),
        "bytes_by_level": [list(sizes) for sizes in content.chunks],
        "uniform": {str(bits): list(pair) for bits, pair in content.uniform.items()},
    }
    plots.plot_all(options.out_dir, sweeps)
    return Report(
        results,
        samples=samples,
        n={"traces": NUM_TRACES, "damage_windows": 4 if quick else 16},
        tables=_tables(results),
        notes=[_NOTE],
    )


def _traces(world: World, tell: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds: dict[str, Callable[[np.random.Generator], Link]] = {
        "chunk": lambda rng: random_chunk_link(rng, -(-CONTEXT_TOKENS // CHUNK_TOKENS)),
        "timed": lambda rng: random_timed_link(rng, _INTERVAL_S, 60.0),
    }
    found, samples = {}, {}
    for kind, make in kinds.items():
        for slo_s in SLOS_S:
            name = f"{kind}-{1000 * slo_s:.0f}ms"
            tell(name)
            rng = np.random.default_rng(13)
            links = [make(rng) for _ in range(NUM_TRACES)]
            found[name], samples[name] = _one_slo(world, links, slo_s)
    return found, samples


def _one_slo(
    world: World, links: Sequence[Link], slo_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    offers, costs, quality = world.offers(CONTEXT_TOKENS), world.costs, world.quality
    served: dict[str, list[Served]] = {
        "adaptive": [stream(offers, costs, quality, link, slo_s=slo_s)[0] for link in links],
        "quantised": [world.quantised(link, CONTEXT_TOKENS)[0] for link in links],
        "text": [text(offers, costs)[0] for _ in links],
        "oracle": [oracle(offers, costs, quality, link, slo_s) for link in links],
    }
    levels = [
        [fixed(offers, level, costs, kl, link)[0] for link in links]
        for level, kl in enumerate(world.content.damage)
    ]
    late = _violations(served["adaptive"], slo_s)
    served["fixed"] = next(
        (each for each in reversed(levels) if _violations(each, slo_s) <= late), levels[0]
    )
    busy = [each.link_busy for each in served["adaptive"] if each.link_busy is not None]
    row = {
        "slo_ms": 1000 * slo_s,
        "violation_rate": {side: _violations(served[side], slo_s) for side in SIDES},
        "ttft_ms": {side: 1e3 * _mean(served[side], "ttft_s") for side in SIDES},
        "kl": {side: _mean(served[side], "kl") for side in SIDES},
        "fixed_level": next(at for at, each in enumerate(levels) if each is served["fixed"]),
        "all_fixed_violation_rate": [_violations(each, slo_s) for each in levels],
        "link_busy": min(busy),
    }
    raw = {
        side: [{"ttft_s": each.ttft_s, "kl": each.kl} for each in served[side]] for side in SIDES
    }
    return row, raw


def _violations(served: Sequence[Served], slo_s: float) -> float:
    return float(np.mean([each.ttft_s > slo_s for each in served]))


def _mean(served: Sequence[Served], what: str) -> float:
    return float(np.mean([getattr(each, what) for each in served]))


def _sides(world: World, link: Link, num_tokens: int, concurrency: int = 1) -> dict[str, float]:
    """Mean TTFT in seconds without a deadline, the link's speed known from before."""
    offers = world.offers(num_tokens)
    known = link.bytes_per_s if isinstance(link, SteadyLink) else None
    bits = world.content.uniform_bits_at_default
    return {
        "ours": _mean(
            stream(
                offers,
                world.costs,
                world.quality,
                link,
                concurrency=concurrency,
                known_bytes_per_s=known,
            ),
            "ttft_s",
        ),
        "8-bit": _mean(world.quantised(link, num_tokens, 8, concurrency), "ttft_s"),
        "uniform, equal KL": _mean(world.quantised(link, num_tokens, bits, concurrency), "ttft_s"),
        "text": _mean(text(offers, world.costs, concurrency), "ttft_s"),
    }


def _bandwidths(world: World) -> list[dict[str, float]]:
    """The paper's figure 11: a context of 16K over 0.1 to 40 Gbps."""
    speeds = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 10.0, 20.0, 40.0)
    return [{"gbps": each, **_sides(world, SteadyLink(each * GBPS), 16_000)} for each in speeds]


def _contexts(world: World) -> list[dict[str, float]]:
    """The paper's figure 12, right: 0.1K to 15K tokens at 3 Gbps."""
    lengths = (100, 200, 400, 800, 1500, 3000, 6000, 9600, 15_000)
    return [{"tokens": each, **_sides(world, SteadyLink(3 * GBPS), each)} for each in lengths]


def _concurrency(world: World) -> list[dict[str, float]]:
    """The paper's figure 12, left: 1 to 16 requests at once, 9.6K tokens at 3 Gbps."""
    link = SteadyLink(3 * GBPS)
    return [
        {"requests": each, **_sides(world, link, CONTEXT_TOKENS, each)} for each in (1, 2, 4, 8, 16)
    ]


def _slos(world: World) -> list[dict[str, Any]]:
    """The paper's figure 13: violations by deadline, bandwidth drawn for each chunk."""
    rng = np.random.default_rng(13)
    links = [random_chunk_link(rng, -(-CONTEXT_TOKENS // CHUNK_TOKENS)) for _ in range(NUM_TRACES)]
    rows = []
    for slo_s in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        row, _ = _one_slo(world, links, slo_s)
        rows.append({"slo_s": slo_s, "violation_rate": row["violation_rate"], "kl": row["kl"]})
    return rows


def _steady(world: World) -> dict[str, Any]:
    """3 Gbps, 9.6K tokens: ours over text, over 8 bits, over uniform quantisation at equal KL."""
    sides = _sides(world, SteadyLink(3 * GBPS), CONTEXT_TOKENS)
    ours = sides["ours"]
    return {
        "ttft_s": sides,
        "uniform_bits": world.content.uniform_bits_at_default,
        "over_text": ours / sides["text"],
        "over_8_bit": ours / sides["8-bit"],
        "over_uniform": ours / sides["uniform, equal KL"],
    }


def _crossovers(world: World) -> list[dict[str, float]]:
    """The longest context that the planner computes, and that computing is not slower for."""
    costs, level = world.costs, world.quality.default_level

    def is_chosen(num_tokens: int, speed: float) -> bool:
        link = SteadyLink(speed)
        offers = world.offers(num_tokens)
        served = stream(offers, costs, world.quality, link, known_bytes_per_s=speed)[0]
        return served.text_tokens == num_tokens

    def is_faster(num_tokens: int, speed: float) -> bool:
        offers = world.offers(num_tokens)
        fetched = fixed(offers, level, costs, 0.0, SteadyLink(speed))[0]
        return text(offers, costs)[0].ttft_s <= fetched.ttft_s

    return [
        {
            "gbps": gbps,
            "chosen_tokens": _last(is_chosen, gbps * GBPS),
            "measured_tokens": _last(is_faster, gbps * GBPS),
        }
        for gbps in (0.1, 0.3, 1.0, 3.0, 10.0)
    ]


def _last(holds: Callable[[int, float], bool], speed: float) -> int:
    """The longest context for which something holds that stops to, or `_MAX_TOKENS`."""
    low, high = 0, _MAX_TOKENS
    if holds(high, speed):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle, speed) else (low, middle)
    return low


def _falling(world: World) -> dict[str, Any]:
    """The paper's figure 7: the link drops to a tenth and recovers, 4 s are given."""
    offers, link = world.offers(CONTEXT_TOKENS), falling_link()
    served = stream(offers, world.costs, world.quality, link, slo_s=4.0)[0]
    top = len(world.content.damage) - 1
    return {
        "slo_s": 4.0,
        "adaptive_ttft_s": served.ttft_s,
        "adaptive_kl": served.kl,
        "fixed_top_ttft_s": fixed(offers, top, world.costs, 0.0, link)[0].ttft_s,
        "8-bit_ttft_s": world.quantised(link, CONTEXT_TOKENS)[0].ttft_s,
        "text_ttft_s": text(offers, world.costs)[0].ttft_s,
    }


def _check(traces: dict[str, Any], sweeps: dict[str, Any]) -> None:
    """Refuses figures that cannot be.

    Raises:
        CaseFailedError: somebody beats the oracle, or a first token comes before its bytes can.
    """
    for name, row in traces.items():
        late = row["violation_rate"]
        if late["oracle"] > late["adaptive"]:
            raise CaseFailedError(f"{name}: the planner misses fewer deadlines than the oracle")
        if (
            late["oracle"] == late["adaptive"]
            and row["kl"]["adaptive"] * _TIE < row["kl"]["oracle"]
        ):
            raise CaseFailedError(f"{name}: the planner does less damage than the oracle")
    for row in sweeps["bandwidth"]:
        if row["ours"] > min(row["8-bit"], row["text"]) * _TIE:
            raise CaseFailedError(f"{row['gbps']} Gbps: something simpler is faster: {row}")


def _tables(results: dict[str, Any]) -> list[Table]:
    traces = Table(
        f"{NUM_TRACES} random links of 0.1 to 10 Gbps, {CONTEXT_TOKENS:,} tokens",
        ("link and deadline", "", *SIDES),
    )
    for name, row in results["traces"].items():
        for what, key in (("late", "violation_rate"), ("TTFT, ms", "ttft_ms"), ("KL", "kl")):
            cells = [row[key][side] for side in SIDES]
            if key == "kl":
                cells = [f"{value:.5f}" for value in cells]
            elif key == "violation_rate":
                cells = [f"{value:.0%}" for value in cells]
            traces.rows.append((name, what, *cells))
    steady = results["sweeps"]["steady"]
    first = Table("3 Gbps, 9,600 tokens", ("TTFT", "s", "ours over it"))
    for side, value in steady["ttft_s"].items():
        first.rows.append((side, value, steady["ttft_s"]["ours"] / value))
    cross = Table(
        f"Text up to ({_MAX_TOKENS:,}: always)", ("Gbps", "chosen, tokens", "measured, tokens")
    )
    for row in results["sweeps"]["crossover"]:
        cross.rows.append((row["gbps"], row["chosen_tokens"], row["measured_tokens"]))
    real = Table("Real socket, CPU decoder", ("Gbps", "measured, s", "virtual time, s"))
    for row in results["real_link"]:
        real.rows.append((row["gbps"], row["measured_s"], row["virtual_s"]))
    tier = Table(
        "A context through RemotePages, Redis and a proxy",
        ("Gbps", "MB", "last byte, s", "in DRAM, s", "link busy"),
    )
    for row in results["served"]:
        busy = f"{row['link_busy']:.0%}"
        mb = row["bytes"] / 1e6
        tier.rows.append((row["gbps"], mb, row["stream_s"], row["ready_s"], busy))
    sizes = Table("Levels", ("level", "bytes of a chunk", "KL"))
    for level, kl in enumerate(results["damage_by_level"]):
        size = median([float(each[level]) for each in results["bytes_by_level"]])
        sizes.rows.append((level, int(size), f"{kl:.5f}"))
    return [traces, first, cross, real, tier, sizes]
