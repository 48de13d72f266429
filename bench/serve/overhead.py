"""Cost of the plugin where nothing is reused, for the `serve` case.

Two servers are up, plain SGLang and SGLang with the plugin, and take the same requests in turns;
the other one sleeps meanwhile. No prompt comes twice, so the plugin has all of the work (hashing,
saving, writing to disk) and none of the gain. Both are started anew several times: where a server's
memory comes to lie makes it some percent faster or slower for as long as it runs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.output import Progress
from bench.core.stats import median, median_interval
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.requests import cpu_seconds, random_ids, settle, tier_state
from testkit.server import Server

# Llama-3.2-1B with 4 of its 16 layers and a small vocabulary: KV bytes per operation are those of
# the whole model, or a little more, at a quarter of the time.
MODEL = DummyModel("llama-3.2-1b-4-layers", 4, 2048, 32, 8, 64, 8192, 8192)
CPU_TARGET, THROUGHPUT_TARGET = 1.03, 0.97
_CONCURRENCY = 4
_PAIRS_A_START = 3
_WARMUP_REQUESTS = 4
_PAGE = 64
# Lengths of prompts and answers in tokens: log-normal, as those of chat logs, cut at both ends.
_PROMPT_MEDIAN, _PROMPT_RANGE = 600, (128, 2048)
_ANSWER_MEDIAN, _ANSWER_RANGE = 48, (8, 192)


@dataclass
class OverheadSamples:
    """One value a pair of blocks."""

    cpu_ratio: list[float] = field(default_factory=list)
    throughput_ratio: list[float] = field(default_factory=list)
    cpu_ms_per_token: dict[str, list[float]] = field(
        default_factory=lambda: {"with": [], "without": []}
    )
    tokens_per_s: dict[str, list[float]] = field(
        default_factory=lambda: {"with": [], "without": []}
    )


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to answer."""

    ids: list[int]
    num_new: int


def measure_overhead(
    folder: Path, pairs: int, block: int, progress: Progress, budget_s: float = float("inf")
) -> dict[str, Any]:
    """Runs `pairs` pairs of blocks, the sides taking turns at going first.

    Args:
        folder: for the model and the disk tier.
        pairs: pairs that count, of all starts together.
        block: requests in a block.
        progress: where to say how far it is.
        budget_s: no pair begins after this time, but for the first two.

    Returns:
        Medians of the paired ratios with intervals, `samples`, and `counters` of the last start.

    Raises:
        CaseFailedError: something was reused, or the plugin saved nothing.
    """
    model = MODEL.write(folder)
    common: list[Any] = [
        *dummy_model.ARGS,
        *("--page-size", _PAGE, "--max-total-tokens", 24_576, "--mem-fraction-static", 0.5),
        "--sleep-on-idle",
    ]
    tiers: list[Any] = ["--enable-hier-kv", "--hier-kv-host-size", 0.5, "--hier-kv-disk-size", 16]
    tiers += ["--hier-kv-disk-dir", folder / "tier"]
    run = _Run(pairs, block, progress, budget_s)
    while run.goes_on():
        shutil.rmtree(folder / "tier", ignore_errors=True)
        servers = {
            "without": Server(common, model=model, stop="kill"),
            "with": Server([*common, *tiers], model=model, stop="kill"),
        }
        try:
            for side in run.order():
                servers[side].start()
            for server in servers.values():
                server.wait_ready()
            run.measure(servers)
            settle(servers["with"])
            counters = tier_state(servers["with"])["host"]
        finally:
            for server in servers.values():
                server.kill()
        if not counters.get("saved_pages"):
            raise CaseFailedError(f"the plugin saved nothing in the run without reuse: {counters}")
    return {**_figures(run.samples), "counters": counters, "requests_per_block": block}


class _Run:
    """Pairs of blocks, over several starts of the servers."""

    def __init__(self, pairs: int, block: int, progress: Progress, budget_s: float) -> None:
        self.samples = OverheadSamples()
        self._pairs = pairs
        self._block = block
        self._progress = progress
        self._budget_s = budget_s
        self._end_s = float("inf")  # until the first servers are up
        self._rng = np.random.default_rng(33)

    @property
    def _num_done(self) -> int:
        return len(self.samples.cpu_ratio)

    def goes_on(self) -> bool:
        """Whether more pairs are to be measured."""
        late = self._num_done >= 2 and time.monotonic() > self._end_s
        return self._num_done < self._pairs and not late

    def order(self) -> tuple[str, str]:
        """The side that goes first, and the other one: they take turns."""
        return ("with", "without") if self._num_done % 2 else ("without", "with")

    def measure(self, servers: dict[str, Server]) -> None:
        """Measures the pairs of one start."""
        self._progress.update(f"servers started, {self._num_done} of {self._pairs} pairs done")
        if not self._num_done:
            self._end_s = time.monotonic() + self._budget_s
        for server in servers.values():
            _block(server, draw_requests(self._rng, _WARMUP_REQUESTS))
        for _ in range(_PAIRS_A_START):
            if not self.goes_on():
                return
            requests = draw_requests(self._rng, self._block)
            found: dict[str, tuple[float, float]] = {}
            for side in self.order():
                self._progress.update(
                    f"{side} the plugin, pair {self._num_done + 1} of {self._pairs}"
                )
                found[side] = _block(servers[side], requests)
            _note(self.samples, found)


def draw_requests(rng: np.random.Generator, num: int) -> list[Request]:
    """Requests with lengths as in chat logs, and prompts that nobody sent before."""

    def lengths(middle: int, limits: tuple[int, int], spread: float) -> list[int]:
        drawn = middle * np.exp(spread * rng.standard_normal(num))
        clipped: list[int] = np.clip(drawn, *limits).astype(int).tolist()
        return clipped

    prompts = lengths(_PROMPT_MEDIAN, _PROMPT_RANGE, 0.7)
    answers = lengths(_ANSWER_MEDIAN, _ANSWER_RANGE, 0.6)
    return [Request(random_ids(rng, p), a) for p, a in zip(prompts, answers, strict=True)]


def _block(server: Server, requests: Sequence[Request]) -> tuple[float, float]:
    """Serves the requests; returns CPU seconds and wall seconds per token, in and out.

    The plugin's background work of the block is within its CPU seconds, as they are read after it
    has settled; the wall time ends with the last answer.
    """
    tokens = sum(len(request.ids) + request.num_new for request in requests)
    before = cpu_seconds(server)
    start_s = time.perf_counter()
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        reused = sum(pool.map(lambda request: serve_request(server, request), requests))
    wall_s = time.perf_counter() - start_s
    time.sleep(0.3)  # both sides alike: saves and writes of the last requests
    spent_s = cpu_seconds(server) - before
    if reused:
        raise CaseFailedError(f"{reused} tokens were reused in the run without reuse")
    return spent_s / tokens, wall_s / tokens


def serve_request(server: Server, request: Request) -> int:
    """Serves one request; returns how many of its tokens were reused."""
    sampling = {"max_new_tokens": request.num_new, "ignore_eos": True}
    meta = server.generate(input_ids=request.ids, sampling_params=sampling)["meta_info"]
    return int(meta["cached_tokens"])


def _note(samples: OverheadSamples, found: dict[str, tuple[float, float]]) -> None:
    for side, (cpu_s, wall_s) in found.items():
        samples.cpu_ms_per_token[side].append(1e3 * cpu_s)
        samples.tokens_per_s[side].append(1 / wall_s)
    samples.cpu_ratio.append(found["with"][0] / found["without"][0])
    samples.throughput_ratio.append(found["without"][1] / found["with"][1])


def _figures(samples: OverheadSamples) -> dict[str, Any]:
    return {
        "cpu_ratio_no_reuse": median(samples.cpu_ratio),
        "cpu_ratio_no_reuse_ci95": list(median_interval(samples.cpu_ratio)),
        "throughput_ratio_no_reuse": median(samples.throughput_ratio),
        "throughput_ratio_no_reuse_ci95": list(median_interval(samples.throughput_ratio)),
        "cpu_ms_per_token": {s: median(v) for s, v in samples.cpu_ms_per_token.items()},
        "tokens_per_s": {s: median(v) for s, v in samples.tokens_per_s.items()},
        "pairs": len(samples.cpu_ratio),
        "samples": {
            "cpu_ratio_no_reuse": samples.cpu_ratio,
            "throughput_ratio_no_reuse": samples.throughput_ratio,
            "cpu_ms_per_token": samples.cpu_ms_per_token,
            "tokens_per_s": samples.tokens_per_s,
        },
    }
