"""What is built is released only with an entry in the changelog, and tried with each Python."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name

from sglang_ext import __version__
from testkit.pythons import interpreters, pins, served
from testkit.release import ROOT, ReleaseError, check_changelog, trials


def test_the_newest_entry_is_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    check_changelog(text, __version__)
    with pytest.raises(ReleaseError, match=f"version 9.9.9, it is of {__version__}"):
        check_changelog(text, "9.9.9")
    with pytest.raises(ReleaseError, match="it is of none"):
        check_changelog("# Changelog", "9.9.9")


def test_the_wheel_is_tested_under_the_other_pythons_that_are_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This one is also found on PATH or below pyenv's folder, and runs all tests anyway."""
    this = ".".join(map(str, sys.version_info[:2]))
    one, *rest = [each for each in interpreters.supported() if each != this]
    here = {this: Path("/other/python"), one: Path("/one/python")}
    monkeypatch.setattr(interpreters, "find", here.get)
    built = [Path("a.whl"), Path("a.tar.gz")]
    found = trials(Path("scratch"), built, is_served=True)
    assert [(each.what, each.is_tested) for each in found if each.built == Path("a.whl")] == [
        (f"wheel, Python {version}", version == one)
        for version in interpreters.supported()
        if version in here
    ]
    assert [each.is_tested for each in found if each.built == Path("a.tar.gz")] == [False]
    of_others = {f"wheel, Python {version}" for version in here if version != this}
    assert {each.what for each in found if each.is_served} == of_others & {
        f"wheel, Python {served.VERSION}"
    }
    assert not any(each.is_served for each in trials(Path("scratch"), built, is_served=False))
    said = capsys.readouterr().out.splitlines()
    assert said == 2 * [f"wheel, Python {version}: not on this machine" for version in rest]


def test_a_server_is_tried_under_a_python_that_is_supported() -> None:
    assert served.VERSION in interpreters.supported()
    assert all((ROOT / path).is_file() for path in served.TESTS)


def test_torch_is_taken_as_sglang_pins_it_and_all_else_as_it_is_pinned_here() -> None:
    assert pins.torch_of(["torchaudio==2.11.0", "torch==9.8.7", "torchvision"]) == "9.8.7"
    wanted = served.requirements("9.8.7")
    assert [each for each in wanted if each.startswith(("torch", "triton"))] == ["torch==9.8.7"]
    pinned = {name: version for name, version in map(pin_of, pins.constraints()) if version}
    of_others = [pin_of(each) for each in wanted if not each.startswith("torch")]
    assert [(name, pinned[name]) for name, _ in of_others] == of_others


def pin_of(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return canonicalize_name(name), version


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    """`setup.py`, of which nothing is run."""
    spec = importlib.util.spec_from_file_location("hier_kv_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_into_the_tree_lead_to_the_repository_where_it_has_an_address(
    setup: ModuleType,
) -> None:
    text = "[a](docs/a.md#b), [s](https://s) and [here](#b)\n![d](docs/d.png)\n"
    assert setup.description(text, "https://host/us/it", "1.2") == (
        "[a](https://host/us/it/blob/v1.2/docs/a.md#b), [s](https://s) and [here](#b)\n"
        "![d](https://host/us/it/raw/v1.2/docs/d.png)\n"
    )
    assert setup.description(text, "", "1.2") == "a, [s](https://s) and [here](#b)\n\n"


def test_the_description_on_pypi_has_no_link_that_leads_nowhere(setup: ModuleType) -> None:
    text = setup.published_description()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.splitlines()[0] == readme.splitlines()[0]
    assert len(re.findall(r"\]\((?!https?:|#)", readme)) > 30
    assert re.findall(r"\]\((?!https?:|#)", text) == []
