"""Returning chats behind a router that follows KV events, on two servers.

    python -m bench.serve.routing [--quick] [--json FILE]

A router sends each turn of a chat to the server that has most of its prompt, as far as it knows,
and to the one with fewer turns so far if both have as much. It knows what the servers' KV events
say: in one run those of the device alone, as SGLang has them, in the other those of DRAM and disk,
too; a third run takes a server at random. Chats return in rounds, in another order each time, so
that the device of neither server has a chat when it comes back. Counted is which part of what a
chat has said before is not computed again. In full it fails where the tiers' events bring less than
1.5 times what those of the device do.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.output import Progress
from bench.serve import event_shares
from runtime_cpu import inprocess
from testkit import dummy_model
from testkit.dummy_model import DummyModel
from testkit.ports import free_port
from testkit.requests import flush_device, random_ids, settle, timed
from testkit.server import Server

inprocess.prepare()

from testkit.kv_reader import KvReader, publishing  # noqa: E402

_PAGE, _TURN, _DEVICE_CHATS = 64, 256, 4
_SERVERS = 2
_MODEL = DummyModel("routing", 2, 128, 4, 2, 32, 256, 4096)
_MEDIA = {"device": {"GPU"}, "tiers": {"GPU", "CPU_PINNED", "DISK"}}
MODES = ("random", *_MEDIA)


@dataclass
class _Node:
    """A server, what the router knows of it, and the turns it was sent."""

    server: Server
    reader: KvReader
    num_turns: int = 0


def measure_routing(folder: Path, chats: int, turns: int, progress: Progress) -> dict[str, Any]:
    """Runs the same chats in each mode.

    Args:
        folder: for the model and the disk tiers.
        chats: how many.
        turns: of each, at least 2.
        progress: where to say how far it is.

    Returns:
        By mode the share of earlier tokens that were reused, and the ratio of the two.
    """
    model = _MODEL.write(folder)
    ports = [free_port() for _ in range(_SERVERS)]
    servers = [
        _server(folder / f"tier-{index}", model, port, chats * turns)
        for index, port in enumerate(ports)
    ]
    with servers[0], servers[1]:
        shares = {}
        for mode in MODES:
            readers = [KvReader(_endpoint(port)) for port in ports]
            with readers[0], readers[1]:
                nodes = [_Node(*each) for each in zip(servers, readers, strict=True)]
                _join(nodes)
                shares[mode] = _run(nodes, mode, chats, turns, progress)
    return {
        "chats": chats,
        "turns": turns,
        **{f"reused_{mode}": share for mode, share in shares.items()},
        "tiers_over_device": shares["tiers"] / shares["device"],
    }


def _run(nodes: list[_Node], mode: str, chats: int, turns: int, progress: Progress) -> float:
    """Share of the tokens that chats had said before which were reused."""
    rng, order = np.random.default_rng(5), random.Random(5)
    said: list[list[int]] = [[] for _ in range(chats)]
    reused = before = 0
    for turn in range(turns):
        for place, chat in enumerate(order.sample(range(chats), chats)):
            progress.update(f"{mode}: turn {turn + 1} of {turns}, chat {place + 1} of {chats}")
            known = len(said[chat]) // _PAGE * _PAGE
            said[chat] += random_ids(rng, _TURN)
            node = _choose(nodes, mode, said[chat], order)
            answer = timed(node.server, said[chat])
            node.num_turns += 1
            before += known
            reused += min(answer.cached, known)
    return reused / before


def _choose(nodes: list[_Node], mode: str, ids: list[int], order: random.Random) -> _Node:
    if mode == "random":
        return order.choice(nodes)
    known = {id(node): node.reader.prefix(ids, _PAGE, _MEDIA[mode]) for node in nodes}
    return max(nodes, key=lambda node: (known[id(node)], -node.num_turns))


def _join(nodes: list[_Node]) -> None:
    """Empties the servers once their readers hear them."""
    rng = np.random.default_rng()
    for node in nodes:
        while not node.reader.has_heard:
            timed(node.server, random_ids(rng, _PAGE + 1))
        settle(node.server)
        node.server.post("/hicache/storage-backend/clear")
        flush_device(node.server)
        node.reader.until(lambda index: not index.media)


def _server(folder: Path, model: Path, port: int, num_turns: int) -> Server:
    """DRAM holds a quarter of what all chats say, the disk all of it."""
    pages = num_turns * _TURN // _PAGE
    args: list[Any] = [
        *dummy_model.ARGS,
        *("--max-total-tokens", _DEVICE_CHATS * 1024, "--mem-fraction-static", 0.3),
        *("--page-size", _PAGE, *publishing(_endpoint(port))),
        *("--enable-hier-kv", "--hier-kv-host-size", _MODEL.host_gb(pages // 4, _PAGE)),
        *("--hier-kv-disk-dir", folder, "--hier-kv-disk-size", 2),
        *("--hier-kv-prefetch-policy", "wait_complete"),
    ]
    return Server(args, model=model, stop="kill", start_timeout_s=600.0)


def _endpoint(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    args = event_shares.parser_of("routing", __doc__).parse_args(argv)
    column = "reused of what was said before"
    return event_shares.run("routing", args, measure_routing, "on two servers", column)


if __name__ == "__main__":
    sys.exit(main())
