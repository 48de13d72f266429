"""``python -m bench.demo.sizes``: does `hier-kv size` foretell what the demo's chats reuse?

Serves the demo's chats and documents by the real server with four sizes of DRAM and disk, writes
what was asked as a trace, and has `hier-kv size` say from that trace and the model what each size
brings. Ends with 1 where the two are more than 5 points of the prompt tokens apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.core.output import Progress, Table
from bench.demo.__main__ import BUILD, demo_material, dram_gb, serve
from bench.demo.trace import write_trace
from sglang_ext.cli import main as hier_kv
from testkit.server import TINYLM

_MOST_POINTS = 0.05
_DISK_OF_ALL_GB = 1.0
# Shares of the working set in DRAM, and on disk; None: all of it.
_SIZES: tuple[tuple[float, float | None], ...] = ((0.5, None), (0.5, 0), (0.25, 0.25), (0.25, 0))


def main() -> int:
    """Measures and predicts; returns the exit status."""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    BUILD.mkdir(exist_ok=True)
    table = Table(
        "hit rate: share of the prompt tokens that were not computed",
        ("DRAM GiB", "disk GiB", "measured", "predicted"),
    )
    apart = []
    with Progress() as progress:
        material, tokens = demo_material()
        for host_share, disk_share in _SIZES:
            host = dram_gb(tokens, host_share)
            disk = _DISK_OF_ALL_GB if disk_share is None else dram_gb(tokens, disk_share)
            trace = BUILD / "demo-sizes-trace.jsonl"
            with tempfile.TemporaryDirectory(prefix="demo-disk-", dir=BUILD) as folder:
                name = f"DRAM {host:.3f} disk {disk:.3f}"
                served = serve(name, _tiers(host, disk, folder), material, tokens, progress)
            write_trace(served, trace)
            measured = sum(one.cached for one in served) / sum(one.prompt_tokens for one in served)
            predicted = _predicted(trace, host, disk)
            apart.append(abs(measured - predicted))
            table.rows.append((f"{host:.3f}", f"{disk:.3f}", f"{measured:.1%}", f"{predicted:.1%}"))
    print(table.render())
    return int(max(apart) > _MOST_POINTS)


def _tiers(host: float, disk: float, folder: str) -> list[Any]:
    args: list[Any] = ["--enable-hier-kv", "--hier-kv-host-size", host]
    if disk:
        args += ["--hier-kv-disk-dir", folder, "--hier-kv-disk-size", disk]
    if 0 < disk < _DISK_OF_ALL_GB:
        args += ["--hier-kv-disk-segment-size", 0.005]
    return args


def _predicted(trace: Path, host: float, disk: float) -> float:
    command = ["size", str(TINYLM), "--trace", str(trace), "--block-tokens", "64", "--json"]
    command += ["--host-size", str(host), "--disk-size", str(disk)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if hier_kv(command):
            raise RuntimeError("hier-kv size failed")
    return float(json.loads(out.getvalue())["sizes"][0]["hit_rate"])


if __name__ == "__main__":
    sys.exit(main())
