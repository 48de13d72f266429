"""Two servers that take the same requests in turns: what one costs more than the other, in pairs.

The scheduler of the one whose turn it is not is stopped (SIGSTOP), as an idle one spins on a core.
No prompt comes twice, so nothing is reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench.core.case import CaseFailedError
from bench.core.output import Progress
from bench.core.stats import median, median_interval
from bench.serve.overhead import Request, draw_requests, serve_request
from testkit.requests import cpu_seconds
from testkit.server import Server

SIDES = ("off", "on")
_PAIRS_A_START = 3
_WARMUP_REQUESTS = 4


class Block(NamedTuple):
    """What a block of requests cost, in seconds for each token in and out.

    Attributes:
        thread_s: CPU time of the scheduler's own thread.
        process_s: of all threads of its process.
        server_s: of all processes of the server.
        wall_s: from the first request to the last answer.
    """

    thread_s: float
    process_s: float
    server_s: float
    wall_s: float


class Pairs:
    """Pairs of blocks, over several starts of the servers.

    Args:
        wanted: pairs, of all starts together.
        block: requests in a block.
        concurrency: requests at a time.
        seed: of the requests.
        progress: where to say how far it is.
        settle: waits until what a server still does for the requests is done, so that it does not
            weigh on the other one's block.

    Attributes:
        blocks: of each side, one a pair.
        num_tokens: in and out, that each side was given so far, those of warm-ups among them.
    """

    def __init__(
        self,
        wanted: int,
        block: int,
        concurrency: int,
        seed: int,
        progress: Progress,
        settle: Callable[[Server], object],
    ) -> None:
        self.blocks: dict[str, list[Block]] = {side: [] for side in SIDES}
        self.num_tokens = 0
        self._wanted = wanted
        self._block = block
        self._concurrency = concurrency
        self._progress = progress
        self._settle = settle
        self._rng = np.random.default_rng(seed)

    @property
    def num_done(self) -> int:
        """Pairs measured so far."""
        return len(self.blocks["on"])

    def goes_on(self) -> bool:
        """Whether more pairs are to be measured."""
        return self.num_done < self._wanted

    def order(self) -> tuple[str, ...]:
        """The sides in the order of this pair: they take turns at going first."""
        return SIDES[::-1] if self.num_done % 2 else SIDES

    def measure(self, servers: Mapping[str, Server]) -> int:
        """Measures the pairs of one start; returns how many requests each server took."""
        schedulers = {side: psutil.Process(s.scheduler_pid) for side, s in servers.items()}
        for process in schedulers.values():
            process.suspend()
        num = min(_PAIRS_A_START, self._wanted - self.num_done)
        for at in range(num + 1):
            warms_up = at == 0
            requests = draw_requests(self._rng, _WARMUP_REQUESTS if warms_up else self._block)
            self.num_tokens += _num_tokens(requests)
            found: dict[str, Block] = {}
            for side in self.order():
                self._progress.update(f"{side}, {self.num_done} of {self._wanted} pairs done")
                schedulers[side].resume()
                found[side] = self._run_block(servers[side], schedulers[side].pid, requests)
                schedulers[side].suspend()
            if not warms_up:
                for side in SIDES:
                    self.blocks[side].append(found[side])
        for process in schedulers.values():
            process.resume()
        return _WARMUP_REQUESTS + num * self._block

    def _run_block(self, server: Server, scheduler: int, requests: Sequence[Request]) -> Block:
        """Serves the requests, and waits until all that they left to do is done."""
        tokens = _num_tokens(requests)
        process = psutil.Process(scheduler)
        before = _spent(server, process)
        start_s = time.perf_counter()
        with ThreadPoolExecutor(self._concurrency) as pool:
            reused = sum(pool.map(lambda request: serve_request(server, request), requests))
        wall_s = time.perf_counter() - start_s
        spent = [now - was for now, was in zip(_spent(server, process), before, strict=True)]
        if reused:
            raise CaseFailedError(f"{reused} tokens were reused in the run without reuse")
        self._settle(server)
        return Block(*(each / tokens for each in (*spent, wall_s)))


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.ids) + request.num_new for request in requests)


def _spent(server: Server, scheduler: psutil.Process) -> tuple[float, float, float]:
    """CPU seconds so far: of the scheduler's thread, its process, and the whole server."""
    times = scheduler.cpu_times()
    return _thread_cpu_s(scheduler.pid), times.user + times.system, cpu_seconds(server)


def _thread_cpu_s(pid: int) -> float:
    """CPU seconds so far of a process's first thread: the scheduler's event loop."""
    text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
    return 1e-9 * int(text.split()[0])


def figures(blocks: Mapping[str, Sequence[Block]]) -> dict[str, Any]:
    """Medians of the paired ratios with intervals, `samples`, and what the sides cost."""
    pairs = list(zip(blocks["off"], blocks["on"], strict=True))
    samples = {
        "cpu_ratio": [on.thread_s / off.thread_s for off, on in pairs],
        "process_cpu_ratio": [on.process_s / off.process_s for off, on in pairs],
        "server_cpu_ratio": [on.server_s / off.server_s for off, on in pairs],
        "throughput_ratio": [off.wall_s / on.wall_s for off, on in pairs],
    }
    found: dict[str, Any] = {"pairs": len(pairs), "samples": samples}
    for name, values in samples.items():
        found[name] = median(values)
        found[f"{name}_ci95"] = list(median_interval(values))
    for side, of_side in blocks.items():
        found[f"tokens_per_s_{side}"] = median([1 / one.wall_s for one in of_side])
        found[f"thread_us_per_token_{side}"] = median([1e6 * one.thread_s for one in of_side])
    return found
