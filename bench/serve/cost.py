"""Load or recompute on a slow disk, a fast one, and one that changes: `python -m bench.serve.cost`.

Two servers are up, plain SGLang and SGLang with the plugin, whose prefixes are all on disk. They
take the same requests in turns, each while the other one is stopped (SIGSTOP), so that neither
costs the other anything. Plain SGLang always recomputes. On a disk held to 50 MB/s the plugin
should too, and be no slower for having thought about it; on the disk as it is it should load. The
first requests after each change of the disk show how soon it follows.

A CPU computes a prefix so slowly, next to a GPU, that 50 MB/s may well be the quicker way. The
disk is then slowed down further, until reading takes three times as long as recomputing, as
measured before; the report says how far.

No prefix is asked twice, so nothing but the disk holds it. What a request chose is seen from where
its answer says that its tokens came from.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.core.case import OUT_DIR, CaseFailedError, Options, Report, disk_folder
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone
from bench.core.stats import median, median_interval, percentile
from bench.serve.ttft import MODEL
from testkit import dummy_model
from testkit.requests import Timed, flush_device, random_ids, settle, tier_state, timed
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE

SLOW_MB_S, SLOW_FACTOR = 50.0, 3.0
PREFIX, QUESTION = 1024, 32
FOLLOW = 5
_PAGE = 64
_ARGS = ("--attention-backend", "cpu_extend")
_ENVIRONMENT = {
    "CPU_EXTEND_WINDOW": "63:8",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
_MEDIAN_TARGET, _P95_TARGET = 1.05, 1.10
_START_TIMEOUT_S = 400.0  # two at once
_PAUSE_S = 0.15  # a probe ends meanwhile


@dataclass
class Phase:
    """Requests at one speed of the disk.

    Attributes:
        name: what reports call it.
        choices: of the requests in order, `load` or `recompute`; the first `FOLLOW` do not count.
        plugin_ms: times to first token of those that count.
        plain_ms: plain SGLang's for the same requests.
    """

    name: str
    choices: list[str] = field(default_factory=list)
    plugin_ms: list[float] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Plugin over plain, pair by pair."""
        return [a / b for a, b in zip(self.plugin_ms, self.plain_ms, strict=True)]

    def followed_after(self, right: str) -> int:
        """Requests before the choice was right for good."""
        wrong = [at for at, choice in enumerate(self.choices) if choice != right]
        return wrong[-1] + 1 if wrong else 0

    def figures(self, right: str) -> dict[str, Any]:
        """What is reported of it."""
        return {
            "ttft_p50_ms": {"plugin": median(self.plugin_ms), "plain": median(self.plain_ms)},
            "ttft_p95_ms": {
                "plugin": percentile(self.plugin_ms, 95),
                "plain": percentile(self.plain_ms, 95),
            },
            "paired_ratio": median(self.ratios),
            "paired_ratio_ci95": list(median_interval(self.ratios)),
            "p95_ratio": percentile(self.plugin_ms, 95) / percentile(self.plain_ms, 95),
            "followed_after_requests": self.followed_after(right),
            "right_choices": sum(choice == right for choice in self.choices[FOLLOW:]),
            "pairs": len(self.plugin_ms),
        }


def run(options: Options) -> Report:
    """Measures; see the module.

    Raises:
        CaseFailedError: tokens came from elsewhere than from the disk.
    """
    pairs = 10 if options.quick else 60
    with disk_folder("bench-cost-") as folder:
        phases, state = _measure(folder, pairs, options.progress)
    return _report(phases, state)


def _measure(
    folder: Path, pairs: int, progress: Progress
) -> tuple[dict[str, tuple[Phase, str]], dict[str, Any]]:
    speed = folder / "speed"
    plan = [
        ("slow", "recompute", pairs),
        ("fast", "load", max(4, pairs // 3)),
        ("slow again", "recompute", 4),
    ]
    rng = np.random.default_rng(50)
    total = sum(count + FOLLOW for _, _, count in plan)
    prefixes = [random_ids(rng, PREFIX) for _ in range(total)]
    model = MODEL.write(folder)
    servers = {
        "plain": Server(
            [*_common(), "--sleep-on-idle"],
            model=model,
            env=_ENVIRONMENT,
            stop="kill",
            start_timeout_s=_START_TIMEOUT_S,
        ),
        "plugin": Server(
            [*_common(), *_tiers(folder, total)],
            model=model,
            env={**_ENVIRONMENT, ENV_SPEED_FILE: str(speed)},
            stop="kill",
            start_timeout_s=_START_TIMEOUT_S,
        ),
    }
    try:
        progress.stage("load or recompute: starting two servers")
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        trees = {side: server.tree() for side, server in servers.items()}
        bed = _Bed(servers, trees, rng, progress)
        recompute_s = bed.fill(prefixes)
        slow_mb_s = min(
            SLOW_MB_S, PREFIX * MODEL.kv_bytes_per_token / 1e6 / (SLOW_FACTOR * recompute_s)
        )
        phases: dict[str, tuple[Phase, str]] = {}
        for name, right, count in plan:
            if name == "fast":
                speed.unlink()
            else:
                speed.write_text(f"{slow_mb_s:.3f}")
            batch, prefixes = prefixes[: count + FOLLOW], prefixes[count + FOLLOW :]
            phases[name] = bed.phase(name, batch), right
        return phases, {**bed.state(), "slow_mb_s": slow_mb_s}
    finally:
        for server in servers.values():
            with contextlib.suppress(psutil.Error):
                for process in server.tree():
                    process.resume()
            server.kill()


def _common() -> list[Any]:
    tokens = 4 * (PREFIX + QUESTION)
    return [
        *dummy_model.ARGS,
        *("--page-size", _PAGE, "--max-total-tokens", tokens, "--max-prefill-tokens", tokens),
        *("--chunked-prefill-size", -1, "--mem-fraction-static", 0.5),
        *_ARGS,
    ]


def _tiers(folder: Path, num_prefixes: int) -> list[Any]:
    slot_bytes = MODEL.kv_bytes_per_token * _PAGE * 1.02
    # Room for some prefixes only: what is asked has left DRAM long ago.
    host_pages = 4 * PREFIX // _PAGE
    disk_bytes = (num_prefixes + 20) * PREFIX // _PAGE * slot_bytes
    return [
        *("--enable-hier-kv", "--hier-kv-host-size", host_pages * slot_bytes / 2**30),
        *("--hier-kv-disk-dir", folder / "tier", "--hier-kv-disk-size", 1 + disk_bytes / 2**30),
    ]


class _Bed:
    """The two servers, of which one runs at a time."""

    def __init__(
        self,
        servers: dict[str, Server],
        trees: dict[str, list[psutil.Process]],
        rng: np.random.Generator,
        progress: Progress,
    ) -> None:
        self._servers = servers
        self._trees = trees
        self._rng = rng
        self._progress = progress
        self._pairs = 0
        for side in servers:
            self._signal(side, signal.SIGSTOP)

    def fill(self, prefixes: Sequence[list[int]]) -> float:
        """Has the plugin write every prefix to disk; returns seconds that computing one takes."""
        with self._alone("plugin") as server:
            for at, prefix in enumerate(prefixes):
                self._progress.update(f"computing prefix {at + 1} of {len(prefixes)}")
                timed(server, prefix)
                if at % 4 == 3:
                    settle(server)
            settle(server)
            flush_device(server)
        with self._alone("plain") as server:
            timed(server, prefixes[0])
            return median([timed(server, prefix).ttft_ms for prefix in prefixes[1:6]]) / 1e3

    def phase(self, name: str, prefixes: Sequence[list[int]]) -> Phase:
        """Asks a question behind each prefix, on both servers in turns."""
        phase = Phase(name)
        self._progress.stage(f"load or recompute: {name} disk")
        for at, prefix in enumerate(prefixes):
            self._progress.update(f"request {at + 1} of {len(prefixes)}")
            prompt = [*prefix, *random_ids(self._rng, QUESTION)]
            found: dict[str, Timed] = {}
            self._pairs += 1
            for side in ("plain", "plugin")[:: 1 if self._pairs % 2 else -1]:
                with self._alone(side) as server:
                    flush_device(server)
                    found[side] = timed(server, prompt)
            phase.choices.append(_choice(found["plugin"], name, at))
            if at >= FOLLOW:
                phase.plugin_ms.append(found["plugin"].ttft_ms)
                phase.plain_ms.append(found["plain"].ttft_ms)
        return phase

    def state(self) -> dict[str, Any]:
        """The plugin's counters and estimates."""
        with self._alone("plugin") as server:
            return tier_state(server)

    @contextlib.contextmanager
    def _alone(self, side: str) -> Iterator[Server]:
        """Lets one server run; what it began in the background ends before it is stopped."""
        self._signal(side, signal.SIGCONT)
        try:
            yield self._servers[side]
            time.sleep(_PAUSE_S)
        finally:
            self._signal(side, signal.SIGSTOP)

    def _signal(self, side: str, number: signal.Signals) -> None:
        for process in self._trees[side]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _choice(answer: Timed, name: str, at: int) -> str:
    """What a request did: `load`, `recompute`, or `partial`."""
    disk = answer.by_tier.get("disk", 0)
    if disk != answer.cached:
        raise CaseFailedError(f"{name} disk, request {at}: tokens from elsewhere: {answer.by_tier}")
    if disk >= PREFIX:
        return "load"
    # A probe that was quick enough is used: some pages at most.
    return "recompute" if disk <= PREFIX // 4 else "partial"


def _report(phases: dict[str, tuple[Phase, str]], state: dict[str, Any]) -> Report:
    figures = {name: phase.figures(right) for name, (phase, right) in phases.items()}
    slow = figures["slow"]
    counters = {key: n for key, n in state["host"].items() if key.startswith("cost_")}
    results = {
        "slow_mb_s": state["slow_mb_s"],
        "prefix_tokens": PREFIX,
        "kv_bytes": PREFIX * MODEL.kv_bytes_per_token,
        "slow_ttft_ratio": slow["paired_ratio"],
        "slow_ttft_ratio_ci95": slow["paired_ratio_ci95"],
        "slow_p95_ratio": slow["p95_ratio"],
        "fast_ttft_ratio": figures["fast"]["paired_ratio"],
        "followed_after_requests": {n: f["followed_after_requests"] for n, f in figures.items()},
        "phases": figures,
        "estimates": state["cost"],
        "counters": counters,
        "model": MODEL.describe(),
    }
    samples = {
        name: {"plugin_ms": p.plugin_ms, "plain_ms": p.plain_ms, "choices": p.choices}
        for name, (p, _) in phases.items()
    }
    table = Table(
        f"prefix of {PREFIX} tokens on disk, {results['kv_bytes'] / 1e6:.0f} MB of KV",
        ("disk", "plugin p50 ms", "plain p50 ms", "paired ratio", "95 %", "p95 ratio", "right",
         "followed after"),
    )  # fmt: skip
    for name, f in figures.items():
        low, high = f["paired_ratio_ci95"]
        p50 = f["ttft_p50_ms"]
        table.rows.append(
            (name, p50["plugin"], p50["plain"], f["paired_ratio"], f"{low:.3f} to {high:.3f}",
             f["p95_ratio"], f"{f['right_choices']} of {f['pairs']}", f["followed_after_requests"])
        )  # fmt: skip
    notes = [
        (
            f"Slow is {state['slow_mb_s']:.1f} MB/s, by the debug throttle; the aim there is a "
            f"median of at most {_MEDIAN_TARGET} and a p95 of at most {_P95_TARGET} times plain "
            f"SGLang's. The first {FOLLOW} requests at each speed are not among the pairs; "
            "`followed after` counts those of all before the choice was right for good."
        ),
        f"{MODEL.describe()}; one request at a time.",
    ]
    return Report(results, samples, {n: f["pairs"] for n, f in figures.items()}, [table], notes)


def main() -> int:
    """Runs it alone; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.cost", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    parser.add_argument("--json", type=Path, default=OUT_DIR / "serve_cost.json", metavar="FILE")
    args = parser.parse_args()
    return run_alone("serve_cost", lambda progress: run(Options(args.quick, progress)), args.json)


if __name__ == "__main__":
    sys.exit(main())
