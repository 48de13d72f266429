"""`hier-kv size`: how much DRAM and disk a model's traffic is worth, by simulation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import say, say_json
from sglang_ext.cli.progress import Sizes
from sglang_ext.cli.usage import UsageError, of_the_command_line
from sglang_ext.settings.config import PREFETCH_POLICIES, HierKVConfig

_EXAMPLES = (
    "hier-kv size /models/llama-70b --tp-size 4 --chats-per-hour 2000 --turns 6 --think-s 90",
    "hier-kv size /models/qwen/config.json --trace requests.jsonl --host-size 64 --disk-size 0 500",
)
_TRACE = """
A trace has a request a line, as Mooncake publishes them: timestamp (ms), input_length,
output_length (tokens), hash_ids (a number for each 512 tokens of the prompt, the same for the same
tokens behind the same ones; --block-tokens for others).
"""
_BLOCK_TOKENS = 512
_PAGE_TOKENS = 64
# DRAM of so many times what is worth keeping has room for everything; a hit rate so far below what
# is possible is then no lack of room.
_ROOMY, _FAR = 1.5, 0.2
# What each may be at the least and at the most, and what to do where it is another.
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "kv_bytes_per_token": (1, 1 << 40, "give the bytes of a token on all ranks, or a model"),
    "tp_size": (1, 1024, "leave it out for 1"),
    "page_size": (2, 1 << 20, f"leave it out for {_PAGE_TOKENS}"),  # 1 is refused at a start
    "block_tokens": (1, 1 << 20, f"leave it out for {_BLOCK_TOKENS}"),
    "disk_gb_s": (0.001, 1000, "give 10^9 bytes a second (hier-kv doctor --speeds measures it)"),
    "prefill_tokens_per_s": (1e-3, 1e9, "leave it out for twice what the traffic needs"),
    "decode_tokens_per_s": (1e-3, 1e6, "leave it out for 50"),
}
_CHATS = (
    ("turns", "N", "mean number of questions in a chat (5)"),
    ("system-tokens", "N", "tokens that every chat begins with (0)"),
    ("first-tokens", "N", "mean length of the first question, with its document (500)"),
    ("turn-tokens", "N", "mean length of later questions (200)"),
    ("answer-tokens", "N", "mean length of answers (300)"),
    ("think-s", "SECONDS", "mean time from an answer to the next question (60)"),
)


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    describe(
        parser,
        "Says what hit rate sizes of DRAM and disk would bring, by running the server's own page "
        "store under this traffic in virtual time: a minute or some, in which it says how far it "
        "is, and of each size what it brings as soon as that is known. Needs no GPU, no server, "
        "and neither torch nor SGLang.",
        *_EXAMPLES,
        more=_TRACE,
    )
    parser.set_defaults(run=_size)
    add = parser.add_argument
    add("model", nargs="?", help="the model's folder, or its config.json")
    add("--kv-bytes-per-token", type=int, metavar="BYTES", help="of all ranks; instead of a model")
    add("--kv-dtype", default="", metavar="NAME", help="of the KV cache (the model's own)")
    add("--tp-size", type=int, default=1, metavar="N", help="ranks that share the model (1)")
    text = f"SGLang's ({_PAGE_TOKENS}; pages of a trace are its blocks)"
    add("--page-size", type=int, metavar="TOKENS", help=text)
    chats = parser.add_argument_group("traffic of chats")
    rate = chats.add_mutually_exclusive_group()
    rate.add_argument("--chats-per-hour", type=float, metavar="N", help="chats that begin")
    rate.add_argument("--chats-per-second", type=float, metavar="N", help="the same")
    for name, metavar, text in _CHATS:
        chats.add_argument(f"--{name}", type=float, metavar=metavar, help=text)
    trace = parser.add_argument_group("or traffic of a trace")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="requests (.jsonl, .xz)")
    text = f"of the prompt behind each of its hash_ids ({_BLOCK_TOKENS})"
    trace.add_argument("--block-tokens", type=int, metavar="N", help=text)
    sizes = parser.add_argument_group("sizes and speeds")
    for name, of in (("host-size", "DRAM"), ("disk-size", "disk; 0 for none")):
        text = f"GiB of {of}, instead of a choice by the traffic"
        sizes.add_argument(f"--{name}", type=float, nargs="+", metavar="GIB", help=text)
    text = "of the disk, 10^9 bytes a second (%(default)s)"
    sizes.add_argument("--disk-gb-s", type=float, default=3.0, metavar="N", help=text)
    text = "of the server without reuse (twice what the traffic needs)"
    sizes.add_argument("--prefill-tokens-per-s", type=float, metavar="N", help=text)
    text = "of one request (%(default)s)"
    sizes.add_argument("--decode-tokens-per-s", type=float, default=50.0, metavar="N", help=text)
    text = "as the server's --hier-kv-prefetch-policy (%(default)s)"
    default = HierKVConfig.prefetch_policy
    add("--prefetch-policy", default=default, choices=PREFETCH_POLICIES, help=text)
    add("--json", action="store_true", help="for programs")


def _size(chosen: argparse.Namespace) -> int:
    from sglang_ext.simulator.sizing import choose, predict

    model = _model(chosen)
    traffic = _traffic(chosen, model.bytes_per_token)
    sizes = _sizes(chosen, traffic, model.bytes_per_token)
    _require_served(traffic)
    progress = Sizes(len(sizes))
    with of_the_command_line():  # which of sizes asks for no more than a few pages
        each = predict(
            traffic,
            model.bytes_per_token,
            sizes,
            chosen.disk_gb_s,
            chosen.prefetch_policy,
            progress,
        )
    with progress:
        found = []
        for one in each:
            found.append(one)
            progress.found(_shown(one))
    best = choose(found)
    if chosen.json:
        shown = {
            "model": asdict(model),
            "page_tokens": traffic.page_tokens,
            "worth_keeping_tokens": round(traffic.tokens),
            "simulated_scale": traffic.scale,
            "prefill_tokens_per_s": round(traffic.prefill_tokens_per_s / traffic.scale),
            "sizes": [asdict(one) for one in found],
            "choice": asdict(best.size),
        }
        say_json(shown)
        return 0
    say(*_table(model, traffic, found, best))
    return 0


def _shown(one: Any) -> str:
    """A size and what it brings, as soon as that is known: the largest take the longest."""
    size = f"DRAM {one.size.host_gib:g} GiB, disk {one.size.disk_gib:g} GiB"
    return f"{size}: hit rate {one.hit_rate:.1%}"


def _require_served(traffic: Any) -> None:
    """Refuses what would be a queue without an end, whatever the sizes.

    Raises:
        ValueError: the GPU cannot keep up.
    """
    if traffic.load < 1:
        return
    speed = traffic.prefill_tokens_per_s / traffic.scale
    raise ValueError(
        f"the GPU cannot serve this: load {traffic.load:.3g} even with room for everything, as "
        f"{traffic.demand.new_tokens_per_s:,.0f} tokens a second are new and it computes "
        f"{speed:,.0f}; say a faster --prefill-tokens-per-s (all GPUs of the server together), or "
        "less traffic"
    )


def _model(chosen: argparse.Namespace) -> Any:
    from sglang_ext.simulator.model_config import DTYPE_BYTES, ModelKv, read_model

    for name, (least, most, advice) in _BOUNDS.items():
        value = getattr(chosen, name)
        if value is not None and not least <= value <= most:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            raise UsageError(
                f"--{name.replace('_', '-')} must be from {least:,} to {most:,.0f}, got {shown}; "
                f"{advice}"
            )
    if chosen.model == "":  # a variable that is not set; `Path` takes it for the folder here
        raise UsageError("a model's folder or config.json is expected, got an empty text; name it")
    if (chosen.model is None) == (chosen.kv_bytes_per_token is None):
        raise UsageError(
            f"give either a model's folder or config.json, or --kv-bytes-per-token: {_EXAMPLES[0]}"
        )
    if chosen.model is None:
        if chosen.tp_size > 1 or chosen.kv_dtype:  # neither would change anything
            raise UsageError(
                "--kv-bytes-per-token is of a token on all ranks together, in the dtype of the KV "
                "cache; leave --tp-size and --kv-dtype out"
            )
        return ModelKv("this model", chosen.kv_bytes_per_token)
    if chosen.kv_dtype and chosen.kv_dtype.removeprefix("torch.") not in DTYPE_BYTES:
        raise UsageError(
            f"--kv-dtype must be one of {', '.join(DTYPE_BYTES)}, got {chosen.kv_dtype!r}; leave "
            "it out for the model's own"
        )
    return read_model(Path(chosen.model), chosen.kv_dtype, chosen.tp_size)


def _traffic(chosen: argparse.Namespace, kv_bytes_per_token: int) -> Any:
    from sglang_ext.simulator.trace import read_trace
    from sglang_ext.simulator.traffic import (
        LEAST_CHATS_PER_HOUR,
        MOST_CHATS_PER_HOUR,
        Chats,
        of_chats,
        of_trace,
        with_prefill,
    )

    per_hour = chosen.chats_per_hour
    if chosen.chats_per_second is not None:
        per_hour = 3600 * chosen.chats_per_second
        if not LEAST_CHATS_PER_HOUR <= per_hour <= MOST_CHATS_PER_HOUR:
            raise UsageError(
                f"--chats-per-second must be from {LEAST_CHATS_PER_HOUR / 3600:.3g} to "
                f"{MOST_CHATS_PER_HOUR / 3600:.3g}, got {chosen.chats_per_second:g}; say how many "
                "chats begin in a second"
            )
    names = [name.replace("-", "_") for name, _, _ in _CHATS]
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    if (per_hour is None) == (chosen.trace is None) or (chosen.trace is not None and given):
        raise UsageError(
            f"give either --chats-per-hour and lengths of chats, or --trace FILE: {_EXAMPLES[0]}"
        )
    if chosen.trace is None and chosen.block_tokens is not None:
        raise UsageError(
            "--block-tokens says how a --trace counts its prompts, and changes nothing of chats; "
            "leave it out, or give --trace FILE in place of --chats-per-hour"
        )
    if chosen.trace is not None and chosen.page_size is not None:
        raise UsageError(
            "--page-size changes nothing of a --trace, whose blocks are the pages; leave it out, "
            "or say with --block-tokens how long they are"
        )
    if per_hour is not None:
        page_size = chosen.page_size or _PAGE_TOKENS
        with of_the_command_line():
            chats = Chats(per_hour, **given)
            _check_page(page_size, kv_bytes_per_token)
            traffic = of_chats(chats, page_size, chosen.decode_tokens_per_s, kv_bytes_per_token)
    else:
        decode_tokens_per_s = chosen.decode_tokens_per_s
        block_tokens = chosen.block_tokens or _BLOCK_TOKENS
        lines = read_trace(chosen.trace, block_tokens=block_tokens)
        traffic = of_trace(lines, block_tokens, kv_bytes_per_token, decode_tokens_per_s)
    if chosen.prefill_tokens_per_s is not None:
        traffic = with_prefill(traffic, chosen.prefill_tokens_per_s)
    return traffic


def _check_page(page_tokens: int, kv_bytes_per_token: int) -> None:
    """Refuses what no server stores as a page."""
    from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS

    most_bytes = (MAX_RECORD_BLOCKS - 1) * BLOCK_BYTES
    if page_tokens * kv_bytes_per_token > most_bytes:
        raise UsageError(
            f"a page must take at most {most_bytes:,} bytes, got {page_tokens:,} tokens of "
            f"{kv_bytes_per_token:,} bytes each; give a smaller --page-size, or a model's true size"
        )


def _sizes(chosen: argparse.Namespace, traffic: Any, kv_bytes_per_token: int) -> list[Any]:
    from sglang_ext.simulator.sizing import Size, sizes_for

    if chosen.host_size is None and chosen.disk_size is None:
        return sizes_for(traffic, kv_bytes_per_token)
    if chosen.host_size is None:
        raise UsageError("--disk-size needs --host-size: what lies on disk comes back through DRAM")
    disks = chosen.disk_size or [0.0]
    for name, given in (("host", chosen.host_size), ("disk", disks)):
        for gb in given:
            if not 0 <= gb < math.inf:
                raise UsageError(
                    f"--{name}-size must be GiB, 0 or more, got {gb:g}; leave --host-size and "
                    "--disk-size out for a choice by the traffic"
                )
    sizes = [Size(host, disk) for host in chosen.host_size for disk in disks]
    return list(dict.fromkeys(sizes))


def _table(model: Any, traffic: Any, found: Sequence[Any], best: Any) -> list[str]:
    from sglang_ext.simulator.sizing import GIB, slot_bytes

    page_bytes = slot_bytes(traffic.page_tokens, model.bytes_per_token)
    worth_gib = traffic.tokens / traffic.page_tokens * page_bytes / GIB
    possible = max(one.possible for one in found)
    name = f"{model.name}: {model.bytes_per_token:,} bytes of KV a token"
    note = f"; {model.note}" if model.note else ""
    worth = f"worth keeping at a time: {traffic.tokens:,.0f} tokens, {worth_gib:.3g} GiB"
    lines = [
        f"{name}, simulated in pages of {traffic.page_tokens} tokens{note}",
        f"{worth}; with room for everything {possible:.1%} of the prompt tokens would be reused",
        "",
        f"{'DRAM GiB':>10} {'disk GiB':>10} {'hit rate':>9} {'in DRAM':>9} {'on disk':>9}",
    ]
    for one in found:
        mark = "  <-" if one is best else ""
        if one.load >= 1:
            mark += f"  too slow: load {one.load:.3g}"
        lines.append(
            f"{one.size.host_gib:>10g} {one.size.disk_gib:>10g} {one.hit_rate:>9.1%} "
            f"{one.from_host:>9.1%} {one.from_disk:>9.1%}{mark}"
        )
    return [
        *lines,
        "",
        "hit rate: share of prompt tokens that are not computed, by where they lie at their turn.",
        "The device's own cache is left out: it adds little where DRAM is larger than it.",
        *_of_load(traffic, found),
        *_of_computing(traffic, found, worth_gib),
        *_next(best),
    ]


def _next(best: Any) -> list[str]:
    if best.load >= 1:
        return [
            "next: no size here keeps up; ask for more (--host-size, --disk-size), or say a faster",
            "  --prefill-tokens-per-s, or less traffic",
        ]
    flags = f"--enable-hier-kv --hier-kv-host-size {best.size.host_gib:g}"
    look = f"hier-kv doctor --hier-kv-host-size {best.size.host_gib:g}"
    if best.size.disk_gib:
        disk = f" --hier-kv-disk-dir DIR --hier-kv-disk-size {best.size.disk_gib:g}"
        flags, look = flags + disk, look + disk
    return [
        "next:",
        f"  {look}    # on the machine: would it start?",
        f"  python -m sglang.launch_server ... {flags}",
        "  hier-kv stats http://127.0.0.1:30000    # line `tokens`: is it so?",
    ]


def _of_load(traffic: Any, found: Sequence[Any]) -> list[str]:
    """What is to be said of sizes that cannot keep up."""
    if all(one.load < 1 for one in found):
        return []
    speed = traffic.prefill_tokens_per_s / traffic.scale
    return [
        f"too slow: what such a size does not spare is more than {speed:,.0f} tokens a second;",
        "requests would wait ever longer.",
    ]


def _of_computing(traffic: Any, found: Sequence[Any], worth_gib: float) -> list[str]:
    """What is to be said where DRAM has room for everything, and most of it is computed anew."""
    roomy = [one for one in found if one.size.host_gib >= _ROOMY * worth_gib and one.load < 1]
    if not roomy or any(one.hit_rate > one.possible - _FAR for one in roomy):
        return []
    speed = traffic.prefill_tokens_per_s / traffic.scale
    return [
        f"There is room and little is reused: at {speed:,.0f} tokens a second (twice what the",
        "traffic needs, unless --prefill-tokens-per-s says it) computing is quicker than loading.",
        "Ask about one server: its part of the traffic, and its speed.",
    ]
