"""What it costs to tell of the tiers: `python -m bench.serve.telling`.

Two servers are up, both with the plugin, DRAM and disk, both with `--enable-metrics`, read every
few seconds as Prometheus would, and with KV events and a subscriber in a process of its own, which
keeps where each page lies, as a router does. In one of them the plugin tells nothing: what is
measured is what it adds to SGLang's own metrics and events. With `--against neither` that one has
no metrics and no events at all, SGLang's among them. They take the same requests in turns
(`bench.serve.pairs`), no prompt comes twice, and the device holds a few of them: each page is told
of three times as stored, and as removed from the device. Both are started anew several times.
Reported are ratios of each pair of blocks: the CPU time of the scheduler's own thread, of its
process, of the whole server, and the throughput. Ratios of two noisy servers do not resolve a
percent on a shared machine, so what the scheduler's thread spends on telling is counted in it, too
(`bench.serve.telling_probe`). Ends with 1 where that is more than 1 % of what the thread computes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.core.case import CaseFailedError, Report, disk_folder
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone
from bench.core.stats import verdict
from bench.serve.pairs import SIDES, Pairs, figures
from bench.serve.telling_probe import environment, told_s
from runtime_cpu import inprocess
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.ports import free_port
from testkit.requests import settle, tier_state
from testkit.server import Server

inprocess.prepare()

from testkit.kv_reader import KvReader, publishing  # noqa: E402

MODEL = DummyModel("telling", 4, 256, 4, 2, 64, 512, 4096)
CPU_TARGET, THROUGHPUT_TARGET = 1.01, 0.99
MOST_OF_THREAD = 0.01  # of the scheduler's thread, as counted in it
MEDIA = ("GPU", "CPU_PINNED", "DISK")
# What the other server tells: what SGLang does without the plugin, or nothing.
AGAINST = ("sglang", "neither")
_PAGE = 64
_CONCURRENCY = 6
_SCRAPE_EVERY_S = 5.0
_JOIN_S = 120.0


def measure_telling(
    folder: Path, pairs: int, block: int, against: str, progress: Progress
) -> dict[str, Any]:
    """Runs `pairs` pairs of blocks, the sides taking turns at going first.

    Args:
        folder: for the model and the disk tiers.
        pairs: pairs that count, of all starts together.
        block: requests in a block.
        against: one of `AGAINST`.
        progress: where to say how far it is.

    Returns:
        Medians of the paired ratios with intervals, `samples`; `told`, blocks that the last
        subscriber knew in the end, by medium; and what was counted: `telling_us_per_token` of the
        scheduler's thread, `sending_us_per_token` of the thread that sends, `share_of_thread`, and
        `sglangs_us_per_token` of the scheduler's thread, in reports of SGLang's own metrics.

    Raises:
        CaseFailedError: something was reused, or what was saved was not told.
    """
    model = MODEL.write(folder)
    run = Pairs(pairs, block, _CONCURRENCY, 7, progress, settle)
    told: Counter[str] = Counter()
    spent_s = [0.0, 0.0, 0.0]
    while run.goes_on():
        told, more_s = _measure_start(folder / str(run.num_done), model, run, against)
        spent_s = [s + more for s, more in zip(spent_s, more_s, strict=True)]
    found = figures(run.blocks)
    telling_us, sending_us, sglangs_us = (1e6 * seconds / run.num_tokens for seconds in spent_s)
    return {
        **found,
        "telling_us_per_token": telling_us,
        "sending_us_per_token": sending_us,
        "sglangs_us_per_token": sglangs_us,
        "share_of_thread": telling_us / found["thread_us_per_token_on"],
        "told": dict(told),
    }


def _measure_start(
    folder: Path, model: Path, run: Pairs, against: str
) -> tuple[Counter[str], list[float]]:
    """Measures what goes into one start of both servers.

    Returns:
        Blocks that the subscriber knew in the end, by medium; and what telling took, as `told_s`.
    """
    endpoints = {side: f"tcp://127.0.0.1:{free_port()}" for side in SIDES}
    tells = SIDES if against == "sglang" else ("on",)
    telling = {side: ["--enable-metrics", *publishing(endpoints[side])] for side in tells}
    with ExitStack() as stack:
        servers = {
            side: Server(
                [*_arguments(folder / side / "kv"), *telling.get(side, [])],
                model=model,
                env=environment(folder / side, folder / side / "told", is_mute=side == "off"),
                stop="kill",
                start_timeout_s=600.0,
            )
            for side in SIDES
        }
        for side in run.order():
            stack.callback(servers[side].kill)
            servers[side].start()
        for server in servers.values():
            server.wait_ready()
        heard = {side: stack.enter_context(_subscriber(endpoints[side])) for side in tells}
        before_s = told_s(folder / "on" / "told")
        with ExitStack() as scrapes:
            for side in tells:
                scrapes.enter_context(_scraped(servers[side]))
            run.measure(servers)
        told = _check(servers, heard)
        after_s = told_s(folder / "on" / "told")
        return told, [now - was for now, was in zip(after_s, before_s, strict=True)]


def _arguments(folder: Path) -> list[Any]:
    """DRAM and disk have room for all that is said."""
    args: list[Any] = [*dummy_model.ARGS, "--page-size", _PAGE, "--max-total-tokens", 12_288]
    args += ["--mem-fraction-static", 0.3, "--enable-hier-kv"]
    args += ["--hier-kv-host-size", MODEL.host_gb(4096, _PAGE)]
    return [*args, "--hier-kv-disk-dir", folder, "--hier-kv-disk-size", 2]


def _follow(endpoint: str, pipe: Connection) -> None:
    """A subscriber, in a process of its own: answers with what it knows, until the pipe ends."""
    with KvReader(endpoint) as reader:
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            with reader.lock:
                media = list(reader.index.media.values())
            pipe.send(Counter(medium for where in media for medium in where))


@contextmanager
def _subscriber(endpoint: str) -> Iterator[Connection]:
    mine, its = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_follow, args=(endpoint, its))
    process.start()
    its.close()
    try:
        mine.send(None)
        if not mine.poll(_JOIN_S):
            raise CaseFailedError("the subscriber did not start")
        mine.recv()
        yield mine
    finally:
        mine.close()
        process.join(_JOIN_S)
        process.kill()


@contextmanager
def _scraped(server: Server) -> Iterator[None]:
    """Somebody asks for the metrics meanwhile."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_SCRAPE_EVERY_S):
            server.get("/metrics")

    thread = threading.Thread(target=scrape, name="bench-scrape", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _check(servers: dict[str, Server], heard: dict[str, Connection]) -> Counter[str]:
    """What the subscriber knows; raises where that is not all that there is, or the mute tells."""
    host = settle(servers["on"])["host"]
    if "sglang:hier_kv_pages_total" not in servers["on"].get("/metrics"):
        raise CaseFailedError("the plugin's metrics are not published")
    if not tier_state(servers["off"])["host"].get("saved_pages"):
        raise CaseFailedError("the server that tells nothing saved nothing either")
    told, mute = (_known(heard[side]) if side in heard else Counter() for side in ("on", "off"))
    # The first few pages may have been told before the subscriber had joined.
    missing = {medium for medium in MEDIA[1:] if told[medium] < 0.9 * host["saved_pages"]}
    if missing:
        raise CaseFailedError(f"{host['saved_pages']} pages were saved, and told of were {told}")
    if set(mute) - {"GPU"} or ("off" in heard) != bool(mute):
        raise CaseFailedError(f"the server that tells what SGLang does told of {mute}")
    return told


def _known(heard: Connection) -> Counter[str]:
    heard.send(None)
    told: Counter[str] = heard.recv()
    return told


def table(found: dict[str, Any], against: str) -> Table:
    """What a person reads."""
    names = {
        "cpu_ratio": "CPU of the scheduler's thread",
        "process_cpu_ratio": "CPU of the scheduler's process",
        "server_cpu_ratio": "CPU of the whole server",
        "throughput_ratio": "throughput",
    }
    targets = {"cpu_ratio": CPU_TARGET, "throughput_ratio": THROUGHPUT_TARGET}
    rows: list[Sequence[Any]] = []
    for name, said in names.items():
        low, high = found[f"{name}_ci95"]
        target = ""
        if name in targets:
            at_most = name == "cpu_ratio"
            says = verdict(found[name], (low, high), targets[name], at_most=at_most)
            target = f"{'<=' if at_most else '>='} {targets[name]}: {says}"
        rows.append([said, f"{found[name]:.4f}", f"{low:.4f} to {high:.4f}", target])
    beside = "SGLang's own" if against == "sglang" else "neither"
    title = f"the plugin's metrics and KV events / {beside}, nothing reused, {found['pairs']} pairs"
    return Table(title, ["", "median", "95 % interval", "target"], rows)


def _counted(found: dict[str, Any]) -> str:
    return (
        f"Counted: telling took {found['telling_us_per_token']:.2f} us a token of the scheduler's "
        f"thread, {found['share_of_thread']:.2%} of its {found['thread_us_per_token_on']:.0f} us; "
        f"the thread that encodes and sends took {found['sending_us_per_token']:.2f} us. SGLang's "
        f"own reports took {found['sglangs_us_per_token']:.2f} us of the scheduler's thread."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.telling", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, metavar="N", help="pairs of blocks")
    parser.add_argument("--block", type=int, default=40, metavar="N", help="requests in a block")
    parser.add_argument(
        "--against",
        choices=AGAINST,
        default=AGAINST[0],
        help="what the other server tells: what SGLang does without the plugin, or nothing",
    )
    parser.add_argument("--quick", action="store_true", help="three pairs, at most 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    args = parser.parse_args(argv)
    pairs = 3 if args.quick else args.pairs
    share = 0.0

    def make(progress: Progress) -> Report:
        nonlocal share
        with disk_folder("bench-telling-") as folder:
            found = measure_telling(folder, pairs, args.block, args.against, progress)
        share = found["share_of_thread"]
        n = {"pairs": found["pairs"], "requests_per_block": args.block}
        notes = [
            f"{MODEL.describe()}.",
            _counted(found),
            f"Pages that the last subscriber knew in the end: {found['told']}.",
        ]
        return Report(found, found.pop("samples"), n, [table(found, args.against)], notes)

    status = run_alone("serve_telling", make, args.json)
    if not status and share > MOST_OF_THREAD:
        print(
            f"bench: expected telling to take at most {MOST_OF_THREAD:.0%} of the scheduler's "
            f"thread, got {share:.2%}",
            file=sys.stderr,
        )
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
