"""What a remote store costs a server that reuses nothing: `python -m bench.serve.remote`.

Two servers are up, both with the plugin and DRAM only; one of them also has a Redis on loopback. No
prompt comes twice, so that one asks the store for every prompt and uploads every page, and gains
nothing. They take the same requests in turns (`bench.serve.pairs`). Both are started anew several
times: where a server's memory comes to lie makes it some percent faster or slower for as long as it
runs. Reported are the CPU time of the scheduler's own thread and the throughput, as ratios of each
pair of blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.core.case import CaseFailedError, Report, disk_folder
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone
from bench.serve.overhead import MODEL
from bench.serve.pairs import Pairs, figures
from testkit import dummy_model
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.requests import tier_state
from testkit.server import Server

CPU_TARGET, THROUGHPUT_TARGET = 1.03, 0.97
_CONCURRENCY = 6
_SETTLE_TIMEOUT_S = 60.0


def measure_remote(folder: Path, pairs: int, block: int, progress: Progress) -> dict[str, Any]:
    """Runs `pairs` pairs of blocks, the sides taking turns at going first.

    Args:
        folder: for the model and the logs.
        pairs: pairs that count, of all starts together.
        block: requests in a block.
        progress: where to say how far it is.

    Returns:
        Medians of the paired ratios with intervals, `samples`, and `counters` of the last start.

    Raises:
        CaseFailedError: something was reused, or not everything was asked for and uploaded.
    """
    if redis_binary() is None:
        raise CaseFailedError("no redis-server is installed")
    model = MODEL.write(folder)
    args: list[Any] = [
        *dummy_model.ARGS,
        *("--page-size", 64, "--max-total-tokens", 24_576, "--mem-fraction-static", 0.5),
        *("--enable-hier-kv", "--hier-kv-host-size", 0.5),
    ]
    run = Pairs(pairs, block, _CONCURRENCY, 6, progress, _wait_uploaded)
    # What lies there is never read, so it may go.
    with RedisServer(folder / "redis", max_memory="1gb", policy="allkeys-lru") as redis:
        remote = ["--hier-kv-remote-url", f"redis://127.0.0.1:{redis.port}"]
        while run.goes_on():
            with ExitStack() as stack:
                servers = {
                    "off": Server(args, model=model, stop="kill"),
                    "on": Server([*args, *remote], model=model, stop="kill"),
                }
                for side in run.order():
                    stack.callback(servers[side].kill)
                    servers[side].start()
                for server in servers.values():
                    server.wait_ready()
                _wait_usable(servers["on"])
                num_requests = run.measure(servers)
                state = tier_state(servers["on"])
            _check(state, num_requests)
    return {**figures(run.blocks), "counters": {**state["host"], **_named(state["remote"])}}


def _wait_usable(server: Server) -> None:
    _wait(lambda: tier_state(server)["remote"]["breaker_state"] == 0, "the store did not answer")


def _wait_uploaded(server: Server) -> None:
    """Both sides alike: what is left to upload must not weigh on the other's block."""
    if tier_state(server)["remote"] is None:
        return
    seen = -1

    def is_quiet() -> bool:
        nonlocal seen
        state = tier_state(server)
        before, seen = seen, state["host"].get("remote_written_pages", 0)
        return seen == before and not state["remote"]["upload_queue"]

    _wait(is_quiet, "the uploads did not end")


def _wait(is_so: Any, complaint: str) -> None:
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise CaseFailedError(complaint)
        time.sleep(0.2)


def _check(state: dict[str, Any], num_requests: int) -> None:
    host = state["host"]
    if host.get("remote_lookups", 0) < num_requests:
        raise CaseFailedError(f"the store was not asked for every prompt: {host}")
    if not host.get("remote_written_pages") or host.get("remote_upload_dropped_pages"):
        raise CaseFailedError(f"not every page was uploaded: {host}")


def _named(remote: dict[str, int]) -> dict[str, int]:
    return {f"remote_{name}": value for name, value in remote.items()}


def table(found: dict[str, Any]) -> Table:
    """What a person reads."""
    targets = {"cpu_ratio": f"<= {CPU_TARGET}", "throughput_ratio": f">= {THROUGHPUT_TARGET}"}
    rows: list[Sequence[Any]] = []
    for name in ("cpu_ratio", "process_cpu_ratio", "throughput_ratio"):
        low, high = found[f"{name}_ci95"]
        rows.append([name, f"{found[name]:.3f}", f"{low:.3f} to {high:.3f}", targets.get(name)])
    title = f"remote store on / off, nothing reused, {found['pairs']} pairs of blocks"
    return Table(title, ["", "median", "95 % interval", "target"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.remote", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, metavar="N", help="pairs of blocks")
    parser.add_argument("--block", type=int, default=12, metavar="N", help="requests in a block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    args = parser.parse_args(argv)

    def make(progress: Progress) -> Report:
        with disk_folder("bench-remote-") as folder:
            found = measure_remote(folder, args.pairs, args.block, progress)
        n = {"pairs": found["pairs"], "requests_per_block": args.block}
        return Report(found, found.pop("samples"), n, [table(found)])

    return run_alone("serve_remote", make, args.json)


if __name__ == "__main__":
    sys.exit(main())
