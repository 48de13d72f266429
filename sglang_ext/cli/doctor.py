"""`hier-kv doctor`: would a server start with these settings, and what to do next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import say, say_json
from sglang_ext.cli.usage import UsageError
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.flags import add_flags, config_from_namespace
from sglang_ext.settings.values import flag_name

if TYPE_CHECKING:
    from sglang_ext.assembly.doctor.checks import Check

_HOST = "127.0.0.1"  # SGLang's


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    describe(
        parser,
        "Says whether a server would start with these settings, and what it would lose; loads no "
        "model and needs no GPU. The exit status is 1 where it would be refused.",
        "hier-kv doctor --model-path /models/llama-8b --hier-kv-host-size 64 --speeds",
        "hier-kv doctor --model-path /models/llama-8b --port 30000 --hier-kv-host-size 64",
        "hier-kv doctor --hier-kv-host-size 64 --hier-kv-disk-dir /nvme/kv --hier-kv-disk-size 500",
        "hier-kv doctor --contract sglang-0.5.24-cp311-cp311-manylinux_2_34_x86_64.whl",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--contract", metavar="PLACE", help="look at this SGLang only: a wheel, or a folder"
    )
    parser.add_argument(
        "--model-path", default="", metavar="MODEL", help="say of this model whether it is served"
    )
    text = "whether SGLang's --port is free; it finds that out when the model is loaded"
    parser.add_argument("--port", type=int, metavar="N", help=text)
    text = "of the port (%(default)s)"
    parser.add_argument("--host", default=_HOST, metavar="ADDRESS", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--speeds",
        action="store_true",
        help="measure disk and DRAM, for about 5 s; writes at most 512 MiB to the disk's folder",
    )
    add_flags(parser)


def _doctor(chosen: argparse.Namespace) -> int:
    from sglang_ext.assembly.doctor.checks import check_sglang

    checks = [check_sglang(Path(chosen.contract))] if chosen.contract else _look(chosen)
    steps = [] if chosen.contract else next_steps(chosen, checks)
    if chosen.json:
        say_json({"checks": [asdict(check) for check in checks], "next": steps})
    else:
        for check in checks:
            details = (f"    {line}" for line in check.details)
            say(f"{check.name}: {check.state}. {check.text}", *details)
        if steps:
            say("next:", *(f"  {line}" for line in steps))
    return int(any(check.state == "refused" for check in checks))


def _look(chosen: argparse.Namespace) -> list[Check]:
    """The checks of a start; of flags that no server takes, only what is wrong with them."""
    from sglang_ext.assembly.doctor.checks import Check, check_sglang, look

    if chosen.port is not None and not 0 < chosen.port < 1 << 16:
        raise UsageError(f"--port must be from 1 to 65535, got {chosen.port}")
    chosen.enable_hier_kv = True  # its flags mean something here without it, too
    try:
        config = config_from_namespace(chosen)
    except HierKVConfigError as error:
        return [check_sglang(), Check("settings", "refused", str(error))]
    assert config is not None
    looked = look(
        config,
        model_path=chosen.model_path,
        host=chosen.host,
        port=chosen.port,
        speeds=chosen.speeds,
    )
    return list(looked)


def next_steps(chosen: argparse.Namespace, checks: Sequence[Check]) -> list[str]:
    """What to do after these checks: commands, each with what it is for.

    Args:
        chosen: what the command was given.
        checks: what came of it.
    """
    refused = [check.name for check in checks if check.state == "refused"]
    if refused:
        return [f"# mend what is refused above ({', '.join(refused)}), and look again"]
    given = {item.name: f"hier_kv_{item.name}" for item in fields(HierKVConfig)}
    values = {name: getattr(chosen, at) for name, at in given.items() if hasattr(chosen, at)}
    words = [
        f"{flag_name(name)} {f'{value:g}' if isinstance(value, float) else shlex.quote(str(value))}"
        for name, value in values.items()
    ]
    model = shlex.quote(chosen.model_path) if chosen.model_path else "MODEL"
    flags = " ".join(["", *words])
    start, port = flags, 30000 if chosen.port is None else chosen.port
    if chosen.host != _HOST:
        start += f" --host {shlex.quote(chosen.host)}"
    if chosen.port is not None:
        start += f" --port {port}"
    steps = []
    if not chosen.model_path:
        steps.append(f"hier-kv doctor --model-path MODEL{flags}    # is the model served?")
    if not hasattr(chosen, "hier_kv_host_size"):
        steps.append(
            f"hier-kv size {model} --chats-per-hour 2000    # how much DRAM and disk is it worth?"
        )
    return [
        *steps,
        f"python -m sglang.launch_server --model-path {model} --enable-hier-kv{start}",
        f"hier-kv stats http://127.0.0.1:{port}    # beside it: does it help?",
    ]
