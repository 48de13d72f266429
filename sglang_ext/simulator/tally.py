"""The simulator's figures, taken over the measured turns."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sglang_ext.simulator.types import Outcome, Recorded, Request, System


class Tally:
    """Sums over the turns `warmup` to `warmup + measured` in order of admission.

    Attributes:
        gpu_s: time the GPU was busy so far, over the whole run; set by the loop.
    """

    def __init__(self, system: System, warmup: int, measured: int | None, total: int) -> None:
        self._page_tokens = system.page_tokens
        stop = total if measured is None else warmup + measured
        self._measured = range(warmup, min(stop, total))
        if not self._measured:
            raise ValueError(
                f"the workload has {total} turns, none of them after the {warmup} that warm up; "
                "give more turns or a shorter warm-up"
            )
        self.gpu_s = 0.0
        self._sums: Counter[str] = Counter()
        self._times: dict[str, float] = {"prefill": 0.0, "load": 0.0}
        self._turn_hits: list[float] = []
        self._ttft: dict[int, float] = {}
        self._queue: list[int] = []
        self._num_admitted = 0
        self._inside: set[int] = set()
        self._gpu_from_s = 0.0
        self._gpu_to_s = 0.0
        self._from_s = float("inf")
        self._to_s = 0.0

    def reused_tokens_of(self, request: Request, num_pages: int) -> int:
        """Tokens of the prompt that so many pages spare; at least one is computed always."""
        return min(num_pages * self._page_tokens, request.prompt_tokens - 1)

    def admitted(self, request: Request, pages: int, reusable: int, late: int, queue: int) -> None:
        """A request is admitted with `pages` to reuse, of which `late` were not there in time."""
        order = self._num_admitted
        self._num_admitted += 1
        if order not in self._measured:
            return
        if order == self._measured.start:
            self._gpu_from_s = self.gpu_s
        self._inside.add(request.number)
        self._from_s = min(self._from_s, request.arrival_s)
        possible = self.reused_tokens_of(request, max(reusable, pages))
        reused = self.reused_tokens_of(request, pages)
        from_disk = min(late * self._page_tokens, reused)
        self._sums.update(
            reused=reused, reusable=possible, disk=from_disk,
            prompt=request.prompt_tokens, output=request.output_tokens,
            history=request.history_tokens, can_hit=int(possible > 0),
        )  # fmt: skip
        self._turn_hits.append(reused / possible if possible else 0.0)
        self._queue.append(queue)

    def waited_for_load(self, request: Request, seconds: float) -> None:
        """A prefill could not start for so long, because of the disk."""
        self._add(request, "load", seconds)

    def prefilled(self, request: Request, seconds: float) -> None:
        """A prefill takes so long."""
        self._add(request, "prefill", seconds)

    def first_token(self, request: Request, now_s: float) -> None:
        """The prefill ended."""
        if request.number in self._inside:
            self._ttft[request.number] = now_s - request.arrival_s

    def answered(self, request: Request, now_s: float) -> None:
        """The answer ended."""
        if request.number in self._inside:
            self._to_s = max(self._to_s, now_s)
            self._gpu_to_s = self.gpu_s

    def outcome(self, policy: str, recorded: Recorded, counters: dict[str, float]) -> Outcome:
        """The figures."""
        sums, times = self._sums, self._times
        ttft = np.array(list(self._ttft.values()))
        makespan_s = self._to_s - self._from_s
        busy_s = times["prefill"] + times["load"]
        p50, p95, p99 = np.percentile(ttft, [50, 95, 99]).tolist()
        return Outcome(
            policy=policy,
            num_turns=len(ttft),
            hit_rate=sums["reused"] / max(sums["reusable"], 1),
            turn_hit_rate=float(np.mean(self._turn_hits)),
            turn_hit_cap=sums["can_hit"] / len(ttft),
            host_share=1 - sums["disk"] / sums["reused"] if sums["reused"] else 0.0,
            host_tokens=sums["reused"] - sums["disk"],
            disk_tokens=sums["disk"],
            reused_tokens=sums["reused"],
            reusable_tokens=sums["reusable"],
            prompt_tokens=sums["prompt"],
            computed_tokens=sums["prompt"] - sums["reused"],
            output_tokens=sums["output"],
            history_tokens=sums["history"],
            gpu_s=self._gpu_to_s - self._gpu_from_s,
            prefill_gpu_s=times["prefill"],
            wait_load_s=times["load"],
            makespan_s=makespan_s,
            prefill_tokens_per_s=sums["prompt"] / busy_s if busy_s else 0.0,
            ttft_s=ttft,
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=p50,
            ttft_p95_s=p95,
            ttft_p99_s=p99,
            queue_mean=float(np.mean(self._queue)),
            queue_max=max(self._queue),
            load=busy_s / makespan_s if makespan_s else 0.0,
            counters=counters,
            recorded=recorded,
        )

    def _add(self, request: Request, name: str, seconds: float) -> None:
        if request.number in self._inside:
            self._times[name] += seconds
