"""Time to first token by tier, for the `serve` case, on a dummy model with a lot of KV.

A round asks a fresh prefix once (recompute) and a prefix of an earlier round, which the later ones
pushed out of DRAM, several times: from disk, from the device, then from DRAM and from the device in
turns. Each request has a short new question behind the prefix. Every request's tokens must come
from the tier that it is counted for, all of them. Prefixes that come back are what the server
learns to expect: in the end it keeps some in DRAM, and such a round does not count.

"Visible load" is what a tier adds to the device hit's time, in units of the time that the machine
needs to move the same bytes: memcpy by one core, raw reads in the disk tier's mode. Both are
measured within the round. The raw file is written with the prefix's pages and read when they are,
once, as a disk (or a host below it) is faster with bytes that it has just seen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.output import Progress
from bench.core.speed import Memcpy, RawFile, drop_page_cache, pages_like_the_arenas
from bench.core.stats import median, median_interval, percentile
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.requests import Timed, expect_tier, flush_device, random_ids, settle, tier_state, timed
from testkit.server import Server

# A recompute of 10 to 30 times the memcpy of its KV, which is what a GPU needs for a model of some
# billion parameters, takes little work a byte of KV. Full attention alone is 60 times memcpy at 8K
# on one core, and a window of 63 tokens a half of the recompute, so every layer
# sees a short window only; K and V are kept, saved and loaded whole all the same.
# A token has 64 KiB of KV, half of what Llama 3.1 8B has: with less, what this engine does in
# Python for a request, whatever its length, would count as much as the copy.
MODEL = DummyModel("kv-heavy", 8, 64, 8, 8, 256, 64, 16_384)
WINDOW, FULL_EVERY = 15, 16  # more than there are layers: none sees everything
PREFIXES = (2048, 8192)
INTERCEPT_MS = 5.0
SIDES = ("device", "host", "disk", "recompute")
# SGLang's torch_native repeats the prefix's attention behind a cached prefix (runtime_cpu/plugins).
_ARGS = ("--attention-backend", "cpu_extend")
# The C library's largest allocations come from the system one by one and are zeroed each time,
# which would be a good part of a recompute. The engine's device is two cores, as few as a machine
# has that also runs the rest of a server; with threads that spin between two operations there would
# be none left for a load.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "CPU_EXTEND_WINDOW": f"{WINDOW}:{FULL_EVERY}",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
_PAGE, _QUESTION = 64, 32
_RETURN_AFTER = 2  # rounds until a prefix is asked again
_HOST_REPEATS = 3
_THREADS = 3  # of the disk tier: the caller and two helpers


@dataclass
class TtftSamples:
    """Milliseconds of one prefix length.

    Attributes:
        times: by side; several values a round for `device` and `host`.
        host_extra: one value a round: median of host minus the mean of the device hits around it.
        disk_extra: the same for disk.
        memcpy: one core's for the KV of the prefix, in the same round.
        raw_read: raw reads of as many bytes, in the same round.
        num_skipped: rounds that do not count, because the prefix was not on disk only.
    """

    times: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    host_extra: list[float] = field(default_factory=list)
    disk_extra: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    raw_read: list[float] = field(default_factory=list)
    num_skipped: int = 0


def measure_ttft(
    folder: Path, rounds: int, progress: Progress, budget_s: float = float("inf")
) -> dict[str, Any]:
    """Runs the rounds.

    Args:
        folder: for the model and the disk tier; on a disk.
        rounds: rounds that count; some more come before them.
        progress: where to say how far it is.
        budget_s: no round begins after this time, but for the first two that count.

    Returns:
        `prefixes` (figures by prefix length), `samples`, `memcpy_gb_s`, `raw_read_gb_s`.

    Raises:
        CaseFailedError: a request's tokens came from another tier than the one measured.
    """
    samples = {tokens: TtftSamples() for tokens in PREFIXES}
    memcpy = Memcpy()
    with _server(folder) as server:
        rounds_of = {tokens: _Rounds(server, folder, tokens, memcpy) for tokens in PREFIXES}
        end_s = time.monotonic() + budget_s
        for at in range(rounds + _RETURN_AFTER + 1):
            counted = at - _RETURN_AFTER - 1  # one full round warms up
            if counted >= 2 and time.monotonic() > end_s:
                break
            for tokens in PREFIXES:
                progress.update(f"prefix of {tokens} tokens, round {counted + 1} of {rounds}")
                rounds_of[tokens].run(at, samples[tokens] if counted >= 0 else None)
        state = tier_state(server)
    num_bytes = {tokens: tokens * MODEL.kv_bytes_per_token for tokens in PREFIXES}
    return {
        "memcpy_gb_s": median(
            [num_bytes[t] / 1e6 / ms for t in PREFIXES for ms in samples[t].memcpy]
        ),
        "raw_read_gb_s": median(
            [num_bytes[t] / 1e6 / ms for t in PREFIXES for ms in samples[t].raw_read]
        ),
        "prefixes": {str(tokens): _figures(tokens, samples[tokens]) for tokens in PREFIXES},
        "samples": {
            "ttft_ms": {str(tokens): samples[tokens].times for tokens in PREFIXES},
            "host_extra_ms": {str(tokens): samples[tokens].host_extra for tokens in PREFIXES},
            "disk_extra_ms": {str(tokens): samples[tokens].disk_extra for tokens in PREFIXES},
            "memcpy_ms": {str(tokens): samples[tokens].memcpy for tokens in PREFIXES},
            "raw_read_ms": {str(tokens): samples[tokens].raw_read for tokens in PREFIXES},
        },
        "disk_mode": state["disk"]["mode"],
        "counters": state["host"],
    }


def _server(folder: Path) -> Server:
    # Twice the longest prefix, as one request may pin half of DRAM; less than what comes between a
    # prefix and its return, so that it has left DRAM by then.
    host_pages = 2 * max(PREFIXES) // _PAGE + 16
    slot_bytes = MODEL.kv_bytes_per_token * _PAGE * 1.02
    longest = 2 * max(PREFIXES)
    args: list[Any] = [
        *dummy_model.ARGS,
        *("--max-total-tokens", longest, "--max-prefill-tokens", longest),
        *("--chunked-prefill-size", -1, "--mem-fraction-static", 0.5),
        *("--enable-hier-kv", "--hier-kv-host-size", host_pages * slot_bytes / 2**30),
        *("--hier-kv-disk-dir", folder / "tier", "--hier-kv-disk-size", 16),
        *("--hier-kv-prefetch-policy", "wait_complete"),
    ]
    return Server([*args, *_ARGS], model=MODEL.write(folder), env=_ENVIRONMENT, stop="kill")


class _Rounds:
    """The rounds of one prefix length on a server."""

    def __init__(self, server: Server, folder: Path, tokens: int, memcpy: Memcpy) -> None:
        self._server = server
        self._folder = folder
        self._tokens = tokens
        self._memcpy = memcpy
        self._rng = np.random.default_rng(21 + tokens)
        self._past: dict[int, tuple[list[int], RawFile]] = {}
        slot_bytes = MODEL.kv_bytes_per_token * _PAGE
        self._slots = pages_like_the_arenas(tokens // _PAGE, slot_bytes)
        for slot in self._slots:
            slot[:] = 1

    def run(self, at: int, samples: TtftSamples | None) -> None:
        """Round number `at`; `samples` is None for one that does not count."""
        recompute = self._add_prefix(at)
        if at < _RETURN_AFTER:
            return
        prefix, raw = self._past.pop(at - _RETURN_AFTER)
        if at % 2:  # the two take turns at going first
            raw_gb_s = raw.read()
            disk = self._ask_disk(prefix)
        else:
            disk = self._ask_disk(prefix)
            raw_gb_s = raw.read()
        raw.close()
        if disk is None:
            if samples is not None:
                samples.num_skipped += 1
            return
        device, host = [self._ask(prefix, "device")], []
        memcpy_gb_s = [self._memcpy.run()]
        for _ in range(_HOST_REPEATS):
            flush_device(self._server)
            host.append(self._ask(prefix, "host"))
            device.append(self._ask(prefix, "device"))
        memcpy_gb_s.append(self._memcpy.run())
        if samples is None:
            return
        around = [(before + after) / 2 for before, after in pairwise(device)]
        num_bytes = self._tokens * MODEL.kv_bytes_per_token
        samples.times["recompute"].append(recompute)
        samples.times["disk"].append(disk)
        samples.times["host"] += host
        samples.times["device"] += device
        samples.host_extra.append(median([h - d for h, d in zip(host, around, strict=True)]))
        samples.disk_extra.append(disk - median(device))
        samples.memcpy.append(num_bytes / 1e6 / median(memcpy_gb_s))
        samples.raw_read.append(num_bytes / 1e6 / raw_gb_s)

    def _add_prefix(self, at: int) -> float:
        """Computes a fresh prefix, and writes a raw file of its size when its pages are written."""
        fresh = random_ids(self._rng, self._tokens)
        flush_device(self._server)
        recompute = self._ask(fresh, "recompute")
        settle(self._server)
        raw = _open_raw(self._folder / f"raw-{self._tokens}-{at}", self._slots)
        raw.write()
        self._past[at] = (fresh, raw)
        return recompute

    def _ask_disk(self, prefix: list[int]) -> float | None:
        """The time from disk; None when some of the prefix was still in DRAM."""
        if tier_state(self._server)["disk"]["mode"] != "direct":
            drop_page_cache([])
        flush_device(self._server)
        answer = self._send(prefix)
        if answer.by_tier.get("host"):
            return None
        return self._from("disk", prefix, answer)

    def _ask(self, prefix: list[int], tier: str) -> float:
        return self._from(tier, prefix, self._send(prefix))

    def _send(self, prefix: list[int]) -> Timed:
        return timed(self._server, [*prefix, *random_ids(self._rng, _QUESTION)])

    def _from(self, tier: str, prefix: list[int], answer: Timed) -> float:
        return expect_tier(answer, tier, len(prefix), f"prefix of {len(prefix)} tokens").ttft_ms


def _open_raw(path: Path, slots: list[Any]) -> RawFile:
    try:
        return RawFile(path, slots, direct=True, num_threads=_THREADS)
    except OSError:  # a file system without O_DIRECT; the tier falls back too
        return RawFile(path, slots, direct=False, num_threads=_THREADS)


def _figures(tokens: int, samples: TtftSamples) -> dict[str, Any]:
    if len(samples.host_extra) <= samples.num_skipped:
        raise CaseFailedError(
            f"only {len(samples.host_extra)} rounds of prefix {tokens} counted, in "
            f"{samples.num_skipped} it was not on disk only"
        )
    times = samples.times
    memcpy, raw = samples.memcpy, samples.raw_read
    host = _ratios(samples.host_extra, memcpy)
    disk = _ratios(samples.disk_extra, raw)
    less = _ratios([extra - INTERCEPT_MS for extra in samples.disk_extra], raw)
    factor = _ratios(times["recompute"], memcpy)
    return {
        "kv_bytes": tokens * MODEL.kv_bytes_per_token,
        "memcpy_ms": median(memcpy),
        "raw_read_ms": median(raw),
        **{
            side: {
                "ttft_p50_ms": median(times[side]),
                "ttft_p95_ms": percentile(times[side], 95),
                "hit_tokens": 0 if side == "recompute" else tokens,
            }
            for side in SIDES
        },
        "visible_load_host": median(host),
        "visible_load_host_ci95": list(median_interval(host)),
        "visible_load_disk": median(disk),
        "visible_load_disk_ci95": list(median_interval(disk)),
        "visible_load_disk_less_intercept": median(less),
        "visible_load_disk_less_intercept_ci95": list(median_interval(less)),
        "recompute_over_memcpy": median(factor),
        "recompute_over_memcpy_ci95": list(median_interval(factor)),
        "recompute_over_host": median(times["recompute"]) / median(times["host"]),
        "recompute_over_disk": median(_ratios(times["recompute"], times["disk"])),
        "rounds": len(host),
        "skipped_rounds": samples.num_skipped,
    }


def _ratios(values: list[float], units: list[float]) -> list[float]:
    return [value / unit for value, unit in zip(values, units, strict=True)]
