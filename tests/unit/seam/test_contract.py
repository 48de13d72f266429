"""The contract with SGLang: a release that does not keep to it is refused by the name it breaks."""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime_cpu import inprocess
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract import record as record_module
from sglang_ext.seam.contract import verdict as verdict_module
from sglang_ext.seam.contract.source import ContractError, SGLangSource, Shape
from sglang_ext.seam.contract.symbols import SYMBOLS, Symbol, Use
from sglang_ext.seam.contract.verdict import (
    ContractReport,
    check_contract,
    examine,
    installed,
    record,
    reference_releases,
)
from sglang_ext.seam.hooks import hooking
from testkit.releases.wheels import wheel_of
from testkit.sglang_copy import TWENTY, SglangCopy

ROOT = Path(__file__).resolve().parents[3]
UNTESTED = "0.6.0"


def named(name: str) -> Symbol:
    return next(symbol for symbol in SYMBOLS if symbol.name == name)


def look(copy: SglangCopy) -> ContractReport:
    return examine(SGLangSource(copy.folder))


def test_the_installed_release_is_as_it_was_tested() -> None:
    source = installed()
    assert examine(source).is_tested
    tested = reference_releases()[source.version]
    assert record([source])[source.version] == json.loads(json.dumps(tested))


@pytest.mark.parametrize("symbol", TWENTY, ids=lambda symbol: symbol.name)
def test_a_name_that_is_gone_is_refused_by_name(tmp_path: Path, symbol: Symbol) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    copy.rename(symbol)
    refusal = look(copy).refusal(allow_untested=True)
    assert f"of SGLang {UNTESTED} {symbol} is missing; install sglang==0.5.23" in refusal


def test_twenty_names_of_every_use_are_broken_in_turn() -> None:
    assert len(set(TWENTY)) == 20
    assert {symbol.use for symbol in TWENTY} == {Use.HOOKED, Use.FOLLOWED, Use.CALLED}


@pytest.mark.parametrize(
    "name", ["Scheduler.run_batch", "UnifiedRadixCache.match_prefix", "get_storage_hash_str"]
)
def test_another_parameter_is_refused(tmp_path: Path, name: str) -> None:
    copy = SglangCopy(tmp_path)
    copy.add_parameter(named(name))
    refusal = look(copy).refusal(allow_untested=True)
    assert f"{named(name)} takes other parameters (new: hurry); install" in refusal


@pytest.mark.parametrize(
    ("found", "expected", "told"),
    [
        ("", "(a)", "is not a function"),
        ("(a, *, b=)", "(a, *, b=, c)", "(missing: c)"),
        ("(a, d, e=, f, g)", "(a, *b, **c)", "(missing: b, c; new: d, e, f and 1 more)"),
        ("classmethod (a)", "(a)", "(classmethod instead of plain)"),
        ("(a, b=)", "async (a)", "(new: b; plain instead of async)"),
        ("(a, c, b)", "(a, b, c)", "(in another place or with another default: c, b)"),
        ("(a, b)", "(a, b=)", "(in another place or with another default: b)"),
        ("(a, *, b)", "(a, b)", "(in another place or with another default: *, b)"),
        ("()", "(a)", "(missing: a)"),
    ],
)  # fmt: skip
def test_what_differs_of_a_signature_is_told_in_few_words(
    found: str, expected: str, told: str
) -> None:
    text = Shape(found, "").against(Shape(expected, ""))
    assert text == told or text == f"takes other parameters {told}"


def test_however_much_is_broken_it_is_one_short_sentence(tmp_path: Path) -> None:
    """Of three names, one of them with all of its 60 parameters: where they are was a page."""
    copy = SglangCopy(tmp_path, UNTESTED)
    for name in ("Scheduler.run_batch", "Req.__init__", "UnifiedRadixCache.match_prefix"):
        copy.add_parameter(named(name))
    three = look(copy).refusal(allow_untested=True)
    assert three.count("(new: hurry)") == 3
    assert "doctor" not in three
    for name in ("get_storage_hash_str", "UnifiedRadixCache.is_root"):
        copy.add_parameter(named(name))
    report = look(copy)
    assert "and 2 more (`hier-kv doctor` lists them)" in report.refusal(allow_untested=True)
    assert "and 2 more (below)" in report.refusal(allow_untested=True, others="below")
    assert len(report.refusal(allow_untested=True)) < 700


def test_other_code_in_what_is_overridden_runs_only_when_told_so(tmp_path: Path) -> None:
    copy, symbol = SglangCopy(tmp_path, UNTESTED), named("UnifiedRadixCache.checkpoint")
    copy.add_statement(symbol)
    found = look(copy)
    assert f"of SGLang 0.6.0 {symbol} differ" in found.refusal(allow_untested=False)
    assert found.refusal(allow_untested=True) == ""
    assert str(symbol) in found.warning()


@pytest.mark.parametrize("name", ["Scheduler.run_batch", "Scheduler.flush_cache"])
def test_other_code_in_what_is_hooked_runs_and_is_told(tmp_path: Path, name: str) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    copy.add_statement(named(name))
    found = look(copy)
    assert found.refusal(allow_untested=False) == ""
    assert str(named(name)) in found.warning()
    assert "0.6.0 was not tested" in found.warning()


def test_other_code_in_what_is_called_runs_and_is_told(tmp_path: Path) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    symbol = next(one for one in TWENTY if one.use is Use.CALLED)
    copy.add_statement(symbol)
    found = look(copy)
    assert found.refusal(allow_untested=False) == ""
    assert [one.symbol for one in found.called] == [symbol]
    assert f"{symbol} differ" in found.warning()


def test_a_release_of_which_nothing_that_is_used_differs_runs_and_is_told(tmp_path: Path) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    for name in ("UnifiedRadixCache.checkpoint", "Scheduler.run_batch"):
        copy.add_comments(named(name))
    found = look(copy)
    assert found.refusal(allow_untested=False) == ""
    assert f"all {len(SYMBOLS)} names are as tested" in found.warning()


def test_a_tested_release_that_somebody_changed_is_not_taken_for_it(tmp_path: Path) -> None:
    copy = SglangCopy(tmp_path)
    assert look(copy).is_tested
    copy.add_statement(named("UnifiedCacheLinkerWrapper.match"))
    assert not look(copy).is_tested
    assert "UnifiedCacheLinkerWrapper.match differ" in look(copy).refusal(allow_untested=False)


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    copy.rename(named("Scheduler.run_batch"))
    wheel = tmp_path / "sglang-0.6.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in copy.folder.rglob("*.py"):
            archive.write(path, path.relative_to(tmp_path))
    found = examine(SGLangSource(wheel))
    assert [str(one.symbol) for one in found.broken] == [str(named("Scheduler.run_batch"))]
    with pytest.raises(ContractError, match=r"expected at .*nothing, found nothing; download one"):
        SGLangSource(tmp_path / "nothing")
    wheel.write_bytes(wheel.read_bytes()[:1000])
    with pytest.raises(ContractError, match=r"\.whl, found another file; download it again"):
        SGLangSource(wheel)
    with pytest.raises(ContractError, match="an SGLang package with its source was expected"):
        SGLangSource(tmp_path / "sglang" / "srt" / "utils")


def test_the_check_at_start_refuses_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_contract()  # of the installed one
    assert not caplog.records
    copy = SglangCopy(tmp_path, UNTESTED)
    monkeypatch.setattr(verdict_module, "installed", lambda: SGLangSource(copy.folder))
    with caplog.at_level(logging.WARNING):
        check_contract()
    assert "SGLang 0.6.0 was not tested" in caplog.text
    copy.rename(named("Scheduler.handle_generate_request"))
    monkeypatch.setenv("SGLANG_HIER_KV_ALLOW_UNTESTED", "1")
    with pytest.raises(HierKVConfigError, match=r"Scheduler\.handle_generate_request is missing"):
        check_contract()


def test_the_variable_that_the_docs_name_lets_untested_code_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = "SGLANG_HIER_KV_ALLOW_UNTESTED"
    assert variable in (ROOT / "docs" / "upgrading.md").read_text()
    copy, symbol = SglangCopy(tmp_path, UNTESTED), named("UnifiedRadixCache.checkpoint")
    copy.add_statement(symbol)
    monkeypatch.setattr(verdict_module, "installed", lambda: SGLangSource(copy.folder))
    with pytest.raises(HierKVConfigError, match=f"or set {variable}=1 to run untested"):
        check_contract()
    monkeypatch.setenv(variable, "True")  # each word that SGLang takes for yes
    with caplog.at_level(logging.WARNING):
        check_contract()
    assert str(symbol) in caplog.text


@pytest.mark.parametrize(
    ("version", "reference"),
    [
        ("0.5.21", "0.5.23"),
        ("0.5.22", "0.5.22"),
        ("0.5.22.post1", "0.5.22"),
        ("0.5.24", "0.5.23"),
        ("unknown", "0.5.23"),
    ],
)
def test_a_release_is_compared_with_the_tested_one_before_it(
    tmp_path: Path, version: str, reference: str
) -> None:
    source = SGLangSource(SglangCopy(tmp_path, version).folder)
    assert examine(source, symbols=()).reference == reference


def test_an_sglang_without_its_source_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = SglangCopy(tmp_path, UNTESTED)
    for path in copy.folder.rglob("*.py"):  # what `compileall -b` and a clean-up leave
        path.rename(path.with_suffix(".pyc"))
    monkeypatch.setattr(verdict_module, "installed", lambda: SGLangSource(copy.folder))
    monkeypatch.setenv("SGLANG_HIER_KV_ALLOW_UNTESTED", "1")
    with pytest.raises(HierKVConfigError, match=r"with its source was expected at .*; install"):
        check_contract()


# ---- a release is taken up (docs/upgrading.md) ----


@pytest.fixture
def run_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What `python -m sglang_ext.seam.contract.record PLACES` ends with; it writes another file."""
    assert Path(verdict_module.__file__).with_name("tested.json") == verdict_module.TESTED_FILE
    for module in (record_module, verdict_module):
        monkeypatch.setattr(module, "TESTED_FILE", tmp_path / "tested.json")

    def run(*places: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["record", *map(str, places)])
        said: int | str | None = ""
        try:
            record_module.main()
        except SystemExit as refused:
            said = refused.code
        assert isinstance(said, str)  # Python prints it and ends with 1
        assert capsys.readouterr() == ("", "")
        return said

    return run


def test_record_writes_the_releases_that_it_is_given(
    tmp_path: Path, run_record: Callable[..., str]
) -> None:
    old, new = (SglangCopy(tmp_path / version, version) for version in ("0.5.99", UNTESTED))
    new.add_statement(named("UnifiedRadixCache.checkpoint"))
    new.add_parameter(named("Scheduler.run_batch"))
    assert run_record(old.folder, new.folder) == ""
    releases = reference_releases()
    assert list(releases) == ["0.5.99", UNTESTED]
    before, after = (releases[version]["names"] for version in releases)
    assert set(before) == set(after) == {str(symbol) for symbol in SYMBOLS}
    changed = {name for name in before if before[name] != after[name]}
    expected = ("UnifiedRadixCache.checkpoint", "Scheduler.run_batch")
    assert changed == {str(named(name)) for name in expected}
    # A release that lacks a name cannot be recorded, and what was there stays.
    new.rename(named("Scheduler.flush_cache"))
    said = run_record(new.folder)
    assert said.splitlines()[0] == f"SGLang 0.6.0 lacks {named('Scheduler.flush_cache')}."
    assert reference_releases() == releases


def test_every_pin_is_of_a_release_that_was_tested() -> None:
    older, newest = reference_releases()
    expected = {
        "pyproject.toml": f'sglang = ["sglang>={older},<={newest}"]',
        "Makefile": f"SGLANG := sglang=={newest}\n",
        "deploy/Dockerfile": f"ARG SGLANG_VERSION={newest}\n",
        "tests/e2e/releases/test_previous_release.py": f'RELEASE = "{older}"\n',
        "README.md": f"sglang {newest} or {older}",
        "docs/quickstart.md": f"SGLang {newest} or {older}",
        "docs/upgrading.md": (
            f"| {newest} | tested: in CI all that `make test` runs, the long forms by hand |\n"
            f"| {older} | tested in part"
        ),
    }
    texts = {path: (ROOT / path).read_text() for path in expected}
    assert [path for path, text in expected.items() if text not in texts[path]] == []
    [releases] = re.findall(r"^RELEASES := (.*)$", texts["Makefile"], re.MULTILINE)
    assert releases.split()[-2:] == [older, newest]


# ---- the list is all that the code uses ----


def own_files() -> Iterator[Path]:
    skipped = {"kernels", "tiers"}
    for path in (ROOT / "sglang_ext").rglob("*.py"):
        if not skipped & set(path.relative_to(ROOT / "sglang_ext").parts[:1]):
            yield path


def test_every_import_of_sglang_is_in_the_list() -> None:
    known = {str(symbol) for symbol in SYMBOLS}
    modules = {f"sglang.{symbol.module}" for symbol in SYMBOLS}
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    covered = name in modules or any(
                        one == name or one.startswith(f"{name}.") for one in known
                    )
                    assert covered, f"{path.relative_to(ROOT)}: {name}"


def test_every_override_is_in_the_list_as_one() -> None:
    inprocess.prepare()
    from sglang_ext.seam.cache import HierKVRadixCache
    from sglang_ext.seam.linker import HierKVLinker
    from sglang_ext.seam.wrapper import HierKVLinkerWrapper

    followed = {str(symbol) for symbol in SYMBOLS if symbol.use is Use.FOLLOWED}
    overrides = set()
    for own in (HierKVRadixCache, HierKVLinkerWrapper, HierKVLinker):
        bases = [base for base in own.__mro__[1:] if base.__module__.startswith("sglang.")]
        for name, value in vars(own).items():
            if callable(value) and not (name.startswith("__") and name.endswith("__")):
                nearest = next((base for base in bases if name in vars(base)), None)
                if nearest is not None:
                    overrides.add(f"{nearest.__module__}.{nearest.__qualname__}.{name}")
    assert len(overrides) > 30
    assert overrides <= followed, overrides - followed


def test_a_hook_on_another_name_is_refused() -> None:
    with pytest.raises(KeyError, match=r"Scheduler\.get_next_batch_to_run is hooked, and is not"):
        hooking.hook("sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run", print)


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",  # there, and not replaced
        "sglang.srt.managers.no_such_module.Scheduler.run_batch",
    ],
)
def test_a_hook_that_is_not_in_place_ends_the_start(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(hooking, "_before", {})
    monkeypatch.setattr(hooking, "_NAMES", {target})
    monkeypatch.setattr(HookRegistry, "register", lambda *args: None)  # as if it could not apply it
    hooking.check_hooks()
    hooking.hook(target, print)
    with pytest.raises(HierKVConfigError, match="could not be hooked") as refused:
        hooking.check_hooks()
    assert target in str(refused.value)


@pytest.mark.long
def test_the_page_says_how_much_refused_releases_lack() -> None:
    """`make contract` brings their wheels."""
    text = (ROOT / "docs" / "upgrading.md").read_text()
    [told] = re.findall(r"^\| (0\.5\.21), (0\.5\.20) \| refused: (\d+) and (\d+) names", text, re.M)
    for release, number in zip(told[:2], told[2:], strict=True):
        wheel = wheel_of(release)
        if wheel is None:
            pytest.skip(f"no wheel of {release}: make contract")
        assert len(examine(SGLangSource(wheel)).broken) == int(number)
