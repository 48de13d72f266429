"""docs/api.md names what programs may rely on: all of it, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sglang_ext.cli import make_parser
from sglang_ext.hints.request_hints import HINT_NAMES
from sglang_ext.seam.hooks.answers import HEADER

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text()
SOURCES = [
    path.read_text() for name in ("sglang_ext", "tiers") for path in (ROOT / name).rglob("*.py")
]


def named(pattern: str) -> set[str]:
    return set(re.findall(rf"`({pattern})`", TEXT))


def test_every_parameter_of_a_request_is_named() -> None:
    used = {name for text in SOURCES for name in re.findall(r'"(hier_kv_[a-z_]+)"', text)}
    # What is no client's: names within the server, of an Engine's argument, and a prefix of those.
    used -= {"hier_kv_answer", "hier_kv_content", "hier_kv_flight", "hier_kv_stated_max_new_tokens"}
    used -= {"hier_kv_host_size", "hier_kv_"}
    assert named("hier_kv_[a-z]+") == used
    assert set(HINT_NAMES) <= named(r"\w+")


def test_every_command_is_named() -> None:
    [commands] = [
        set(action.choices)
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert named("hier-kv [a-z]+") == {f"hier-kv {name}" for name in commands}


def test_every_group_of_entry_points_is_named() -> None:
    groups = {
        name for text in SOURCES for name in re.findall(r'^    "(hier_kv\.[a-z_]+)",$', text, re.M)
    }
    assert named(r"hier_kv\.[a-z_]+") == groups


def test_the_endpoint_and_the_header_are_named() -> None:
    assert HEADER.decode() in named("[a-z-]+")
    assert '"/hier_kv/steer"' in "\n".join(SOURCES)
    assert "`POST /hier_kv/steer`" in TEXT
