"""What `pyproject.toml` pins of what a server on a CPU needs, without torch where another is taken.

The CPU build of torch is of one Python; under others it is the one that SGLang pins.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence

from testkit.pythons.interpreters import ROOT

_CHOSEN_BY_TORCH = re.compile(r"(torch|triton)\b(?!-)")
_TORCH = re.compile(r"torch==([\d.]+)")


def extras(*names: str) -> list[str]:
    """Requirements of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [pin for name in names for pin in project["optional-dependencies"][name]]


def constraints() -> list[str]:
    """All that `make dev` installs, without torch."""
    text = (ROOT / "runtime_cpu" / "constraints.txt").read_text(encoding="utf-8")
    return without_torch(text.splitlines())


def without_torch(lines: Sequence[str]) -> list[str]:
    """Requirements but torch, and triton, which comes with it."""
    return [line for line in lines if not _CHOSEN_BY_TORCH.match(line)]


def sglang() -> str:
    """The release of SGLang that `make dev` installs, such as "sglang==0.5.23"."""
    found = re.search(r"^SGLANG := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def torch_of(requirements: Iterable[str] | None) -> str:
    """The version of torch that a release of SGLang pins, such as "2.14.1".

    Args:
        requirements: of its package, as `importlib.metadata` has them.
    """
    [version] = [match[1] for each in requirements or () if (match := _TORCH.match(each))]
    return version
