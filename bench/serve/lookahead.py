"""A long queue whose prefixes are all on a slow disk: look-ahead against a server without it.

    python -m bench.serve.lookahead [--quick] [--json FILE]

Two servers, one after the other, with the same arguments but for `--hier-kv-lookahead`. With
`off` a request's pages are fetched when it enters the queue, as far as DRAM has room then, and when
its turn comes. Each answers the same bursts: 64 requests at once, each with a
prefix of its own that lies on disk only, while DRAM holds 8 prefixes. The disk is throttled so that
reading one prefix takes a given part of prefilling it, as measured just before in queues of fresh
ones.

Two groups of prefixes take turns, so that a burst never finds in DRAM what the one before it left
there. A burst counts only if all but a hundredth of its prefixes' tokens were on disk as it came.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError, Report, disk_folder
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone
from bench.core.stats import median, median_interval, percentile
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.requests import Timed, flush_device, random_ids, settle, tier_state, timed
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE

SIDES = ("on", "off")
NUM_REQUESTS, HOST_PREFIXES = 64, 8
READY_TARGET, TTFT_TARGET = 0.95, 1.5
READ_SHARE = 0.5
_PAGE, _QUESTION = 64, 32
_PREFIX = 1024
_GAP_S = 0.004
_AT_ONCE = 8
_MOST_ELSEWHERE = 0.01
# Prefilling a prefix takes a few tenths of a second on a core: the work of the scheduler and of the
# client is small beside it.
MODEL = DummyModel("lookahead", 4, 512, 8, 4, 64, 1024, 4096)


@dataclass
class Bursts:
    """What the bursts of one server gave.

    Attributes:
        ttft_ms: of each request, by burst, in the order of the queue.
        ready: requests of each burst whose stored pages were all in DRAM at admission.
        late: the others.
        reused: requests of each burst whose whole prefix was reused.
        elsewhere: tokens of each burst that lay in DRAM or on the device.
        prefill_ms: time that the prefill of one prefix takes in a queue of fresh ones.
        read_ms: time to read one prefix from the disk.
        disk_mb_s: its speed.
    """

    ttft_ms: list[list[float]] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    read_ms: float = 0.0
    disk_mb_s: float = 0.0


def measure_lookahead(
    folder: Path, bursts: int, progress: Progress, read_share: float = READ_SHARE
) -> dict[str, Any]:
    """Runs both servers.

    Args:
        folder: for the model and the disk tiers; on a disk.
        bursts: per server, at least 1.
        progress: where to say how far it is.
        read_share: time to read a prefix from disk over the time to prefill it.

    Returns:
        The figures and, under `samples`, the times behind them.

    Raises:
        CaseFailedError: a request's prefix was not on disk, or got lost.
    """
    model = MODEL.write(folder)
    found: dict[str, Bursts] = {}
    mb_s = 0.0
    for side in SIDES:
        run = _Side(folder, model, side, progress)
        found[side] = run.measure(bursts, mb_s, read_share)
        mb_s = found[side].disk_mb_s  # the same disk for both
    return {**_figures(found), "samples": _samples(found)}


class _Side:
    """One server and its bursts."""

    def __init__(self, folder: Path, model: Path, side: str, progress: Progress) -> None:
        self._side = side
        self._progress = progress
        self._rng = np.random.default_rng(2)  # the same prompts on both sides
        self._groups = [
            [random_ids(self._rng, _PREFIX) for _ in range(NUM_REQUESTS)] for _ in range(2)
        ]
        self._speed = folder / f"disk-mb-s-{side}"
        self._server = _server(folder, model, side, self._speed)

    def measure(self, bursts: int, mb_s: float, read_share: float) -> Bursts:
        """Computes all prefixes once, then sends the bursts.

        Args:
            bursts: how many.
            mb_s: speed of the disk; 0 to choose it by how long the prefixes took.
            read_share: what to choose it for.
        """
        # A single burst is of the first group; of the other only what pushes it out of DRAM.
        num = NUM_REQUESTS + (NUM_REQUESTS if bursts > 1 else 2 * HOST_PREFIXES)
        with self._server as server:
            prefills = [self._compute(server, at, num) for at in range(0, num, _AT_ONCE)]
            found = Bursts(prefill_ms=median(prefills[len(prefills) // 2 :]))
            kb = _PREFIX * MODEL.kv_bytes_per_token / 1e3
            found.disk_mb_s = mb_s or kb / (found.prefill_ms * read_share)
            found.read_ms = kb / found.disk_mb_s
            for at in range(bursts):
                self._progress.update(f"look-ahead {self._side}: burst {at + 1} of {bursts}")
                self._burst(server, self._groups[at % 2], found)
        return found

    def _compute(self, server: Server, at: int, num: int) -> float:
        """Prefills some fresh prefixes that wait in a queue; returns milliseconds a prefix."""
        self._progress.update(f"look-ahead {self._side}: prefix {at + 1} of {num}")
        prefixes = [prefix for group in self._groups for prefix in group][at : at + _AT_ONCE]
        prompts = [[*prefix, *random_ids(self._rng, _QUESTION)] for prefix in prefixes]
        started_s = time.perf_counter()
        _burst(server, prompts)
        return 1e3 * (time.perf_counter() - started_s) / len(prompts)

    def _burst(self, server: Server, prefixes: list[list[int]], found: Bursts) -> None:
        self._speed.unlink(missing_ok=True)
        settle(server)
        flush_device(server)
        self._speed.write_text(f"{found.disk_mb_s:.3f}")
        before = tier_state(server)["host"]
        prompts = [[*prefix, *random_ids(self._rng, _QUESTION)] for prefix in prefixes]
        answers = _burst(server, prompts)
        _note_burst(found, self._side, answers, before, tier_state(server)["host"])


def _burst(server: Server, prompts: Sequence[Sequence[int]]) -> list[Timed]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = []
        for prompt in prompts:
            futures.append(pool.submit(timed, server, prompt))
            time.sleep(_GAP_S)  # so that they enter the queue in this order
        return [future.result() for future in futures]


def _note_burst(
    found: Bursts, side: str, answers: list[Timed], before: dict[str, int], after: dict[str, int]
) -> None:
    def grown(name: str) -> int:
        return after.get(name, 0) - before.get(name, 0)

    ready, late = grown("admitted_ready_requests"), grown("admitted_late_requests")
    if ready + late != len(answers):
        raise CaseFailedError(
            f"look-ahead {side}: {ready + late} of {len(answers)} requests found pages in the tiers"
        )
    elsewhere = sum(a.by_tier.get("host", 0) + a.by_tier.get("device", 0) for a in answers)
    if elsewhere > _MOST_ELSEWHERE * sum(a.cached for a in answers):
        raise CaseFailedError(f"look-ahead {side}: {elsewhere} tokens were not on disk")
    found.elsewhere.append(elsewhere)
    found.ttft_ms.append([answer.ttft_ms for answer in answers])
    found.ready.append(ready)
    found.late.append(late)
    found.reused.append(sum(answer.cached == _PREFIX for answer in answers))


def _server(folder: Path, model: Path, side: str, speed: Path) -> Server:
    host_pages = HOST_PREFIXES * _PREFIX // _PAGE
    args: list[Any] = [
        *dummy_model.ARGS,
        *("--max-total-tokens", 4 * (_PREFIX + 2 * _PAGE), "--mem-fraction-static", 0.5),
        *("--max-prefill-tokens", _PREFIX + _PAGE, "--chunked-prefill-size", -1),
        *("--enable-hier-kv", "--hier-kv-host-size", MODEL.host_gb(host_pages, _PAGE)),
        *("--hier-kv-disk-dir", folder / f"tier-{side}", "--hier-kv-disk-size", 8),
        *("--hier-kv-lookahead", side, "--hier-kv-prefetch-policy", "wait_complete"),
    ]
    env = {ENV_SPEED_FILE: str(speed)}
    return Server(args, model=model, env=env, stop="kill", start_timeout_s=600.0)


def _figures(found: dict[str, Bursts]) -> dict[str, Any]:
    p95 = {side: [percentile(t, 95) for t in found[side].ttft_ms] for side in SIDES}
    p50 = {side: [percentile(t, 50) for t in found[side].ttft_ms] for side in SIDES}
    ratios = [off / on for on, off in zip(p95["on"], p95["off"], strict=True)]
    return {
        "disk_mb_s": found["on"].disk_mb_s,
        **{
            side: {
                "prefill_ms": found[side].prefill_ms,
                "read_share": found[side].read_ms / found[side].prefill_ms,
                "ready_at_admission": sum(found[side].ready) / (len(p95[side]) * NUM_REQUESTS),
                "tokens_not_on_disk": sum(found[side].elsewhere),
                "prefixes_reused": sum(found[side].reused) / (len(p95[side]) * NUM_REQUESTS),
                "ttft_p50_ms": median(p50[side]),
                "ttft_p95_ms": median(p95[side]),
            }
            for side in SIDES
        },
        "ttft_p95_ratio": median(ratios),
        "ttft_p95_ratio_ci95": list(median_interval(ratios)),
        "bursts": len(ratios),
    }


def _samples(found: dict[str, Bursts]) -> dict[str, Any]:
    return {side: {"ttft_ms": found[side].ttft_ms, "ready": found[side].ready} for side in SIDES}


def table(figures: dict[str, Any]) -> Table:
    """What a person reads."""
    rows: list[Sequence[Any]] = [
        [name, *(figures[side][name] for side in SIDES)] for name in figures["on"]
    ]
    title = (
        f"{NUM_REQUESTS} queued requests, all prefixes on disk ({figures['disk_mb_s']:.1f} MB/s), "
        f"DRAM for {HOST_PREFIXES}"
    )
    return Table(title, ["", "look-ahead on", "off"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.lookahead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one burst a server")
    parser.add_argument("--bursts", type=int, default=4, metavar="N", help="bursts a server")
    parser.add_argument(
        "--read-share",
        type=float,
        default=READ_SHARE,
        metavar="X",
        help="time to read a prefix over the time to prefill it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    args = parser.parse_args(argv)

    def make(progress: Progress) -> Report:
        bursts = 1 if args.quick else args.bursts
        with disk_folder("bench-lookahead-") as folder:
            found = measure_lookahead(folder, bursts, progress, args.read_share)
        n = {"bursts": found["bursts"], "requests": found["bursts"] * NUM_REQUESTS}
        return Report(found, found.pop("samples"), n, [table(found)], [_summary(found)])

    return run_alone("serve_lookahead", make, args.json)


def _summary(found: dict[str, Any]) -> str:
    low, high = found["ttft_p95_ratio_ci95"]
    return (
        f"TTFT p95, off / on: {found['ttft_p95_ratio']:.2f} (95 % interval {low:.2f} to "
        f"{high:.2f}, {found['bursts']} bursts a side; target {TTFT_TARGET}); ready at admission "
        f"{found['on']['ready_at_admission']:.1%} (target {READY_TARGET:.0%})"
    )


if __name__ == "__main__":
    sys.exit(main())
