"""Time to first token by tier, for the `serve` case, on a dummy model with a lot of KV.

A round asks a fresh prefix once (recompute) and a prefix of an earlier round, which the later ones
pushed out of DRAM, four times: from disk, from the device, from DRAM, from the device again. Each
request has a short new question behind the prefix. Every request's tokens must come from the tier
that it is counted for, all of them.

"Visible load" is what a tier adds to the device hit's time, in units of the time that the machine
needs to move the same bytes: memcpy by one core, raw reads in the disk tier's mode.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import dummy_model
from bench.case import CaseFailedError
from bench.dummy_model import DummyModel
from bench.output import Progress
from bench.requests import Timed, expect_tier, flush_device, random_ids, settle, tier_state, timed
from bench.server import Server
from bench.speed import Memcpy, RawFile, drop_page_cache
from bench.stats import median, median_interval, percentile
from sglang_ext.tiers.disk.fileio import aligned_array

# Little but attention, which takes prefix/2 operations per byte of KV whatever the shape. The head
# size follows attention timed alone (bf16, one core): 256 and 512 came cheapest for their KV. No
# other whole model was compared on the server; each report states the factor that it measured.
MODEL = DummyModel("kv-heavy", 8, 128, 2, 2, 256, 128, 16_384)
PREFIXES = (2048, 8192)
INTERCEPT_MS = 5.0
SIDES = ("device", "host", "disk", "recompute")
_PAGE, _QUESTION = 64, 32
_RETURN_AFTER = 2  # rounds until a prefix is asked again
_RAW_BYTES = 128 << 20
_THREADS = 2  # of the disk tier: the caller and one helper


@dataclass
class TtftSamples:
    """Milliseconds of one prefix length, one value a round.

    Attributes:
        times: by side.
        host_extra: host minus the mean of the round's device hits.
        disk_extra: the same for disk.
    """

    times: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    host_extra: list[float] = field(default_factory=list)
    disk_extra: list[float] = field(default_factory=list)


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
    limits = _Limits(folder)
    samples = {tokens: TtftSamples() for tokens in PREFIXES}
    with _server(folder) as server:
        bench = _Rounds(server)
        end_s = time.monotonic() + budget_s
        for at in range(rounds + _RETURN_AFTER + 1):
            counted = at - _RETURN_AFTER - 1  # one full round warms up
            if counted >= 2 and time.monotonic() > end_s:
                break
            for tokens in PREFIXES:
                progress.update(f"prefix of {tokens} tokens, round {counted + 1} of {rounds}")
                bench.run(at, tokens, samples[tokens] if counted >= 0 else None)
            limits.measure()
        state = tier_state(server)
    limits.close()
    memcpy, raw_read = median(limits.memcpy), median(limits.raw_read)
    return {
        "memcpy_gb_s": memcpy,
        "raw_read_gb_s": raw_read,
        "prefixes": {
            str(tokens): _figures(tokens, samples[tokens], memcpy, raw_read) for tokens in PREFIXES
        },
        "samples": {
            "ttft_ms": {str(tokens): samples[tokens].times for tokens in PREFIXES},
            "host_extra_ms": {str(tokens): samples[tokens].host_extra for tokens in PREFIXES},
            "disk_extra_ms": {str(tokens): samples[tokens].disk_extra for tokens in PREFIXES},
            "memcpy_gb_s": limits.memcpy,
            "raw_read_gb_s": limits.raw_read,
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
    return Server(args, model=MODEL.write(folder), stop="kill")


class _Rounds:
    """Prefixes of a server's past rounds, and the requests of a round."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._rng = np.random.default_rng(21)
        self._past: dict[tuple[int, int], list[int]] = {}

    def run(self, at: int, tokens: int, samples: TtftSamples | None) -> None:
        """One round for one prefix length; `samples` is None for a round that does not count."""
        fresh = random_ids(self._rng, tokens)
        self._past[at, tokens] = fresh
        flush_device(self._server)
        recompute = self._ask(fresh, "recompute")
        settle(self._server)
        returning = self._past.pop((at - _RETURN_AFTER, tokens), None)
        if returning is None:
            return
        self._drop_page_cache()
        flush_device(self._server)
        disk = self._ask(returning, "disk")
        before = self._ask(returning, "device")
        flush_device(self._server)
        host = self._ask(returning, "host")
        after = self._ask(returning, "device")
        if samples is None:
            return
        device = (before + after) / 2
        samples.times["recompute"].append(recompute)
        samples.times["disk"].append(disk)
        samples.times["host"].append(host)
        samples.times["device"] += [before, after]
        samples.host_extra.append(host - device)
        samples.disk_extra.append(disk - device)

    def _ask(self, prefix: list[int], tier: str) -> float:
        question = random_ids(self._rng, _QUESTION)
        answer: Timed = timed(self._server, [*prefix, *question])
        what = f"prefix of {len(prefix)} tokens"
        return expect_tier(answer, tier, len(prefix), what).ttft_ms

    def _drop_page_cache(self) -> None:
        if tier_state(self._server)["disk"]["mode"] != "direct":
            drop_page_cache([])


class _Limits:
    """memcpy and raw reads, measured between the rounds."""

    def __init__(self, folder: Path) -> None:
        slot_bytes = MODEL.kv_bytes_per_token * _PAGE
        num = _RAW_BYTES // slot_bytes
        slots = list(aligned_array(num * slot_bytes).reshape(num, slot_bytes))
        for slot in slots:
            slot[:] = 1
        self.memcpy: list[float] = []
        self.raw_read: list[float] = []
        self._memcpy = Memcpy()
        self._raw = _open_raw(folder / "raw", slots)
        self._raw.write()

    def measure(self) -> None:
        """One value of each."""
        self.memcpy.append(self._memcpy.run())
        self.raw_read.append(self._raw.read())

    def close(self) -> None:
        """Removes the file."""
        self._raw.close()


def _open_raw(path: Path, slots: list[Any]) -> RawFile:
    try:
        return RawFile(path, slots, direct=True, num_threads=_THREADS)
    except OSError:  # a file system without O_DIRECT; the tier falls back too
        return RawFile(path, slots, direct=False, num_threads=_THREADS)


def _figures(
    tokens: int, samples: TtftSamples, memcpy_gb_s: float, raw_gb_s: float
) -> dict[str, Any]:
    num_bytes = tokens * MODEL.kv_bytes_per_token
    memcpy_ms = num_bytes / memcpy_gb_s / 1e6
    raw_ms = num_bytes / raw_gb_s / 1e6
    if not samples.host_extra:
        raise CaseFailedError(f"no round of prefix {tokens} counted")
    times = samples.times
    factor = [1 / memcpy_ms * value for value in times["recompute"]]
    return {
        "kv_bytes": num_bytes,
        "memcpy_ms": memcpy_ms,
        "raw_read_ms": raw_ms,
        **{
            side: {
                "ttft_p50_ms": median(times[side]),
                "ttft_p95_ms": percentile(times[side], 95),
                "hit_tokens": 0 if side == "recompute" else tokens,
            }
            for side in SIDES
        },
        "visible_load_host": median(samples.host_extra) / memcpy_ms,
        "visible_load_host_ci95": _scaled(median_interval(samples.host_extra), memcpy_ms),
        "visible_load_disk": median(samples.disk_extra) / raw_ms,
        "visible_load_disk_ci95": _scaled(median_interval(samples.disk_extra), raw_ms),
        "visible_load_disk_less_intercept": (median(samples.disk_extra) - INTERCEPT_MS) / raw_ms,
        "recompute_over_memcpy": median(factor),
        "recompute_over_host": _ratio(times, "host"),
        "recompute_over_disk": _ratio(times, "disk"),
        "rounds": len(samples.host_extra),
    }


def _ratio(times: dict[str, list[float]], side: str) -> float:

    pairs = zip(times["recompute"], times[side], strict=True)
    return median([a / b for a, b in pairs])


def _scaled(interval: tuple[float, float], unit: float) -> list[float]:
    return [interval[0] / unit, interval[1] / unit]
