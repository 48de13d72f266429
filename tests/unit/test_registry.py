"""What other packages bring: found by their entry points, in any process, and never in the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sglang_ext import registry
from sglang_ext.registry import Registry

PACKAGE = '''
"""A codec and a remote store of somebody else's."""

from sglang_ext.codec.none import NoneCodec
from sglang_ext.tiers.policy import BaseOrder
from sglang_ext.tiers.remote.engines import file_engine


class Plain(NoneCodec):
    """Bytes as they are, under a name of its own."""

    codec_id = "plain"


class Newest(BaseOrder):
    """What was used last leaves first."""

    restamps_on_use = True
    youngest_first = True


options = file_engine.options
open_engine = file_engine.open_engine
'''
ENTRY_POINTS = """
[hier_kv.codecs]
plain = their_kv:Plain
none = their_kv:Plain

[hier_kv.remote_engines]
theirs = their_kv

[hier_kv.base_orders]
newest = their_kv:Newest
"""
USE = """
import numpy as np

from sglang_ext.codec import codec_ids, create_codec
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.remote import engine_schemes, open_engine, parse_remote_url

planes = np.arange(2 * 4 * 8, dtype=np.uint16).reshape(2, 4, 8)
codec, back = create_codec("plain", dtype="bf16"), np.zeros_like(planes)
codec.decode(codec.encode(planes), back)
assert (back == planes).all() and type(codec).__module__ == "their_kv"
assert "plain" in codec_ids()
assert type(create_codec("none", dtype="bf16")).__module__ == "sglang_ext.codec.none"
assert "theirs" in engine_schemes()
PolicyConfig(order="newest")
HierKVConfig.from_dict({
    "codec": "remote=plain", "remote_url": "theirs:///tmp", "base_order": "newest", "host_size": 1,
})
print("used")
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as pip leaves it, with a package that brings things."""
    (tmp_path / "their_kv.py").write_text(PACKAGE)
    info = tmp_path / "their_kv-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-kv\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def test_a_package_brings_a_codec_a_store_and_an_order(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "used\n", done.stderr
    assert "none of their-kv is left out: codec 'none' is already registered" in done.stderr


def test_entry_points_are_read_once_and_bad_ones_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def points(group: str) -> list[EntryPoint]:
        calls.append(group)
        return [
            EntryPoint("good", "json:loads", group),
            EntryPoint("BAD", "json:loads", group),
            EntryPoint("gone", "json:no_such_name", group),
        ]

    monkeypatch.setattr(registry, "entry_points", points)
    found = Registry(
        "thing",
        "some.group",
        {"own": "json:dumps"},
        is_id=str.islower,
        id_rule="a thing is lower case",
        error=LookupError,
    )
    assert callable(found.load("own"))
    assert not calls  # what is built in costs no search
    with caplog.at_level(logging.WARNING):
        assert found.ids() == ("gone", "good", "own")
    assert callable(found.load("good"))
    assert calls == ["some.group"]
    assert "BAD of a package is left out: a thing is lower case, got 'BAD'" in caplog.text
    with pytest.raises(LookupError, match="no thing is called 'x'; known are gone, good, own"):
        found.load("x")
    with pytest.raises(LookupError, match="'gone' cannot be imported from json:no_such_name"):
        found.load("gone")
