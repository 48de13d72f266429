"""The documents' words about what is refused, row by row, and what the code says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.refusals import Resolved, check_resolved
from tests.unit.settings.documented_disaggregation import OF_DISAGGREGATION
from tests.unit.settings.documented_parallel import OF_RANKS, SERVED_UNTRIED
from tests.unit.settings.documented_refusals import (
    BY_DRAFT,
    BY_MODE,
    FACTS,
    OF_SPECULATION,
    Phrase,
    Row,
    SetUp,
    changed,
)

DOCS = Path(__file__).resolve().parents[3] / "docs"
_SPLIT = "prefill and decode servers: "
_RANKS = "ranks: "
ROWS = {
    **BY_MODE,
    **OF_SPECULATION,
    **BY_DRAFT,
    **{_SPLIT + name: row for name, row in OF_DISAGGREGATION.items()},
    **{_RANKS + name: row for name, row in OF_RANKS.items()},
}
_REFUSED = "**Refused at start**, each with one sentence:"
_ENDS = "Why:"
PHRASES = [(row, phrase) for row in ROWS.values() for phrase in row.phrases]


def _part(after: str, before: str, page: str = "compatibility.md") -> str:
    """The text between two lines that stand once."""
    _, part = (DOCS / page).read_text().split(f"\n{after}\n")
    return part.split(f"\n{before}\n")[0]


def _table(text: str) -> dict[str, str]:
    """The second cells of a table by the first."""
    cells = re.findall(r"^\| (.*?) \| (.*) \|$", text, flags=re.MULTILINE)
    return {first: second for first, second in cells if second != "refused"}


def _bullets(text: str) -> list[str]:
    return [" ".join(each.split()) for each in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def _documented() -> dict[str, str]:
    """What each row says; of a bullet its name is as much of it as is known here."""
    tables = _table(_part("Besides, by what they are given with:", "### Speculation"))
    tables |= _table(_part("By what drafts:", "## Arguments without"))
    speculation = _part("### Speculation", "By what drafts:").partition("\n\n- ")[2]
    tables |= _named(_bullets(f"- {speculation}"), OF_SPECULATION)
    split = _part("## What is refused", "Later in the start:", "disaggregation.md")
    rows = _table(split) | _named(_bullets(split), OF_DISAGGREGATION)
    tables |= {_SPLIT + name: says for name, says in rows.items()}
    ranks = _table(_part(_REFUSED, _ENDS, "parallel.md"))
    return tables | {_RANKS + name: says for name, says in ranks.items()}


def _named(bullets: list[str], rows: Mapping[str, Row]) -> dict[str, str]:
    """Bullets by the row that each begins with; one that nobody knows by itself."""
    names = [[name for name in rows if bullet.startswith(name)] for bullet in bullets]
    return {
        found[0] if found else bullet: bullet for found, bullet in zip(names, bullets, strict=True)
    }


def _answer(set_up: SetUp, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a set-up is refused; empty where it is served."""
    values = {name: value for name, value in set_up.items() if name not in FACTS}
    resolved = Resolved(
        values, values, dict.fromkeys(values), set_up["kind"], set_up.get("release", "0.5.23"),
        set_up["architecture"], rows=set_up.get("rows", ("", "")), draft=set_up.get("draft", ""),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        for name, value in set_up.get("variables", {}).items():
            patch.setenv(name, value)
        try:
            check_resolved(resolved, HierKVConfig(**set_up.get("config", {})))
        except HierKVConfigError as error:
            return str(error)
    return ""


def test_each_row_of_the_page_is_asked_about() -> None:
    assert sorted(_documented()) == sorted(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_each_part_of_a_row_is_asked_about(name: str) -> None:
    """Where a row names another page, that has the list."""
    says, phrases = _documented()[name], [phrase.text for phrase in ROWS[name].phrases]
    if not phrases:
        assert re.search(r"\]\(.*#.*\)", says)
        return
    for text in phrases:
        assert text in says
    for clause in says.split("; "):
        assert any(text in clause for text in phrases), f"nobody asks about: {clause}"
    for text in phrases:
        says = says.replace(text, "")
    assert re.findall(r"`[^`]*`", re.sub(r"\(.*?\)", "", says)) == [], "nobody asks about these"


@pytest.mark.parametrize(
    ("row", "phrase"), PHRASES, ids=[phrase.text[:60] for _, phrase in PHRASES]
)
def test_what_the_page_says_is_refused_is_refused_and_its_exceptions_are_served(
    row: Row, phrase: Phrase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert phrase.refused or phrase.late
    for before in phrase.on or row.on:
        assert _answer(before, monkeypatch) == ""
        for after in phrase.refused:
            refused = changed(before, after)
            assert _answer(refused, monkeypatch), f"is served: {refused}"
    for served in phrase.served:
        assert _answer(served, monkeypatch) == "", f"is refused: {served}"
    for refuse in phrase.late:
        with pytest.raises(HierKVConfigError):
            refuse()


def test_what_the_page_of_ranks_says_is_served_but_was_not_tried_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after, before = "**Served but not tried, or not run:**", "## When something is wrong"
    rows = re.findall(r"^\| (.*?) \| .* \|$", _part(after, before, "parallel.md"), re.MULTILINE)
    assert rows == ["subject", *SERVED_UNTRIED]
    for set_up in (each for set_ups in SERVED_UNTRIED.values() for each in set_ups):
        assert _answer(set_up, monkeypatch) == "", f"is refused: {set_up}"
