"""``make demo``: chats and documents on a real server with a small KV pool, without the plugin and
with it.

Starts SGLang on the bundled model twice, runs the same programs on both, prints what was reused and
how long the first token took, writes ``build/demo.json`` and ``build/demo.png``. Ends with 1 when
the effect is not there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.machine import describe_machine
from bench.core.output import Progress, Table
from bench.core.stats import median, percentile
from testkit.server import ROOT, Server

if TYPE_CHECKING:
    from bench.demo.chats import Material, Served

BUILD = ROOT / "build"
SIDES = ("without", "with")
_NUM_CHATS, _NUM_TURNS, _NUM_DOCUMENTS, _NUM_QUESTIONS = 20, 4, 6, 4
_POOL_SHARE, _DRAM_SHARE = 1 / 6, 1 / 2  # of the working set; the disk holds all of it
_PAGE, _SLOT_BYTES = 64, 266_240  # of the bundled model
_LEAST_REUSE = 0.9
_SIZE_COMMAND = (
    ".venv/bin/hier-kv size tests/assets/tinylm --trace build/demo-trace.jsonl --block-tokens 64"
)


def main() -> int:
    """Runs the demo; returns the exit status."""
    # The frontend would send its requests to 127.0.0.1 through a proxy of the environment.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    BUILD.mkdir(exist_ok=True)
    from bench.demo.trace import write_trace

    with Progress() as progress:
        progress.stage("reading the bundled documents")
        material, tokens = demo_material()
        found = {side: _run_side(side, material, tokens, progress) for side in SIDES}
    report = _report(found, material, tokens)
    write_trace(found["with"], BUILD / "demo-trace.jsonl")
    (BUILD / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    _plot(found, report, BUILD / "demo.png")
    print(_intro(material, tokens))
    print(f"\n{_table(report).render()}\n\n{_sentence(report)}")
    print(f"\n{BUILD / 'demo.json'}\n{BUILD / 'demo.png'}\n{BUILD / 'demo-trace.jsonl'}")
    print(f"\nWhich sizes of DRAM and disk this traffic is worth:\n  {_SIZE_COMMAND}")
    problems = _problems(report)
    for problem in problems:
        print(f"demo: the effect is not there: {problem}", file=sys.stderr)
    return 1 if problems else 0


def demo_material() -> tuple[Material, int]:
    """The texts, and how many tokens they are."""
    from bench.demo.chats import make_material
    from testkit.workload import load_tokenizer

    material = make_material(_NUM_CHATS, _NUM_TURNS, _NUM_DOCUMENTS, _NUM_QUESTIONS)
    return material, material.distinct_tokens(load_tokenizer())


def _run_side(side: str, material: Material, tokens: int, progress: Progress) -> list[Served]:
    name = f"SGLang {side} the plugin"
    with tempfile.TemporaryDirectory(prefix="demo-disk-", dir=BUILD) as folder:
        args: list[Any] = []
        if side == "with":
            args += ["--enable-hier-kv", "--hier-kv-host-size", dram_gb(tokens, _DRAM_SHARE)]
            args += ["--hier-kv-disk-dir", folder, "--hier-kv-disk-size", 1]
        return serve(name, args, material, tokens, progress)


def dram_gb(tokens: int, share: float) -> float:
    """Value of --hier-kv-host-size for a share of the working set."""
    return int(tokens * share) // _PAGE * _SLOT_BYTES / 2**30


def serve(
    name: str, tiers: list[Any], material: Material, tokens: int, progress: Progress
) -> list[Served]:
    """Runs the demo's chats and documents on a real server with some tiers.

    Args:
        name: of the run, for the screen and the log's file.
        tiers: the plugin's arguments.
        material: the texts.
        tokens: the working set.
        progress: is told how far it is.
    """
    from bench.demo.chats import drive

    pool = max(4096, int(tokens * _POOL_SHARE) // _PAGE * _PAGE)
    args: list[Any] = ["--page-size", _PAGE, "--max-total-tokens", pool]
    # torch_native computes a cached prefix's attention again; a GPU's backends do not.
    args += ["--attention-backend", "cpu_extend", *tiers]
    progress.stage(f"{name}: starting")
    log = BUILD / "logs" / f"demo-{name.lower().replace(' ', '-').replace('/', '-')}.log"
    log.unlink(missing_ok=True)
    with Server(args, log_path=log, stop="kill", progress=progress.update) as server:
        progress.stage(name)
        num = material.num_requests
        return drive(
            server.url, material, lambda done: progress.update(f"{done} of {num} requests")
        )


def _report(found: dict[str, list[Served]], material: Material, tokens: int) -> dict[str, Any]:
    sides = {side: _figures(served) for side, served in found.items()}

    def pick(key: str) -> dict[str, Any]:
        return {side: figures[key] for side, figures in sides.items()}

    return {
        "reuse_with": sides["with"]["reuse"],
        "reuse_without": sides["without"]["reuse"],
        "ttft_p50_ms": pick("ttft_p50_ms"),
        "ttft_p95_ms": pick("ttft_p95_ms"),
        "returning_ttft_p50_ms": pick("returning_ttft_p50_ms"),
        "returning_ttft_p95_ms": pick("returning_ttft_p95_ms"),
        "reused_tokens_by_tier": pick("by_tier"),
        "reusable_tokens": pick("reusable_tokens"),
        "prompt_tokens": pick("prompt_tokens"),
        "requests": material.num_requests,
        "working_set_tokens": tokens,
        "machine": describe_machine(),
        "samples": {
            side: {
                "ttft_ms": [round(one.ttft_ms, 2) for one in served],
                "prompt_tokens": [one.prompt_tokens for one in served],
                "reusable": [one.reusable for one in served],
                "cached": [one.cached for one in served],
            }
            for side, served in found.items()
        },
    }


def _figures(served: Sequence[Served]) -> dict[str, Any]:
    times = [one.ttft_ms for one in served]
    returning = [one.ttft_ms for one in served if one.reusable]
    reusable = sum(one.reusable for one in served)
    tiers = {"device": 0, "host": 0, "disk": 0}
    for one in served:
        counts = one.by_tier or {"device": one.cached}  # plain SGLang has the device only
        for tier in tiers:
            tiers[tier] += counts.get(tier, 0)
    return {
        "reuse": sum(one.reused for one in served) / reusable,
        "ttft_p50_ms": median(times),
        "ttft_p95_ms": percentile(times, 95),
        "returning_ttft_p50_ms": median(returning),
        "returning_ttft_p95_ms": percentile(returning, 95),
        "by_tier": tiers,
        "reusable_tokens": reusable,
        "prompt_tokens": sum(one.prompt_tokens for one in served),
    }


def _problems(report: dict[str, Any]) -> list[str]:
    problems = []
    reuse, plain = report["reuse_with"], report["reuse_without"]
    if reuse < _LEAST_REUSE or reuse <= plain:
        problems.append(
            f"expected at least {_LEAST_REUSE:.0%} of the reusable tokens to be reused, and more "
            f"than without the plugin; got {reuse:.1%} against {plain:.1%}"
        )
    tiers = report["reused_tokens_by_tier"]["with"]
    problems += [f"no token came from {tier}" for tier in ("host", "disk") if not tiers[tier]]
    times = report["returning_ttft_p50_ms"]
    if times["with"] >= times["without"]:
        problems.append(
            f"the first token of a returning prompt took {times['with']:.0f} ms with the plugin "
            f"and {times['without']:.0f} ms without it (medians)"
        )
    return problems


def _intro(material: Material, tokens: int) -> str:
    return (
        f"\n{len(material.chats)} chats of {_NUM_TURNS} turns and {len(material.documents)} "
        f"documents with {_NUM_QUESTIONS} questions each, in turns, {material.num_requests} "
        f"requests; {tokens:,} distinct tokens.\n"
        f"Device pool: 1/{1 / _POOL_SHARE:.0f} of that; DRAM: 1/{1 / _DRAM_SHARE:.0f}; disk: all."
    )


def _table(report: dict[str, Any]) -> Table:
    table = Table("SGLang without and with --enable-hier-kv", ("", *SIDES))
    rows = (
        ("TTFT p50, all prompts, ms", "ttft_p50_ms"),
        ("TTFT p95, all prompts, ms", "ttft_p95_ms"),
        ("TTFT p50, returning prompts, ms", "returning_ttft_p50_ms"),
        ("TTFT p95, returning prompts, ms", "returning_ttft_p95_ms"),
        ("prompt tokens", "prompt_tokens"),
        ("  of these reusable", "reusable_tokens"),
    )
    for name, key in rows:
        table.rows.append((name, *(report[key][side] for side in SIDES)))
    for tier in ("device", "host", "disk"):
        counts = [report["reused_tokens_by_tier"][side][tier] for side in SIDES]
        table.rows.append((f"  reused from {tier}", *counts))
    shares = [f"{report[f'reuse_{side}']:.1%}" for side in SIDES]
    table.rows.append(("reused of reusable", *shares))
    return table


def _sentence(report: dict[str, Any]) -> str:
    times = report["returning_ttft_p50_ms"]
    return (
        f"With the plugin {report['reuse_with']:.1%} of the reusable prompt tokens were reused "
        f"instead of {report['reuse_without']:.1%}, and the first token of a returning prompt "
        f"came {times['without'] / times['with']:.1f} times as fast."
    )


def _plot(found: dict[str, list[Served]], report: dict[str, Any], path: Path) -> None:
    from bench.core.plots import figure, save

    fig, (left, right) = figure(10.0, 4.4, ncols=2)
    _plot_times(left, found)
    _plot_origins(right, report)
    save(fig, path)


def _plot_times(axes: Any, found: dict[str, list[Served]]) -> None:
    from bench.core.plots import COLOURS, plain_log_axis

    all_times: list[float] = []
    for side, colour in zip(SIDES, COLOURS, strict=False):
        times = sorted(one.ttft_ms for one in found[side] if one.reusable)
        shares = [(index + 1) / len(times) for index in range(len(times))]
        axes.plot(times, shares, color=colour, label=f"{side} the plugin", drawstyle="steps-post")
        all_times += times
    plain_log_axis(axes, min(all_times), max(all_times))
    axes.set_xlabel("time to first token, ms")
    axes.set_ylabel("share of returning prompts")
    axes.set_title("Time to first token, returning prompts", fontsize=10)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _plot_origins(axes: Any, report: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    from bench.core.plots import COLOURS

    bottom = [0, 0]
    for tier, colour in zip(("device", "host", "disk"), COLOURS, strict=False):
        counts = [report["reused_tokens_by_tier"][side][tier] for side in SIDES]
        axes.barh(SIDES, counts, left=bottom, color=colour, label=f"reused, {tier}")
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    rest = [report["prompt_tokens"][side] - low for side, low in zip(SIDES, bottom, strict=True)]
    axes.barh(SIDES, rest, left=bottom, color="#eceff1", label="computed")
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5))  # of more, six digits each would touch
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set_xlabel("prompt tokens")
    axes.set_title("Where prompt tokens came from", fontsize=10)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


if __name__ == "__main__":
    sys.exit(main())
