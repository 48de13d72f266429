"""`hier-kv steer`: says to a running server what is to become of a prompt's stored pages."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import say, say_json
from sglang_ext.cli.usage import UsageError, key_argument
from sglang_ext.hints.steering_request import contradiction

_ENV_ADMIN_KEY = "SGLANG_HIER_KV_ADMIN_API_KEY"
_FLAGS = {
    "locate": "say only where they lie",
    "prefetch": "bring them to DRAM now, before a request comes",
    "demote": "let them leave DRAM first",
    "unpin": "end their pins",
    "ends": "their conversation is over: they leave first",
}
_TIMES = {
    "pin_s": "they are to stay for so long",
    "ttl_s": "they are of no use after so long",
    "returns_in_s": "their conversation comes back in so long",
}


def add_command(
    parser: argparse.ArgumentParser, add_server: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Adds what the command takes.

    Args:
        parser: of the command.
        add_server: adds the server's URL and key.
    """
    describe(
        parser,
        "Says to a running server what is to become of the stored pages of a prompt "
        "(docs/hints.md), and where they lay before. Needs SGLang's admin key where the server "
        "has one.",
        "hier-kv steer http://127.0.0.1:30000 --text system.txt --prefetch --pin-s 3600",
        "hier-kv steer http://127.0.0.1:30000 --text system.txt --locate --json",
    )
    parser.set_defaults(run=_steer)
    add_server(parser)
    add_admin_key(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="FILE", help="with the prompt's text, - for stdin")
    prompt.add_argument("--ids", metavar="FILE", help="with its token ids, a JSON list")
    parser.add_argument("--cache-salt", metavar="SALT", help="of the requests with this prompt")
    parser.add_argument("--extra-key", metavar="KEY", help="of these requests")
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    for name, text in _TIMES.items():
        parser.add_argument(_flag(name), type=float, metavar="SECONDS", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")


def add_admin_key(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of the key that SGLang's admin endpoints take."""
    help_ = f"SGLang's, where it has one; or {_ENV_ADMIN_KEY}"
    default = os.environ.get(_ENV_ADMIN_KEY, "")
    parser.add_argument(
        "--admin-api-key", type=key_argument, default=default, metavar="KEY", help=help_
    )


def admin_key_of(chosen: argparse.Namespace) -> str:
    """The key for an admin endpoint: SGLang takes its API key there where it has no other."""
    key: str = chosen.admin_api_key or chosen.api_key
    return key


def _steer(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.server_stats import ServerStatsError, address_of, ask, reason_of

    address, body = address_of(chosen.url, "/hier_kv/steer"), body_of(chosen)
    try:
        answer = ask(address, admin_key_of(chosen), body)
        lines = lines_of(answer)
    except urllib.error.HTTPError as error:
        raise ServerStatsError(f"{address} answers {error.code}: {reason_of(error)}") from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        said = getattr(reason, "strerror", None) or reason
        raise ServerStatsError(f"{address} gives no answer ({said}); is the server up?") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ServerStatsError(f"{address} answers as no server with --enable-hier-kv") from error
    if chosen.json:
        say_json(answer, indent=None)
    else:
        say(*lines)
    return 0


def _check_wishes(chosen: argparse.Namespace) -> None:
    """Refuses wishes of which one undoes another, before anything is read."""
    given = [name for name in (*_FLAGS, *_TIMES) if getattr(chosen, name) not in (None, False)]
    if not given:
        wishes = ", ".join(map(_flag, (*_FLAGS, *_TIMES)))
        raise UsageError(f"nothing is asked for; give one of {wishes}")
    if (found := contradiction(given)) is not None:
        first, both, why = found
        wishes = ", ".join(map(_flag, both))
        raise UsageError(f"{_flag(first)} and {wishes} do not go together: {why}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def lines_of(answer: Any) -> list[str]:
    """What a person reads of the server's answer, a line for each scheduler."""
    from sglang_ext.cli.server_stats import number_of

    lines = []
    for number, done in enumerate(answer["schedulers"]):
        where = f"{done.get('host', 0)} in DRAM, {done.get('disk', 0)} on disk"
        pages = number_of(done.get("pages", 0), "whole page")
        lines.append(f"scheduler {number}: {pages}, {where}{_prefetch_of(done)}")
    return lines


def _prefetch_of(done: Any) -> str:
    """What becomes of a prefetch, where one was asked for; begins with a semicolon."""
    if "prefetching" not in done:
        return ""
    if not done["prefetching"]:
        return "; nothing is brought: too many prompts are on their way already, try again later"
    on_disk = done.get("disk", 0)
    elsewhere = done.get("pages", 0) - done.get("host", 0) - on_disk
    said = "; those on disk are being brought to DRAM" if on_disk else ""
    if elsewhere > 0 and done.get("asking_remote"):
        return f"{said}; the remote store is asked for the other {elsewhere:,}"
    if elsewhere > 0:
        return f"{said}; the other {elsewhere:,} are not stored, and come with the first request"
    return said


def body_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """What the server is asked for.

    Raises:
        UsageError: a time is none, or two wishes cannot both be had.
        ValueError: a file cannot be read as what it should be.
    """
    _check_wishes(chosen)
    body: dict[str, Any]
    path = chosen.ids if chosen.text is None else chosen.text
    try:
        content = sys.stdin.buffer.read() if chosen.text == "-" else Path(path).read_bytes()
        text = content.decode()
        body = {"input_ids": json.loads(text)} if chosen.text is None else {"text": text}
    except (ValueError, RecursionError) as error:
        expected = "a JSON list of token ids" if chosen.text is None else "text in UTF-8"
        raise ValueError(f"{path}: expected {expected} ({error})") from error
    for name in _TIMES:
        if (seconds := getattr(chosen, name)) is not None and not 0 < seconds < math.inf:
            raise UsageError(f"{_flag(name)} must be above 0 s, got {seconds:g}")
    body |= {name: True for name in _FLAGS if getattr(chosen, name)}
    names = ("cache_salt", "extra_key", *_TIMES)
    given = {name: getattr(chosen, name) for name in names}
    return body | {name: value for name, value in given.items() if value is not None}
