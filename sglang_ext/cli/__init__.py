"""The command ``hier-kv``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sglang_ext import __version__
from sglang_ext.cli.prebuild import add_parser as add_prebuild
from sglang_ext.cli.size import add_parser as add_size
from sglang_ext.cli.steer import add_command as add_steer
from sglang_ext.cli.stored import add_commands as add_stored_commands
from sglang_ext.cli.warm.command import add_command as add_warm

_ENV_API_KEY = "SGLANG_HIER_KV_API_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="hier-kv", description="Tools of the hierarchical KV cache for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_calibrate(commands.add_parser("calibrate", help="measure a model's codec profile"))
    _add_keygen(commands.add_parser("keygen", help="make a key for --hier-kv-key-file"))
    _add_doctor(
        commands.add_parser("doctor", help="look at SGLang and the machine, as a start would")
    )
    add_prebuild(commands.add_parser("prebuild", help="compile what a first start would compile"))
    add_size(commands.add_parser("size", help="how much DRAM and disk traffic is worth"))
    _add_stats(commands.add_parser("stats", help="what a running server's tiers hold and do"))
    _add_top(commands.add_parser("top", help="the same, again and again, with rates"))
    add_steer(
        commands.add_parser("steer", help="say what is to become of a prompt's stored pages"),
        _add_server,
    )
    add_warm(
        commands.add_parser("warm", help="have documents computed and stored ahead of traffic"),
        _add_server,
    )
    add_stored_commands(commands)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except (ValueError, OSError, ImportError) as error:
        print(f"hier-kv: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a Hugging Face model on text and writes a profile for the codec hier, beside the "
        "model or in the cache folder, where a server finds it."
    )
    parser.set_defaults(run=_calibrate)
    add = parser.add_argument
    add("model", help="folder or name of a Llama-, Qwen- or Mistral-like model")
    add("--text", nargs="+", metavar="FILE", help="text to run it on; Python's reference if absent")
    add("--out", metavar="PATH", help="where to write the profile")
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--windows", type=int, help="pieces of text to run")
    add("--max-block", type=int, metavar="CHANNELS", help="largest transform")
    add("--levels", type=int, help="quality levels")
    add("--default-level", type=int, help="the level whose damage is set")
    add("--target-kl", type=float, help="that damage: mean KL divergence in nats")


def _add_keygen(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a new random key to a file that only its owner may read. An existing file is left "
        "as it is."
    )
    parser.set_defaults(run=_keygen)
    parser.add_argument("file", help="the file to make")


def _keygen(chosen: argparse.Namespace) -> int:
    from sglang_ext.tiers.protection import write_key_file

    write_key_file(Path(chosen.file))
    print(chosen.file)  # noqa: T201
    return 0


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    from sglang_ext.settings.flags import add_flags

    parser.description = (
        "Says whether a server would start with these settings, and what it would lose; loads no "
        "model and needs no GPU. The exit status is 1 where it would be refused. Example: hier-kv "
        "doctor --model-path M --hier-kv-host-size 64 --hier-kv-disk-dir /kv --hier-kv-disk-size 9"
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--contract", metavar="PLACE", help="look at this SGLang only: a wheel, or a folder"
    )
    parser.add_argument(
        "--model-path", default="", metavar="MODEL", help="say of this model whether it is served"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--speeds",
        action="store_true",
        help="measure disk and DRAM, for about 5 s; writes at most 512 MiB to the disk's folder",
    )
    add_flags(parser)


def _doctor(chosen: argparse.Namespace) -> int:
    from sglang_ext.assembly.doctor import check_sglang, look
    from sglang_ext.settings.flags import config_from_namespace

    if chosen.contract:
        checks = [check_sglang(Path(chosen.contract))]
    else:
        chosen.enable_hier_kv = True  # its flags mean something here without it, too
        config = config_from_namespace(chosen)
        assert config is not None
        checks = list(look(config, model_path=chosen.model_path, speeds=chosen.speeds))
    if chosen.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))  # noqa: T201
    else:
        for check in checks:
            print("\n    ".join([f"{check.name}: {check.state}. {check.text}", *check.details]))  # noqa: T201
    return int(any(check.state == "refused" for check in checks))


def _add_stats(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at a running server once: its tiers, what came back from them, what waits, the "
        "speeds it measured, and counts that should be 0. Example: "
        "hier-kv stats http://127.0.0.1:30000"
    )
    parser.set_defaults(run=_stats)
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="all counters, for programs")


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at a running server every few seconds, until Ctrl-C. Example: "
        "hier-kv top http://127.0.0.1:30000 --every 5"
    )
    parser.set_defaults(run=_top)
    _add_server(parser)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--count", type=int, metavar="N", help="so many looks, then end")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:30000", help="of the server (%(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(_ENV_API_KEY, ""),
        metavar="KEY",
        help=f"SGLang's, where it was started with one; or {_ENV_API_KEY}, which ps does not show",
    )


def _stats(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.server_stats import describe, fetch

    states = fetch(chosen.url, chosen.api_key)
    if chosen.json:
        print(json.dumps(states, indent=1))  # noqa: T201
    else:
        for state in states:
            print("\n".join(describe(state)))  # noqa: T201
    return 0


def _top(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.server_stats import State, describe, fetch

    if chosen.every <= 0 or (chosen.count is not None and chosen.count < 1):
        raise ValueError("--every and --count must be above 0")
    before: list[State] = []
    looked_s, num_looks = time.monotonic(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while chosen.count is None or num_looks < chosen.count:
            if num_looks:
                time.sleep(chosen.every)
            states, now_s = fetch(chosen.url, chosen.api_key), time.monotonic()
            lines = [time.strftime("%H:%M:%S")]
            same = len(before) == len(states)
            for at, state in enumerate(states):
                lines += describe(state, before[at] if same else None, now_s - looked_s)
            clear = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
            print(clear + "\n".join(lines), flush=True)  # noqa: T201
            before, looked_s, num_looks = states, now_s, num_looks + 1
    return 0


def _calibrate(chosen: argparse.Namespace) -> int:
    from sglang_ext.codec.calibration.calibrate import calibrate_model
    from sglang_ext.codec.calibration.default_text import default_texts
    from sglang_ext.codec.calibration.options import CalibrationOptions
    from sglang_ext.codec.calibration.profile_paths import path_to_write
    from sglang_ext.tiers.access import make_folder

    given = {
        "num_windows": chosen.windows,
        "max_block_channels": chosen.max_block,
        "num_levels": chosen.levels,
        "default_level": chosen.default_level,
        "target_kl": chosen.target_kl,
    }
    set_ones = {name: value for name, value in given.items() if value is not None}
    options = replace(CalibrationOptions(), **set_ones)
    if chosen.text:
        texts = [Path(name).read_text(encoding="utf-8", errors="replace") for name in chosen.text]
    else:
        texts = default_texts()
    target = Path(chosen.out) if chosen.out else path_to_write(chosen.model)
    begin = time.monotonic()
    profile = calibrate_model(
        chosen.model,
        texts,
        options=options,
        device=chosen.device,
        progress=lambda line: _tell(time.monotonic() - begin, line),
    )
    make_folder(target.parent)
    profile.save(target)
    print(target)  # noqa: T201
    return 0


def _tell(seconds: float, line: str) -> None:
    print(f"{seconds:7.1f} s  {line}", file=sys.stderr, flush=True)  # noqa: T201
