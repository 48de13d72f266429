"""Flags of `python -m bench policies` alone: what its servers do, a trace, and its machine."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.settings.config import PREFETCH_POLICIES
from sglang_ext.simulator.types import CHUNK_TOKENS
from sglang_ext.simulator.virtual_store import DEFAULT_PREFETCH_POLICY

_NAMES = ("kv_bytes_per_token", "host_gb", "disk_gb", "prefill_tokens_per_s")


@dataclass(frozen=True)
class TraceFlags:
    """A trace and its machine; the defaults are LLaMA-70B on the paper's machine.

    Attributes:
        path: JSON lines, `.xz` allowed (sglang_ext/simulator/trace.py tells the format).
        host_gb, disk_gb: sizes of DRAM and SSD, 10^9 bytes.
    """

    path: Path
    kv_bytes_per_token: float = 327_680
    host_gb: float = 128.0
    disk_gb: float = 10_000.0
    prefill_tokens_per_s: float = 5_359.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; none of a trace's has a default, so that `parse` sees what was given."""
    parser.add_argument(
        "--prefetch-policy",
        default=DEFAULT_PREFETCH_POLICY,
        choices=PREFETCH_POLICIES,
        help="policies: as the server's --hier-kv-prefetch-policy (%(default)s)",
    )
    add_chunk_flag(parser, "policies: ")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="policies: a request trace instead of the built-in workloads (JSON lines with "
        "timestamp, input_length, output_length, hash_ids of 512 tokens; .xz allowed)",
    )
    for name, metavar, text in (
        ("kv-bytes-per-token", "N", "KV of one token (327680)"),
        ("host-gb", "GB", "DRAM, 10^9 bytes (128)"),
        ("disk-gb", "GB", "SSD, 10^9 bytes; 0 is none (10000)"),
        ("prefill-tokens-per-s", "N", "speed of the machine (5359)"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar=metavar, help=f"with --trace: {text}")


def add_chunk_flag(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Adds `--chunked-prefill-size`.

    Args:
        parser: of the command line.
        of: what the flag's help begins with.
    """
    parser.add_argument(
        "--chunked-prefill-size", type=_tokens, default=CHUNK_TOKENS, metavar="TOKENS",
        help=f"{of}as SGLang's: of a prompt so many are computed at a time, and saved "
        "(%(default)s)",
    )  # fmt: skip


def _tokens(text: str) -> int:
    """A number of tokens, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more tokens, came {number}")
    return number


def parse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> TraceFlags | None:
    """The trace that the command line asks for; ends the program in one sentence if it is wrong."""
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    if args.trace is None:
        if given:
            name = _flag(next(iter(given)))
            parser.error(f"{name} describes the machine of a trace; give --trace FILE, too")
        return None
    if args.case != "policies":
        parser.error(f"--trace is for the case policies, came {args.case}; leave it out")
    for name, value in given.items():
        least_is_zero = name in ("host_gb", "disk_gb")
        if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
            bound = ">= 0" if least_is_zero else "> 0"
            parser.error(f"{_flag(name)} must be {bound}, came {value:g}")
    return TraceFlags(args.trace, **given)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
