"""Servers on the device: the first token behind a prefix, decoding beside loads, and HiCache.

Three servers of one model with random weights, the same in each, one after the other: plain
SGLang, the plugin, and SGLang's own hierarchical cache. Each is given more prefixes than its pool
holds, so that those it asks again have left the device; behind each comes a fresh question. What a
server with a tier answers then has to be what the plain one answers behind a hit on the device: the
same question behind the same prefix, greedy, computed in the same shapes.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.output import Progress, Table
from bench.core.stats import median, percentile
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.requests import flush_device, random_ids
from testkit.server import Server, ServerError

Side = Literal["plain", "hier_kv", "hicache"]
Device = Literal["cpu", "cuda"]
PAGE = 64


@dataclass(frozen=True)
class Traffic:
    """What the servers are asked.

    Attributes:
        model: with random weights.
        prefix: tokens that come again.
        question: fresh tokens behind them.
        answer: tokens of an answer that is compared.
        resident: prefixes for which the pool has room.
        prefixes: how many there are.
        rounds: how often each is asked again, when it has left the device.
        decoders: streams that decode meanwhile.
        stream_tokens: room for each of them.
        beside: requests of each kind that come beside them.
    """

    model: DummyModel
    prefix: int
    question: int
    answer: int
    resident: int
    prefixes: int
    rounds: int
    decoders: int
    stream_tokens: int
    beside: int

    @property
    def pool_tokens(self) -> int:
        """Of the device."""
        streams = self.decoders * self.stream_tokens
        return self.resident * (self.prefix + 2 * self.question) + streams

    @property
    def host_gb(self) -> int:
        """DRAM for all prefixes and questions, twice, in whole GB as HiCache counts."""
        asked = self.prefix + (self.rounds + 3 + self.beside) * (self.question + 2 * PAGE)
        return 1 + int(2 * self.prefixes * asked * self.model.kv_bytes_per_token / 1e9)


LLAMA_8B = Traffic(
    DummyModel("llama-8b", 32, 4096, 32, 8, 128, 14_336, 16_384),
    prefix=8192, question=256, answer=16, resident=3, prefixes=8, rounds=3,
    decoders=8, stream_tokens=2048, beside=6,
)  # fmt: skip
TINY = Traffic(
    DummyModel("tiny", 2, 64, 4, 2, 32, 128, 4096),
    prefix=512, question=64, answer=4, resident=2, prefixes=4, rounds=1,
    decoders=2, stream_tokens=256, beside=2,
)  # fmt: skip
_OF_SIDE: dict[Side, tuple[str, ...]] = {
    "plain": (),
    "hier_kv": ("--enable-hier-kv", "--hier-kv-host-size"),
    "hicache": ("--enable-hierarchical-cache", "--hicache-size"),
}


@dataclass
class Seen:
    """What one server did.

    Attributes:
        startup_s: until it answered.
        ttft_ms: by where the prefix was: "recompute", "device", "host"; beside streams that decode
            "device_beside", "host_beside".
        gaps_ms: between tokens of the streams, while requests of that kind came beside them.
        answers: tokens by prefix and question, of questions that are compared.
        notes: what of its log or state is worth a line.
    """

    startup_s: float = 0.0
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sides(device: Device) -> tuple[Side, ...]:
    """Those that can run there: HiCache needs a CUDA device."""
    return ("plain", "hier_kv", "hicache") if device == "cuda" else ("plain", "hier_kv")


def measure(
    device: Device,
    traffic: Traffic,
    progress: Progress,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    until_s: float = math.inf,
    logs: Path | None = None,
) -> dict[Side, Seen]:
    """Runs the servers. Where HiCache's does not run, or not as it is asked, a note says so.

    Args:
        device: where.
        traffic: what they are asked.
        progress: is told how far it is.
        keep: is given the figures so far behind each server: a machine with a device is had once.
        until_s: by `time.monotonic`; HiCache's server is left out where it would end later.
        logs: folder for the servers' logs, `server-SIDE.log`; None: where tests have theirs.

    Raises:
        CaseFailedError: a prefix of another server came from elsewhere than it is counted for, or
            an answer of the plugin's is not the one behind a hit on the device.
    """
    seen: dict[Side, Seen] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = traffic.model.write(Path(folder))
        took_s = 0.0  # by the one before
        for side in sides(device):
            begin_s = time.monotonic()
            if side == "hicache" and begin_s + took_s > until_s:
                seen["plain"].notes.append(f"{side} has no figures: no time was left for it")
                continue
            progress.stage(f"gpu: a server, {side}")
            try:
                with _server(device, side, model, traffic, progress, logs) as server:
                    asked = _Asker(server, side, traffic, progress).run()
                    asked.startup_s = server.startup_s
            except (CaseFailedError, ServerError, OSError) as error:
                if side != "hicache":  # which the figures of the others do not depend on
                    raise
                seen["plain"].notes.append(f"{side} has no figures: {error}")
                continue
            seen[side] = asked
            took_s = time.monotonic() - begin_s
            keep(figures(seen))
    compare(seen)
    return seen


def _server(
    device: Device,
    side: Side,
    model: Path,
    traffic: Traffic,
    progress: Progress,
    logs: Path | None,
) -> Server:
    args: list[Any] = [
        *dummy_model.ARGS,
        *("--page-size", PAGE, "--max-total-tokens", traffic.pool_tokens),
        *("--chunked-prefill-size", -1, "--max-prefill-tokens", 2 * traffic.prefix),
        *("--max-running-requests", traffic.decoders + 4, "--random-seed", 1),
        *_OF_SIDE[side],
        *(() if side == "plain" else (traffic.host_gb,)),
    ]
    env = {}
    if device == "cuda":
        args += [
            *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--dtype", "bfloat16", "--mem-fraction-static", 0.7),
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-max-bs-decode", 2 * traffic.decoders),
        ]
        env = {
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            # A server that fails would take a minute of the machine's ten for dumps.
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        }
    else:
        args += ["--attention-backend", "cpu_extend"]
    return Server(
        args, model=model, env=env, device=device, stop="kill", start_timeout_s=240.0,
        progress=progress.update, log_path=None if logs is None else logs / f"server-{side}.log",
    )  # fmt: skip


class _Asker:
    """What is asked of one server, in an order that is the same for all."""

    def __init__(self, server: Server, side: Side, traffic: Traffic, progress: Progress) -> None:
        self._server, self._side, self._traffic = server, side, traffic
        self._progress = progress
        rng = np.random.default_rng(5)
        self._prefixes = [random_ids(rng, traffic.prefix) for _ in range(traffic.prefixes)]
        self._rng = rng
        self._seen = Seen()

    def run(self) -> Seen:
        """Asks all of it."""
        self._warm_up()
        for at in range(self._traffic.prefixes):
            self._ask(at, 0, "recompute")
            self._ask(at, 1, "device")
            if self._side == "plain":  # what the others ask when it has left the device
                for again in range(self._traffic.rounds):
                    self._ask(at, 2 + again, "device")
        if self._side != "plain":
            for again in range(self._traffic.rounds):
                for at in range(self._traffic.prefixes):
                    self._ask(at, 2 + again, "host")
        self._decode_beside()
        self._note()
        return self._seen

    def _warm_up(self) -> None:
        """A prompt of full length twice: what is compiled at the first one is not measured."""
        ids = random_ids(np.random.default_rng(6), self._traffic.prefix + self._traffic.question)
        for _ in range(2):
            self._stream(ids, self._traffic.answer)
        flush_device(self._server)

    def _ask(self, at: int, question: int, where: str, answer: int | None = None) -> None:
        """One question behind one prefix, and where its prefix has to come from."""
        self._progress.update(f"prefix {at + 1}, question {question + 1}: {where}")
        fresh = random_ids(np.random.default_rng((at, question)), self._traffic.question)
        num_new = answer or self._traffic.answer
        ttft_ms, meta, tokens = self._stream([*self._prefixes[at], *fresh], num_new)
        found = _by_tier(meta)
        wanted = {"device": 0, "host": 0}
        if where != "recompute":
            wanted[where] = self._traffic.prefix
        if found != wanted:
            raise CaseFailedError(
                f"{self._side}: expected {wanted} tokens of prefix {at}, got {found}: "
                f"{meta.get('cached_tokens_details')} of {meta.get('cached_tokens')}"
            )
        # A server that decodes meanwhile answers later: that is no figure of where a prefix lies.
        kind = where if answer is None else f"{where}_beside"
        self._seen.ttft_ms.setdefault(kind, []).append(ttft_ms)
        if answer is None:
            self._seen.answers[at, question] = tokens

    def _stream(self, ids: Sequence[int], num_new: int) -> tuple[float, dict[str, Any], list[int]]:
        start_s = time.perf_counter()
        first_s, last = 0.0, {}
        sampling = {"max_new_tokens": num_new, "ignore_eos": True}
        for event in self._server.stream(input_ids=ids, sampling_params=sampling):
            first_s = first_s or time.perf_counter()
            last = event
        return 1e3 * (first_s - start_s), last["meta_info"], last["output_ids"]

    def _decode_beside(self) -> None:
        """Streams decode while prefixes come, first from the device, then from where they are."""
        traffic = self._traffic
        away = "recompute" if self._side == "plain" else "host"
        asked = iter(range(100, 100 + 2 * traffic.beside))
        with _Streams(self._server, traffic, self._rng) as streams:
            here = traffic.prefixes - 1  # the last one that was asked
            streams.wait_all_run()
            for where, pick in (
                ("device", lambda turn: here),
                (away, lambda turn: turn % (traffic.prefixes - 1)),
            ):
                begin = time.perf_counter()
                for turn in range(traffic.beside):
                    if where == "recompute":
                        ids = random_ids(self._rng, traffic.prefix + traffic.question)
                        self._stream(ids, 1)
                    else:
                        self._ask(pick(turn), next(asked), where, answer=1)
                self._seen.gaps_ms[where] = streams.gaps_ms(begin, time.perf_counter())

    def _note(self) -> None:
        for line in self._server.log().splitlines():
            if "hier-kv" in line and ("rule" in line or "rotation" in line or "pinned" in line):
                self._seen.notes.append(line.split("] ", 1)[-1])


class _Streams:
    """Requests that decode until they are let go."""

    def __init__(self, server: Server, traffic: Traffic, rng: np.random.Generator) -> None:
        self._server = server
        number = traffic.decoders
        self._num_new = traffic.stream_tokens - 2 * PAGE
        self._prompts = [random_ids(rng, PAGE) for _ in range(number)]
        self._times: list[list[float]] = [[] for _ in range(number)]
        self._end = threading.Event()
        self._pool = ThreadPoolExecutor(number)

    def __enter__(self) -> _Streams:
        self._runs = [self._pool.submit(self._decode, at) for at in range(len(self._prompts))]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._pool.shutdown()
        if exc_info[0] is None:
            for run in self._runs:
                run.result()

    def _decode(self, at: int) -> None:
        while not self._end.is_set():  # again where a stream ends before the requests beside it
            sampling = {"max_new_tokens": self._num_new, "ignore_eos": True}
            for _ in self._server.stream(input_ids=self._prompts[at], sampling_params=sampling):
                self._times[at].append(time.perf_counter())
                if self._end.is_set():
                    return
            self._times[at].append(float("nan"))  # no gap over the end of a stream

    def wait_all_run(self) -> None:
        """Until each has some tokens."""
        self._wait(lambda times: len(times) > 4)

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between tokens of a stream, of which the time between the two is a part."""
        self._wait(lambda times: times[-1] > end)  # a gap that is long because of it ends behind it
        gaps: list[float] = []
        for times in self._times:
            at = np.array(times[:])
            both = (at[1:] >= begin) & (at[:-1] <= end)  # false beside a nan
            gaps += (1e3 * (at[1:] - at[:-1])[both]).tolist()
        return gaps or self.gaps_ms(begin, time.perf_counter())  # where all streams began anew

    def _wait(self, has_come: Callable[[list[float]], bool]) -> None:
        while not all(map(has_come, self._times)):
            for run in self._runs:
                if run.done():
                    run.result()
            time.sleep(0.01)


def _by_tier(meta: dict[str, Any]) -> dict[str, int]:
    """Reused tokens of device and DRAM, from an answer of any of the servers."""
    details = meta.get("cached_tokens_details") or {}
    host = int(details.get("host") or 0)
    return {"device": int(meta["cached_tokens"]) - host, "host": host}


def compare(seen: dict[Side, Seen]) -> None:
    """Notes how many answers are the plain server's.

    Raises:
        CaseFailedError: one of the plugin is another.
    """
    plain = seen["plain"].answers
    for side, each in seen.items():
        other = [key for key, tokens in each.answers.items() if plain[key] != tokens]
        if side == "hier_kv" and other:
            raise CaseFailedError(
                f"{side}: {len(other)} of {len(each.answers)} answers are not those behind a hit "
                f"on the device, the first behind prefix {other[0][0]}, question {other[0][1]}"
            )
        each.notes.append(
            f"{len(each.answers) - len(other)} of {len(each.answers)} answers as the plain server's"
        )


def figures(seen: dict[Side, Seen]) -> dict[str, Any]:
    """By server: medians, the tail of decoding, and the ratios that the limits are about."""
    result: dict[str, Any] = {}
    for side, each in seen.items():
        one: dict[str, Any] = {"startup_s": each.startup_s, "notes": each.notes}
        for where, times in each.ttft_ms.items():
            one[f"ttft_{where}_ms"] = median(times)
        for where, gaps in each.gaps_ms.items():
            one[f"decode_{where}_p50_ms"] = median(gaps)
            one[f"decode_{where}_p99_ms"] = percentile(gaps, 99)
        if "host" in each.ttft_ms:
            one["host_over_device"] = one["ttft_host_ms"] / one["ttft_device_ms"]
            # Its own device hits come while what was computed just before is still being saved.
            plain_ms = median(seen["plain"].ttft_ms["device"])
            one["host_over_plain_device"] = one["ttft_host_ms"] / plain_ms
            one["decode_p99_host_over_device"] = (
                one["decode_host_p99_ms"] / one["decode_device_p99_ms"]
            )
        result[side] = one
    return result


def table(found: dict[str, Any], traffic: Traffic) -> Table:
    """A row a server."""
    columns: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
        ("recompute", lambda one: one["ttft_recompute_ms"]),
        ("device", lambda one: one["ttft_device_ms"]),
        ("DRAM", lambda one: one.get("ttft_host_ms", "")),
        ("DRAM / device", lambda one: one.get("host_over_device", "")),
        ("DRAM / plain's device", lambda one: one.get("host_over_plain_device", "")),
        ("decode p99, device", lambda one: one["decode_device_p99_ms"]),
        ("decode p99, DRAM", lambda one: one.get("decode_host_p99_ms", "")),
    )
    shown = Table(
        f"{traffic.model.describe()}; {traffic.prefix} + {traffic.question} tokens, ms",
        ("server", *(name for name, _ in columns)),
    )
    for side, one in found.items():
        shown.rows.append((side, *(value(one) for _, value in columns)))
    return shown
