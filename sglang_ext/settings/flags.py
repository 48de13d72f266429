"""Command line flags and Engine arguments, from the fields of ``HierKVConfig``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.values import KINDS, flag_name, shown

ENV_CONFIG = "SGLANG_HIER_KV_CONFIG"
# What SGLang makes of a bare `on` or `off` in the file of --config.
_TRUTHS = {"true": "on", "True": "on", "false": "off", "False": "off"}
_UNITS = {"GIB": " of GiB", "MS": " of milliseconds"}  # by what the help calls the value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--enable-hier-kv`` and one flag a setting, in a group of their own."""
    group = parser.add_argument_group(
        "hierarchical KV cache",
        "Keeps evicted KV cache in DRAM and on SSD and brings it back before it is needed.",
    )
    group.add_argument(
        "--enable-hier-kv",
        action="store_true",
        help="Turn the hierarchical KV cache on. Without this flag SGLang runs unchanged.",
    )
    for item in fields(HierKVConfig):
        options: dict[str, Any] = {
            "type": _reader(type(item.default), item.metadata["metavar"])
            if not item.metadata["choices"]
            else _chosen(item.metadata["choices"]),
            # Absent unless given: a flag without --enable-hier-kv is refused, whatever its value.
            "default": argparse.SUPPRESS,
            "help": f"{item.metadata['help']} Default: {item.default!r}.".replace("%", "%%"),
        }
        if item.metadata["choices"]:
            options["choices"] = item.metadata["choices"]
        else:
            options["metavar"] = item.metadata["metavar"]
        group.add_argument(flag_name(item.name), **options)


def config_from_namespace(namespace: argparse.Namespace) -> HierKVConfig | None:
    """The settings in a parsed command line, or None when the plugin is off.

    Raises:
        HierKVConfigError: a flag is set to something that cannot work, or is set without
            ``--enable-hier-kv``.
    """
    values = {
        item.name: getattr(namespace, f"hier_kv_{item.name}")
        for item in fields(HierKVConfig)
        if hasattr(namespace, f"hier_kv_{item.name}")
    }
    enabled = getattr(namespace, "enable_hier_kv", False)
    return _settings(enabled, values, flag_name, "--enable-hier-kv")


def split_engine_kwargs(kwargs: dict[str, Any]) -> tuple[HierKVConfig | None, dict[str, Any]]:
    """Takes ``enable_hier_kv`` and ``hier_kv_*`` out of ``sglang.Engine``'s keyword arguments.

    Returns:
        The settings (None when off) and the arguments that are SGLang's own.
    """
    rest = dict(kwargs)
    enabled = bool(rest.pop("enable_hier_kv", False))
    values = {
        name[len("hier_kv_") :]: rest.pop(name)
        for name in list(rest)
        if name.startswith("hier_kv_")
    }
    return _settings(enabled, values, "hier_kv_{}".format, "enable_hier_kv=True"), rest


def _settings(
    enabled: bool, values: dict[str, Any], name_of: Callable[[str], str], switch: str
) -> HierKVConfig | None:
    """What was given, over what ``SGLANG_HIER_KV_CONFIG`` (JSON) says; None when both are off.

    The variable is for launchers that own the command line, and turns the plugin on by itself.

    Args:
        enabled: whether the switch was given.
        values: settings that were given, by field.
        name_of: what a field was called where they were given.
        switch: the same of the switch.
    """
    text = os.environ.get(ENV_CONFIG)
    if text:
        return HierKVConfig.from_json(text, values)
    if enabled:
        return HierKVConfig.from_dict(values)
    if values:
        raise HierKVConfigError(
            f"{name_of(next(iter(values)))} was given without {switch} and would have no effect; "
            f"add {switch} or remove it."
        )
    return None


def _reader(kind: type, metavar: str) -> Callable[[str], Any]:
    """What reads a flag's text as its type, and says of a size with a unit what is wrong."""
    expected = f"{KINDS[kind]}{_UNITS.get(metavar, '')} without a unit"

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{expected} is expected, got {shown(text)}"
            ) from error

    return read


def _chosen(choices: Sequence[str]) -> Callable[[str], str]:
    """What reads one of some words, also where YAML took a bare `on` or `off` for a truth value."""
    words = {word: said for word, said in _TRUTHS.items() if said in choices}

    def read(text: str) -> str:
        return words.get(text, text)

    return read


def engine_args_factory(
    base: Callable[..., Any], attach: Callable[[Any, HierKVConfig], None]
) -> Callable[..., Any]:
    """Wraps ``Engine.server_args_class`` so that it accepts the plugin's arguments."""

    def build(**kwargs: Any) -> Any:
        config, rest = split_engine_kwargs(kwargs)
        server_args = base(**rest)
        if config is not None:
            attach(server_args, config)
        return server_args

    return build
