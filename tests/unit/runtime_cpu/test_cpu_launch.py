"""What the CPU launcher adds to a server's command line and environment, and what it leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from runtime_cpu import launch


def _value(args: list[str], option: str) -> str:
    return args[args.index(option) + 1]


def test_defaults_come_before_the_given_arguments() -> None:
    given = ["--model-path", "m", "--port", "1"]
    args = launch.arguments(given)
    assert args[-len(given) :] == given
    assert {name: _value(args, name) for name in launch.DEFAULT_OPTIONS} == launch.DEFAULT_OPTIONS
    assert _value(args, "--max-total-tokens") == launch.DEFAULT_MAX_TOTAL_TOKENS


@pytest.mark.parametrize("given", [["--dtype", "float32"], ["--dtype=float32"]])
def test_a_given_option_is_not_overridden(given: list[str]) -> None:
    args = launch.arguments(given)
    assert sum(arg.startswith("--dtype") for arg in args) == 1


@pytest.mark.parametrize("given", [["--max-total-tokens", "64"], ["--mem-fraction-static=0.1"]])
def test_a_given_pool_size_is_kept(given: list[str]) -> None:
    args = launch.arguments(given)
    sized = [arg for arg in args if arg.startswith(("--max-total-tokens", "--mem-fraction-static"))]
    assert sized == [given[0]]


def test_an_option_of_the_config_file_is_not_overridden(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("dtype: float16\nmax_total_tokens: 64\n")
    for given in (["--config", str(config)], [f"--config={config}"]):
        args = launch.arguments(given)
        assert "--dtype" not in args
        assert "--max-total-tokens" not in args
        assert "--device" in args


def test_an_unreadable_config_file_is_left_to_sglang(tmp_path: Path) -> None:
    assert "--dtype" in launch.arguments(["--config", str(tmp_path / "absent.yaml")])


def test_the_environment_keeps_what_the_caller_set() -> None:
    env = launch.environment({"OMP_NUM_THREADS": "2", "PYTHONPATH": "/a", "HOME": "/h"})
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["HOME"] == "/h"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["PYTHONPATH"].split(os.pathsep) == [str(launch.STUBS), str(launch.PLUGINS), "/a"]
    assert launch.environment(env) == env


def test_each_environment_and_each_release_has_extensions_of_its_own() -> None:
    """What two of them build in the same folder is the same file."""
    own = launch.environment({})[launch.EXTENSIONS_VARIABLE]
    assert own == launch.extensions_folder()
    assert own.startswith(sys.prefix)
    assert launch.extensions_folder("0.5.22") not in (own, launch.extensions_folder("0.5.21"))
    assert (
        launch.environment({launch.EXTENSIONS_VARIABLE: "/e"})[launch.EXTENSIONS_VARIABLE] == "/e"
    )


def test_the_command_starts_the_unmodified_server() -> None:
    assert launch.command(["--x"])[:3] == [sys.executable, "-m", "sglang.launch_server"]
