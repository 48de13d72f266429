"""The command ``hier-kv``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sglang_ext import __version__
from sglang_ext.cli.doctor import add_parser as add_doctor
from sglang_ext.cli.examples import describe
from sglang_ext.cli.prebuild import add_parser as add_prebuild
from sglang_ext.cli.printing import complain, printable, say, say_json, tell
from sglang_ext.cli.server_stats import UNITS_SAID
from sglang_ext.cli.size import add_parser as add_size
from sglang_ext.cli.steer import add_command as add_steer
from sglang_ext.cli.stored.commands import add_commands as add_stored_commands
from sglang_ext.cli.usage import (
    FAILED,
    INTERRUPTED,
    WRONG_USE,
    UsageError,
    key_argument,
    of_the_command_line,
)
from sglang_ext.cli.warm.command import add_command as add_warm

_ENV_API_KEY = "SGLANG_HIER_KV_API_KEY"
_MAX_EVERY_S = 86400
_MOST_USAGE_LINES = 6
# By what the system says of a file that a command was given.
_ADVICE = {
    errno.ENOENT: "; correct the path, or make the file or folder that is not there",
    errno.EACCES: "; run this as a user who may use it, or change its permissions",
    errno.EPERM: "; run this as a user who may use it, or change its permissions",
    errno.EISDIR: "; name a file, not a folder",
    errno.ENOTDIR: "; correct the path: what stands for a folder in it is none",
    errno.ELOOP: "; correct the path: its links lead in a circle",
    errno.ENAMETOOLONG: "; correct the path, which is too long",
    errno.ENOSPC: "; make room there, or name another place",
    errno.EROFS: "; name a place that can be written to",
}
_UNITS_SAID = f"{UNITS_SAID} Speeds are in MB/s of 1,000,000 bytes."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status.

    0 where all is well, 1 where it ran and found something wrong or could not do it, 2 where it was
    asked wrongly (as argparse ends, too), 130 where it was interrupted.
    """
    chosen = make_parser().parse_args(arguments)
    status = FAILED
    try:
        status = int(chosen.run(chosen))
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        # The others need neither torch nor SGLang, so they are no requirements of the package.
        said = (
            f"{chosen.command} needs {error.name}, which is not installed here; run it where SGLang"
            " is, or pip install 'sglang-hier-kv[sglang]'."
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # who read it, such as `head`, has enough
        with open(os.devnull, "w") as nowhere:  # takes what the interpreter flushes at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 141  # as of a program that the signal ended
    except OSError as error:
        said = str(error)
        if error.filename is not None and error.strerror:
            advice = _ADVICE.get(error.errno or 0, "")
            said = f"{str(error.filename)!r}: {error.strerror}{advice}"
    except UsageError as error:
        said, status = str(error), WRONG_USE
    except (ValueError, ImportError) as error:
        said = str(error)
    complain(said)
    return status


class _Parser(argparse.ArgumentParser):
    """Repeats arguments, which may be names of files that others made, as `printing` does."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message("\n".join(map(printable, message.split("\n"))), file)


class _CommandParser(_Parser):
    """Refuses what its command does not know itself, and so with that command's usage."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """As argparse's; a usage that would push what is wrong off the screen is not shown."""
        if self.format_usage().count("\n") > _MOST_USAGE_LINES:
            self.usage = f"{self.prog} [options]   ({self.prog} --help lists them)"
        super().error(message)

    def _meant(self, unknown: Sequence[str]) -> str:
        """The flags that are written nearly like those that the command has not."""
        flags = list(self._option_string_actions)
        near = [difflib.get_close_matches(each.partition("=")[0], flags, n=1) for each in unknown]
        found = [
            flag
            for each, flags in zip(unknown, near, strict=True)
            for flag in flags
            if each.startswith("--")
        ]
        return f" (did you mean {' and '.join(found)}?)" if found else ""


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    parser = _Parser(prog="hier-kv", description="Tools of the hierarchical KV cache for SGLang.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_CommandParser)
    _add_calibrate(commands.add_parser("calibrate", help="measure a model's codec profile"))
    _add_keygen(commands.add_parser("keygen", help="make a key for --hier-kv-key-file"))
    add_doctor(
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
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Runs a Hugging Face model on text and writes a profile for the codec hier, beside the "
        "model or in the cache folder, where a server finds it. Needs torch and transformers.",
        "hier-kv calibrate /models/llama-8b --device cuda",
        "hier-kv calibrate /models/llama-8b --text traffic.txt --out /etc/hier-kv/llama-8b.hkp",
    )
    parser.set_defaults(run=_calibrate)
    add = parser.add_argument
    add("model", help="folder or name of a Llama-, Qwen- or Mistral-like model")
    add("--text", nargs="+", metavar="FILE", help="text to run it on; Python's reference if absent")
    add("--out", metavar="PATH", help="where to write the profile")
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--windows", type=int, help="pieces of text to run (48)")
    add("--max-block", type=int, metavar="CHANNELS", help="largest transform (512)")
    add("--levels", type=int, help="quality levels (7)")
    add("--default-level", type=int, help="the level whose damage is set (2)")
    add("--target-kl", type=float, help="that damage: mean KL divergence in nats")
    add("--json", action="store_true", help="for programs")


def _add_keygen(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Writes a new random key to a file that only its owner may read. An existing file is left "
        "as it is.",
        "hier-kv keygen /etc/hier-kv.key",
    )
    parser.set_defaults(run=_keygen)
    parser.add_argument("file", help="the file to make")
    parser.add_argument("--json", action="store_true", help="for programs")


def _keygen(chosen: argparse.Namespace) -> int:
    from sglang_ext.tiers.protection import write_key_file

    if not chosen.file:  # a variable that is not set
        raise UsageError("the name of a file to make is expected, got an empty text")
    try:
        write_key_file(Path(chosen.file))
    except FileExistsError as error:
        raise ValueError(
            f"{chosen.file!r}: File exists, and is left as it is; name another file"
        ) from error
    if chosen.json:
        say_json({"key_file": chosen.file}, indent=None)
    else:
        say(chosen.file)
    return 0


def _add_stats(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Looks at a running server once: its tiers, what came back from them, what waits, the "
        f"speeds it measured, and counts that should be 0. {_UNITS_SAID}",
        "hier-kv stats http://127.0.0.1:30000",
        "hier-kv stats http://127.0.0.1:30000 --json",
    )
    parser.set_defaults(run=_stats)
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="all counters, for programs")


def _add_top(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        f"Looks at a running server every few seconds, until Ctrl-C. {_UNITS_SAID}",
        "hier-kv top http://127.0.0.1:30000 --every 5",
    )
    parser.set_defaults(run=_top)
    _add_server(parser)
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="from one look to the next (%(default)s)",
    )
    parser.add_argument("--count", type=int, metavar="N", help="so many looks, then end")
    parser.add_argument("--json", action="store_true", help="for programs; a line for each look")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:30000", help="of the server (%(default)s)"
    )
    parser.add_argument(
        "--api-key",
        type=key_argument,
        default=os.environ.get(_ENV_API_KEY, ""),
        metavar="KEY",
        help=f"SGLang's, where it was started with one; or {_ENV_API_KEY}, which ps does not show",
    )


def _stats(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.server_stats import describe as lines_of
    from sglang_ext.cli.server_stats import fetch

    states = fetch(chosen.url, chosen.api_key)
    if chosen.json:
        say_json(states)
    else:
        for state in states:
            say(*lines_of(state))
    return 0


def _top(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.server_stats import State, fetch
    from sglang_ext.cli.server_stats import describe as lines_of

    if not 0 < chosen.every <= _MAX_EVERY_S:
        raise UsageError(f"--every must be above 0, at most {_MAX_EVERY_S} s, got {chosen.every:g}")
    if chosen.count is not None and chosen.count < 1:
        raise UsageError(f"--count must be above 0, got {chosen.count}")
    before: list[State] = []
    looked_s, num_looks = time.monotonic(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while chosen.count is None or num_looks < chosen.count:
            if num_looks:
                time.sleep(chosen.every)
            states, now_s = fetch(chosen.url, chosen.api_key), time.monotonic()
            if chosen.json:
                lines = [json.dumps({"time": time.time(), "schedulers": states})]
            else:
                lines = [time.strftime("%H:%M:%S")]
                same = len(before) == len(states)
                for at, state in enumerate(states):
                    lines += lines_of(state, before[at] if same else None, now_s - looked_s)
            clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not chosen.json else ""
            say(*lines, ahead=clear)
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
    with of_the_command_line():
        options = replace(CalibrationOptions(), **set_ones)
    if chosen.text:
        texts = [Path(name).read_text(encoding="utf-8", errors="replace") for name in chosen.text]
    else:
        texts = default_texts()
    target = Path(chosen.out) if chosen.out else path_to_write(chosen.model)
    _check_device(chosen.device)
    if chosen.out:  # not after minutes
        make_folder(target.parent)
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
    seconds = time.monotonic() - begin
    if chosen.json:
        say_json({"profile": str(target), "seconds": seconds}, indent=None)
    else:
        say(str(target))
    return 0


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # a name that is none; no such device here
        said = str(error).splitlines()[0]
        raise ValueError(
            f"--device must be a device that torch has here, such as cpu or cuda, got {name!r} "
            f"({said[:120]})"
        ) from error


def _tell(seconds: float, line: str) -> None:
    tell(f"{seconds:7.1f} s  {line}")
