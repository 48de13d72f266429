"""Refusals of modes that were run with some of SGLang's arguments only: rows, and their words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.model_kinds import may_move

NEWEST_RELEASE = "SGLang 0.5.23"
_OLDER_RELEASE = "0.5.22"


def older_release(release: str) -> str:
    """The release where it is the one before the newest tested one, with which less was run; or "".

    Args:
        release: of SGLang; empty where it is not known.
    """
    return release if release.startswith(_OLDER_RELEASE) else ""


def on(value: Any) -> str:
    """The words for a switch that came on and should be off; "" where it is off."""
    return "it" if value else ""


def has_attention_dp(read: Callable[[str], Any]) -> bool:
    """Whether data parallel attention is asked for, by its name or by its older one.

    Args:
        read: an argument's value by its name.
    """
    return (read("attn_dp_size") or 1) > 1 or bool(read("enable_dp_attention"))


def adapters_and_sessions(read: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """What is expected and what came, where a request's KV may follow from its tokens alone.

    Args:
        read: an argument's value by its name.
    """
    yield "no --enable-lora", on(read("enable_lora") or read("lora_paths"))
    yield "no --enable-streaming-session", on(read("enable_streaming_session"))
    yield "no --enable-session-radix-cache", on(read("enable_session_radix_cache"))


def of_match(read: Callable[[str], Any], config: HierKVConfig, kind: str) -> tuple[str, str]:
    """What is expected, and what came, where text found by content could not be moved.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
        kind: the model's, of `MODEL_KINDS`.
    """
    moves = config.truncation in ("off", "overflow") or may_move(kind, read("tp_size") or 1)
    return "--hier-kv-truncation overflow or off", "" if moves else config.truncation


def outside(rows: Iterable[tuple[str, Any]], mode: str) -> Iterator[tuple[str, str]]:
    """The rows whose argument has another value than the mode allows.

    Args:
        rows: the flag with the value that is allowed, and the value that came ("" if it is fine).
            Text in brackets behind the flag is for the message only.
        mode: what the message says the mode is, for example "with several pipeline stages".
    """
    for expected, value in rows:
        wanted = expected.partition(" (")[0]
        if value and not wanted.endswith(f" {value}"):
            yield f"{expected} {mode}", f"{value}"
