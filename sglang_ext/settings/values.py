"""A setting's value as it was given: its flag's name, its type, and how messages show it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from sglang_ext.errors import HierKVConfigError

_SHOWN_CHARS = 60


def flag_name(field_name: str) -> str:
    """The command line flag of a field: ``host_size`` -> ``--hier-kv-host-size``."""
    return "--hier-kv-" + field_name.replace("_", "-")


KINDS = {float: "a number", int: "a whole number", str: "a string"}
"""The types that settings have, as messages call them."""


YES, NO = ("true", "1", "yes", "y"), ("false", "0", "no", "n")
"""What a switch of the environment may be, in small letters, as SGLang reads it."""


def is_set(variable: str) -> bool:
    """Whether a switch of the environment is on, as SGLang reads it."""
    return os.environ.get(variable, "").lower() in YES


ALLOW_UNTESTED = "SGLANG_HIER_KV_ALLOW_UNTESTED"
"""The switch of the environment that lets untested code and unknown arguments of SGLang run."""


def shown(value: object) -> str:
    """What was given, for a message."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of very many digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def coerce(name: str, value: Any, kind: type) -> Any:
    """A value as the type of its field.

    Raises:
        HierKVConfigError: it is of another type.
    """
    if kind is str and isinstance(value, str):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    # A URL that is no text may hold a password all the same.
    is_plain = isinstance(value, (str, int, float))
    got = shown(value) if is_plain else f"a {type(value).__name__}"
    raise HierKVConfigError(f"{flag_name(name)} must be {KINDS[kind]}, got {got}.")


def check_path(name: str, path: str) -> None:
    """Refuses what would become a file or a folder of that name below the working directory.

    Raises:
        HierKVConfigError: it begins with ``~``, which no shell replaced (none does behind ``=``,
            and neither YAML nor systemd knows it), or is how SGLang reads an empty value of YAML.
    """
    if path.startswith("~"):
        raise HierKVConfigError(
            f"{flag_name(name)} begins with ~, which no shell has replaced, got {shown(path)}; "
            "give the whole path."
        )
    if path == "None":
        raise HierKVConfigError(
            f"{flag_name(name)} is None, which is how an empty value of YAML is read; leave it "
            "out, or give ./None if that is meant."
        )


def values_in_json(text: str) -> dict[str, Any]:
    """The names and values in ``SGLANG_HIER_KV_CONFIG``, not looked at yet.

    Raises:
        HierKVConfigError: it is no JSON object.
    """
    expected = "SGLANG_HIER_KV_CONFIG must be a JSON object of settings"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        # The message does not quote the text: it may hold secrets, and messages are logged.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise HierKVConfigError(f"{expected}, and cannot be read as one ({reason}).") from None
    if not isinstance(values, dict):
        raise HierKVConfigError(f"{expected}, got a {type(values).__name__}.")
    return values
