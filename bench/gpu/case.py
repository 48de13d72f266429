"""The case `gpu`: loads and saves of a long prompt of an 8B model, and servers with such a model.

`HIER_KV_GPU_SELFTEST=1` runs it where there is no CUDA device, on tiny shapes on the CPU: that
tries the bench, its figures mean nothing.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.core.case import CaseFailedError, Options, Report
from bench.core.output import Table
from bench.gpu import servers
from bench.gpu.engine import BARE, LLAMA_8B, TINY, Engine, median_s
from bench.gpu.kernels import check_kernels

SELFTEST = "HIER_KV_GPU_SELFTEST"
_LINK_TARGET, _HIT_TARGET = 0.9, 1.1


def run(options: Options) -> Report:
    """Measures copies and, where SGLang is installed, servers.

    Raises:
        CaseFailedError: there is no CUDA device, or other bits or answers came back.
    """
    device = device_or_none()
    if device is None:
        raise CaseFailedError(
            "bench gpu needs a CUDA device, and torch sees none: run it on a machine with one "
            f"(make gpu-kit packs what it needs), or try the bench itself with {SELFTEST}=1"
        )
    number = check_kernels(device)
    report = measure_copies(options, device)
    report.notes.append(f"kernels: {number} cases at odd shapes, all bits came back")
    if importlib.util.find_spec("sglang") is None:
        report.notes.append("no server was started: SGLang is not installed")
        return report
    served = measure_servers(options, device)
    report.results["servers"] = served.results
    report.samples |= served.samples
    report.tables += served.tables
    report.notes += served.notes
    return report


def device_or_none() -> torch.device | None:
    """The first CUDA device; the CPU for a test of the bench; None."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if os.environ.get(SELFTEST) == "1" else None


def measure_copies(options: Options, device: torch.device) -> Report:
    """Loads and saves against bare page-locked copies.

    Raises:
        CaseFailedError: other bits came back.
    """
    shape = LLAMA_8B if device.type == "cuda" else TINY
    options.progress.stage(f"gpu: {shape.tokens} tokens of {shape.layers} layers on {device}")
    engine = Engine(device, shape)
    try:
        engine.check()
        repeats = 5 if options.quick else 15
        seconds = _measure(engine, repeats)
        in_place, notes = _measure_in_place(engine, repeats)
        report = _of_copies({**seconds, **in_place}, engine, device)
        report.notes += notes
        return report
    finally:
        engine.close()


def measure_servers(
    options: Options,
    device: torch.device,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    until_s: float = math.inf,
    logs: Path | None = None,
) -> Report:
    """First tokens by tier, and decoding beside loads, with HiCache where it can run.

    Args:
        options: the case's.
        device: where.
        keep: is given the figures so far behind each server.
        until_s: by `time.monotonic`; HiCache's server is left out where it would end later.
        logs: folder for the servers' logs; None: where tests have theirs.

    Raises:
        CaseFailedError: a prefix came from elsewhere, or an answer is another one.
    """
    traffic = servers.LLAMA_8B if device.type == "cuda" else servers.TINY
    kind: servers.Device = "cuda" if device.type == "cuda" else "cpu"
    seen = servers.measure(kind, traffic, options.progress, keep, until_s, logs)
    found = servers.figures(seen)
    ours = found["hier_kv"]
    note = (
        f"a hit in DRAM takes {ours['host_over_device']:.2f} of one on the device, "
        f"{ours['host_over_plain_device']:.2f} of one of plain SGLang's, decoding beside "
        f"it {ours['decode_p99_host_over_device']:.2f} (p99); at most {_HIT_TARGET} is asked for"
    )
    notes = [note, *(f"{side}: {line}" for side, one in found.items() for line in one["notes"])]
    samples = {
        f"{side}_{name}": values
        for side, each in seen.items()
        for name, values in (("ttft_ms", each.ttft_ms), ("gaps_ms", each.gaps_ms))
    }
    return Report(
        results=found, samples=samples, tables=[servers.table(found, traffic)], notes=notes
    )


def _measure(engine: Engine, repeats: int) -> dict[str, float]:
    """Seconds of each, medians."""
    seconds: dict[str, float] = {}
    for back, name in ((False, "in"), (True, "out")):
        for how in BARE:
            seconds[f"{how}_{name}"] = median_s(
                lambda back=back, how=how: engine.bare_copies(back=back, how=how),  # type: ignore[misc]
                repeats,
            )
    seconds["load"] = median_s(lambda: engine.load(engine.pages)[1], repeats)
    seconds["queue"] = median_s(lambda: engine.load(engine.pages)[0], repeats)
    seconds["save"] = median_s(engine.save, repeats)
    return seconds


def _measure_in_place(engine: Engine, repeats: int) -> tuple[dict[str, float], list[str]]:
    """Seconds of loads whose kernels read the slots themselves; a note where they cannot."""
    if engine.port.copies_wait:
        return {}, ["DRAM could not be page-locked, so kernels cannot read it themselves"]
    try:
        engine.check_in_place()
        return {"in_place": median_s(lambda: engine.read_in_place(engine.pages), repeats)}, []
    except CaseFailedError:
        raise
    except Exception as error:  # no server does it: what does is measured all the same
        return {}, [f"kernels that read page-locked memory themselves were not measured: {error}"]


def _of_copies(seconds: dict[str, float], engine: Engine, device: torch.device) -> Report:
    copied = {"whole_in", "pages_in", "whole_out", "pages_out"}  # with headers and tails
    slots = engine.num_pages * engine.layout.slot_bytes
    speeds = {
        f"{name}_gb_s": (slots if name in copied else engine.kv_bytes) / 1e9 / value
        for name, value in seconds.items()
        if name != "queue"
    }
    results: dict[str, Any] = {
        **speeds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, self-test",
        "tokens": engine.shape.tokens,
        "kv_bytes": engine.kv_bytes,
        "load_ms": 1e3 * seconds["load"],
        "load_queue_ms": 1e3 * seconds["queue"],
        "save_ms": 1e3 * seconds["save"],
        "load_of_link": speeds["load_gb_s"] / speeds["whole_in_gb_s"],
        "save_of_link": speeds["save_gb_s"] / speeds["whole_out_gb_s"],
        **(
            {"in_place_of_load": speeds["in_place_gb_s"] / speeds["load_gb_s"]}
            if "in_place" in seconds
            else {}
        ),
        # What is lost to the number of copies alone.
        "layers_of_link": speeds["layers_in_gb_s"] / speeds["whole_in_gb_s"],
        "latents_of_link": speeds["latents_in_gb_s"] / speeds["whole_in_gb_s"],
        "device_bytes": engine.loads.ring_bytes + engine.saves.ring_bytes,
    }
    table = Table(f"{results['device']}: {engine.shape.tokens} tokens", ("what", "GB/s", "ms"))
    for name, value in seconds.items():
        table.rows.append((name, speeds.get(f"{name}_gb_s", ""), 1e3 * value))
    note = (
        f"load {results['load_of_link']:.2f} and save {results['save_of_link']:.2f} of one large "
        f"page-locked copy; at least {_LINK_TARGET} is asked for. Bits are those that were saved."
    )
    return Report(results=results, samples={"seconds": seconds}, tables=[table], notes=[note])
