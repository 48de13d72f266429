"""Returning chats behind SGLang's own gateway (SMG), which follows KV events, on two servers.

    python -m bench.serve.gateway [--quick] [--json FILE]

The gateway speaks gRPC to its servers and sends a chat's turn to the one that has most of its
prompt, by what their KV events say (`--policy cache_aware`). In one run the servers tell of the
device alone, as SGLang does, in the other of DRAM and disk, too (of the disk as of DRAM, with
`--hier-kv-kv-events-disk host`: this gateway sends nobody to where pages are on disk alone); in a
third one the gateway takes a server at random. Chats return in rounds, in another order each time,
so that neither device has a chat when it comes back. Counted is, by the gateway's own answers,
which part of what a chat had sent before was not computed again. In full it fails where the tiers'
events bring less than 1.5 times what those of the device do. `bench.serve.routing` is the same with
a router of twenty lines.

Chats have three turns. Of two servers that are taken by chance one has, in the mean, 0.58 of what a
chat of three turns had sent before, and 0.65 of one of four: there everything is 1.55 times as
much, and whether 1.5 is reached is chance, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.output import Progress
from bench.serve import event_shares
from testkit.rank_probe import loading
from testkit.remote.gateway import Gateway
from testkit.workload import load_texts, load_tokenizer

_PAGE, _TURN_TOKENS, _DEVICE_CHATS = 64, 256, 4
_SLOT_GIB = 266_240 / 2**30  # of a page of the bundled model
_SERVERS, _TURNS = 2, 3
_POLICIES = {"random": "random", "device": "cache_aware", "tiers": "cache_aware"}


def load() -> None:
    """Entry point in a server's processes: no tier below the device is told of."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang_ext.seam import cache

    vars(cache)["TierEventRecorder"] = lambda device, *_, **__: device


def measure_gateway(folder: Path, chats: int, turns: int, progress: Progress) -> dict[str, Any]:
    """Runs the same chats in each mode, on servers of its own.

    Args:
        folder: for the servers.
        chats: how many.
        turns: of each, at least 2.
        progress: where to say how far it is.

    Returns:
        By mode the share of earlier tokens that were reused, and the ratio of the two.
    """
    shares = {}
    for mode, policy in _POLICIES.items():
        own = folder / mode
        own.mkdir()
        probe = loading(own, "bench.serve.gateway:load") if mode == "device" else {}
        args = [_arguments(own / f"disk-{number}", chats * turns) for number in range(_SERVERS)]
        progress.update(f"{mode}: starting two servers and the gateway")
        with Gateway(args, policy, _PAGE, own, probe) as gateway:
            shares[mode] = _run(gateway, mode, chats, turns, progress)
    return {
        "chats": chats,
        "turns": turns,
        **{f"reused_{mode}": share for mode, share in shares.items()},
        "tiers_over_device": shares["tiers"] / shares["device"],
    }


def _arguments(disk: Path, num_turns: int) -> list[str]:
    """DRAM holds a quarter of what all chats say, the disk all of it."""
    pages = num_turns * _TURN_TOKENS // _PAGE
    args: list[Any] = ["--max-total-tokens", _DEVICE_CHATS * 4 * _TURN_TOKENS]
    args += ["--attention-backend", "cpu_extend", "--enable-hier-kv"]
    args += ["--hier-kv-host-size", f"{pages / 4 * _SLOT_GIB:.3f}", "--hier-kv-disk-size", 2]
    args += ["--hier-kv-disk-dir", disk, "--hier-kv-kv-events-disk", "host"]
    return [str(each) for each in (*args, "--hier-kv-prefetch-policy", "wait_complete")]


def _run(gateway: Gateway, mode: str, chats: int, turns: int, progress: Progress) -> float:
    """Share of the tokens of whole pages that chats had sent before which were reused."""
    texts, tokenizer = load_texts(load_tokenizer()), load_tokenizer()
    order = random.Random(5)
    said: list[list[dict[str, str]]] = [[] for _ in range(chats)]
    sent = [0] * chats
    reused = before = 0
    for turn in range(turns):
        for place, chat in enumerate(order.sample(range(chats), chats)):
            progress.update(f"{mode}: turn {turn + 1} of {turns}, chat {place + 1} of {chats}")
            text = texts[order.randrange(len(texts))]
            at = order.randrange(len(text) - _TURN_TOKENS)
            excerpt = tokenizer.decode(text[at : at + _TURN_TOKENS])
            said[chat].append({"role": "user", "content": f"{chat}: {excerpt}"})
            answer = gateway.chat(said[chat], 1)
            said[chat].append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."}
            )
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            known = sent[chat] // _PAGE * _PAGE
            before += known
            reused += min(cached, known)
            sent[chat] = usage["prompt_tokens"]
    return reused / before


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    args = event_shares.parser_of("gateway", __doc__).parse_args(argv)
    column = "reused of what was sent before"
    place = "behind SGLang's gateway"
    return event_shares.run("gateway", args, measure_gateway, place, column, _TURNS)


if __name__ == "__main__":
    sys.exit(main())
