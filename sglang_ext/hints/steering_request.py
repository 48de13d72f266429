"""What an operator, a gateway or a router wants done with the stored pages of a prompt.

Pure. SGLang's front process reads it from a request's body and writes it as text for the
schedulers, each of which reads it again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sglang_ext.hints.request_hints import HINT_NAMES, RequestHints, parse_hints

_ACTIONS = ("locate", "prefetch", "demote", "unpin")
_WISHES = (*_ACTIONS, *HINT_NAMES)
# Wishes that do not go with others (with any where there is none), and what to do instead.
_APART: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("locate", (), "it says where the pages lie and does nothing; leave one of them out"),
    (
        "unpin",
        ("pin_s",),
        "one ends pins and the other makes one; to shorten a pin, end it first, and pin then",
    ),
    ("demote", ("prefetch",), "one brings the pages to DRAM and the other lets them leave first"),
    ("demote", ("pin_s",), "pinned pages are not demoted; leave one of them out"),
    (
        "ends",
        ("prefetch", "pin_s", "ttl_s", "returns_in_s"),
        "of a conversation that is over nothing is needed again; leave one of them out",
    ),
)
_TENANT = ("cache_salt", "extra_key")
MAX_TENANT_BYTES = 4096
_MAX_TOKEN_ID = (1 << 31) - 1  # a scheduler takes no larger ones


@dataclass(frozen=True)
class Steering:
    """What is to be done with a prompt's pages.

    Attributes:
        cache_salt: of the requests that the prompt is one of; None for none.
        extra_key: of these requests.
        locate: only where they lie is to be said, which it always is.
        prefetch: to bring them to DRAM.
        demote: to let them leave DRAM first.
        unpin: to end their pins, before anything else.
        hints: what is said of their conversation; None: nothing.
    """

    cache_salt: str | None = None
    extra_key: str | None = None
    locate: bool = False
    prefetch: bool = False
    demote: bool = False
    unpin: bool = False
    hints: RequestHints | None = None


def contradiction(given: Collection[str]) -> tuple[str, list[str], str] | None:
    """A wish of which one that is given, too, undoes the other; None where there is none.

    Args:
        given: names of what is asked for.

    Returns:
        The wish, those that it does not go with, and why.
    """
    for first, others, why in _APART:
        both = [name for name in given if name in (others or _WISHES) and name != first]
        if first in given and both:
            return first, both, why
    return None


def parse_body(body: Any) -> tuple[Steering, str | list[int]]:
    """What a request's body asks for, and the prompt: a text, or token ids.

    Raises:
        ValueError: it asks for nothing, or for what cannot be.
    """
    names = ("text", "input_ids", *_TENANT, *_WISHES)
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object with some of {', '.join(names)}.")
    unknown = [name for name in body if name not in names]
    if unknown:
        raise ValueError(f"expected some of {', '.join(names)}, got {unknown[0][:80]!r}.")
    tenant: dict[str, Any] = {name: _text_of(body, name) for name in _TENANT}
    actions: dict[str, Any] = {name: _flag_of(body, name) for name in _ACTIONS}
    hints = parse_hints({name: body[name] for name in HINT_NAMES if name in body}, "the body")
    wishes = [name for name in _WISHES if actions.get(name) or getattr(hints, name, None)]
    if (found := contradiction(wishes)) is not None:
        first, both, why = found
        raise ValueError(f"expected {first} or {', '.join(both)}, got both: {why}.")
    if hints is None and not any(actions.values()):
        raise ValueError(f"expected something to do: {', '.join(_WISHES)}.")
    return Steering(**tenant, **actions, hints=hints), _prompt_of(body)


def to_text(steering: Steering, token_ids: list[int]) -> str:
    """What is to be done, and the prompt, for a scheduler."""
    return json.dumps([asdict(steering), token_ids], separators=(",", ":"))


def from_text(text: str) -> tuple[Steering, list[int]]:
    """What `to_text` was given."""
    fields, token_ids = json.loads(text)
    hints = fields.pop("hints")
    return Steering(**fields, hints=None if hints is None else RequestHints(**hints)), token_ids


def _prompt_of(body: dict[str, Any]) -> str | list[int]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("expected text or input_ids, one of the two.")
    if ids is None:
        if not text or _num_bytes(text) is None:
            raise ValueError("text must be a text that is not empty.")
        return str(text)
    if not isinstance(ids, list) or not all(
        type(each) is int and 0 <= each <= _MAX_TOKEN_ID for each in ids
    ):
        raise ValueError("input_ids must be a list of token ids.")
    return ids


def _text_of(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    num_bytes = _num_bytes(value)
    if num_bytes is None or num_bytes > MAX_TENANT_BYTES:
        raise ValueError(f"{name} must be a text of at most {MAX_TENANT_BYTES} bytes.")
    return value or None


def _num_bytes(value: Any) -> int | None:
    """Size of a text; None for what is none, as half a surrogate pair, which JSON may hold."""
    try:
        return len(value.encode()) if isinstance(value, str) else None
    except UnicodeEncodeError:
        return None


def _flag_of(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false.")
    return value
