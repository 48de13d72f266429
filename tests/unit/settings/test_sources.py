"""Where settings come from: flags, SGLang's YAML file, the environment, keyword arguments."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.flags import (
    ENV_CONFIG,
    add_flags,
    config_from_namespace,
    split_engine_kwargs,
)

BELOW = {"host_size": 2, "disk_dir": "/kv", "key_file": "/etc/hier-kv.key"}


def parsed(*argv: str) -> HierKVConfig | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return config_from_namespace(parser.parse_args(argv))


def of_flags() -> HierKVConfig | None:
    return parsed("--enable-hier-kv", "--hier-kv-host-size", "3")


def of_flags_without_the_switch() -> HierKVConfig | None:
    return parsed("--hier-kv-host-size", "3")


def of_keywords() -> HierKVConfig | None:
    return split_engine_kwargs({"enable_hier_kv": True, "hier_kv_host_size": 3})[0]


@pytest.mark.parametrize("given", [of_flags, of_flags_without_the_switch, of_keywords])
def test_what_is_given_wins_over_the_environment_and_leaves_the_rest_of_it(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that the environment names protects the disk, whatever else is on the command line."""
    monkeypatch.setenv(ENV_CONFIG, json.dumps(BELOW))
    assert given() == HierKVConfig(host_size=3.0, disk_dir="/kv", key_file="/etc/hier-kv.key")


@pytest.mark.parametrize("argv", [[], ["--enable-hier-kv"]])
def test_the_environment_turns_it_on_alone_or_beside_the_switch(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CONFIG, json.dumps(BELOW))
    assert parsed(*argv) == HierKVConfig(host_size=2.0, disk_dir="/kv", key_file="/etc/hier-kv.key")


@pytest.mark.parametrize("text", ["{", '{"hostsize": 1}', "[]"])
def test_a_wrong_environment_is_refused_beside_flags_too(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CONFIG, text)
    with pytest.raises(HierKVConfigError):
        of_flags()


def test_without_the_switch_and_the_environment_it_is_off_and_a_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)
    assert parsed() is None
    with pytest.raises(HierKVConfigError, match=r"--hier-kv-host-size was given without --enable"):
        of_flags_without_the_switch()
    with pytest.raises(HierKVConfigError, match=r"hier_kv_rope was given without enable_hier_kv=T"):
        split_engine_kwargs({"hier_kv_rope": "pre"})


@pytest.mark.parametrize(
    ("name", "yaml", "meant"),
    [
        ("lookahead", "false", "off"),
        ("lookahead", "true", "on"),
        ("truncation", "false", "off"),
        ("truncation", "False", "off"),
    ],
)
def test_a_bare_off_or_on_of_yaml_is_what_it_says(name: str, yaml: str, meant: str) -> None:
    """YAML reads `off` as false, and SGLang hands that on as a word."""
    found = parsed("--enable-hier-kv", f"--hier-kv-{name}", yaml)
    assert getattr(found, name) == meant


def test_a_truth_value_where_there_is_no_off_stays_wrong() -> None:
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'false'"):
        parsed("--enable-hier-kv", "--hier-kv-rope", "false")


@pytest.mark.parametrize("name", ["disk-dir", "event-log", "key-file", "profile"])
@pytest.mark.parametrize(
    ("path", "said"), [("~/kv", "begins with ~"), ("~", "begins with ~"), ("None", "is None,")]
)
def test_a_path_that_nobody_means_is_refused(name: str, path: str, said: str) -> None:
    with pytest.raises(HierKVConfigError, match=f"--hier-kv-{name} {said}"):
        parsed("--enable-hier-kv", f"--hier-kv-{name}={path}")


def test_a_level_of_a_tier_that_is_not_coded_is_refused() -> None:
    flags = ["--enable-hier-kv", "--hier-kv-disk-dir", "/kv", "--hier-kv-codec", "hier"]
    with pytest.raises(HierKVConfigError, match=r"--hier-kv-level host= has no effect without"):
        parsed(*flags, "--hier-kv-level", "host=3")
    found = parsed(*flags, "--hier-kv-level", "disk=3")
    assert found is not None
    assert found.record_level == "3"
