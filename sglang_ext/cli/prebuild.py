"""`hier-kv prebuild`: compiles ahead what a first start would compile."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from importlib import import_module

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import say, say_json
from sglang_ext.cli.usage import UsageError, of_the_command_line
from sglang_ext.codec.base import DTYPES, kv_dtype


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    describe(
        parser,
        "Compiles what the first start on a machine would compile, for a minute or two, and keeps "
        "it where this user's servers find it; what is kept already stays. Needs torch, but no "
        "GPU and no model.",
        "hier-kv prebuild --dtype bf16 --codec hier",
    )
    parser.set_defaults(run=_prebuild)
    add = parser.add_argument
    text = f"of the KV cache: {', '.join(DTYPES)} (bf16)"
    add("--dtype", nargs="+", metavar="NAME", default=["bf16"], help=text)
    add("--codec", nargs="+", metavar="ID", help="that servers will use (all); none for none")
    add("--jobs", type=int, metavar="N", help="processes that compile at a time (one a core)")
    add("--json", action="store_true", help="for programs")


def _prebuild(chosen: argparse.Namespace) -> int:
    import_module("torch")  # who lacks it hears so now, not behind a minute of compiling
    from sglang_ext.assembly.compile_ahead import prebuild
    from sglang_ext.codec.registry import codec_class, codec_ids
    from sglang_ext.compiling import check_kept

    built = []
    num_jobs = len(os.sched_getaffinity(0)) if chosen.jobs is None else chosen.jobs
    if num_jobs < 1:
        raise UsageError(f"--jobs must be 1 or more, got {num_jobs}; leave it out for one a core.")
    with of_the_command_line():
        for name in chosen.dtype:
            kv_dtype(name)
        for name in chosen.codec or ():
            codec_class(name)
    for one in prebuild(chosen.dtype, chosen.codec or codec_ids(), num_jobs):
        built.append(one)
        if not chosen.json:
            what = f"{one.part}: {one.num_compiled} loops compiled"
            say(f"{one.seconds:7.1f} s  {what}")
    if chosen.json:
        kept = {"folder": check_kept(), "parts": [asdict(one) for one in built]}
        say_json(kept)
    else:
        say(f"kept in {check_kept()}")
    return 0
