"""The AttentionStore paper's set-up through the server's page store, beside optima of its order.

    python -m bench.policies.paper                # 9,000 chats, 52,000 turns: hours
    python -m bench.policies.paper --scale 0.02   # so much of the chats, disk and turns

13B and 65B with 128 GB of DRAM and 2 and 10 TB of disk (docs/policies.md, chats). Columns:

- hits: reused tokens, as a share of those that an unbounded store would have given;
- by turns: the mean of that share over all turns, which is how the paper counts;
- in DRAM: share of the hits that were there before their turn.

Optima and LRU are over DRAM and disk together, which the server's store is not, as its disk holds
DRAM's pages, too; and over the disk alone, which is what it can hold.

DRAM is never less than 0.15 of the paper's: of less than some conversations it would not be a tier.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.core.trace_flags import add_chunk_flag
from bench.policies.checks import check_all
from bench.policies.jobs import Figures, Job, simulate
from bench.policies.order import ORDERS, order_figures
from bench.policies.plan import DISKS_GB, FULL, QUICK, chat_jobs, for_servers
from bench.policies.workloads.models import LLAMA_13B, LLAMA_65B
from sglang_ext.settings.config import PREFETCH_POLICIES
from sglang_ext.simulator.virtual_store import DEFAULT_PREFETCH_POLICY
from sglang_ext.tiers.store import DEFAULT_POLICY

MODELS = (LLAMA_13B, LLAMA_65B)
POLICIES = ("lookahead", "off", "lru", "waiting", "belady")


def paper_jobs(scale: float) -> list[Job]:
    """The four set-ups, all of them at a share of their size."""
    host_scale = max(scale, QUICK.host_scale)
    sizes = replace(FULL, scale=scale, host_scale=host_scale, models=MODELS)
    names = {f"{model.name} {disk}" for model in MODELS for disk in DISKS_GB}
    return [replace(job, policies=POLICIES) for job in chat_jobs(sizes) if job.name in names]


def main(arguments: Sequence[str]) -> None:
    """Prints the figures, each set-up's when it is done."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies.paper")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the paper's size")
    parser.add_argument("--only", default="", help="set-ups whose name has this in it")
    parser.add_argument("--write-policy", default=DEFAULT_POLICY, help="the server's flag")
    parser.add_argument(
        "--prefetch-policy", default=DEFAULT_PREFETCH_POLICY, choices=PREFETCH_POLICIES,
        help="the server's flag",
    )  # fmt: skip
    add_chunk_flag(parser)
    flags = parser.parse_args(arguments)
    if not 0 < flags.scale <= 1:
        parser.error(f"--scale must be above 0 and at most 1, came {flags.scale:g}")
    jobs = paper_jobs(flags.scale)
    chosen = [
        replace(job, system=replace(job.system, write_policy=flags.write_policy))
        for job in for_servers(jobs, flags.prefetch_policy, flags.chunked_prefill_size)
        if flags.only in job.name
    ]
    if not chosen:
        names = ", ".join(job.name for job in jobs)
        parser.error(f"--only must be a part of one of {names}; came {flags.only!r}")
    for job in chosen:
        print(f"{job.name}: simulating ...", file=sys.stderr, flush=True)
        result = simulate(job, keeps_order=True)
        check_all([job], {job.name: result})
        print(f"{job.name}, {flags.scale:g} of the paper's size", flush=True)
        for policy, figures in result.figures.items():
            where = ", DRAM + disk" if policy in ORDERS else ""
            _print_row(policy + where, figures)
        assert result.recorded is not None
        disk_alone = replace(job.system, dram_bytes=0)
        for policy in (name for name in job.policies if name in ORDERS):
            figures = order_figures(
                result.recorded, disk_alone, policy, job.warmup_turns, job.measured_turns
            )
            _print_row(f"{policy}, disk alone", figures)


def _print_row(name: str, figures: Figures) -> None:
    row = f"hits {figures['hit_rate']:.3f}, by turns {figures['turn_hit_rate']:.3f}"
    if "host_share" in figures:
        row += f", in DRAM {figures['host_share']:.3f}"
    print(f"  {name:20} {row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
