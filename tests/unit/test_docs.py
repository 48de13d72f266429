"""The documents say what the code does."""

import re
from pathlib import Path

import pytest

from sglang_ext.settings.model_kinds import MODEL_KINDS, SERVED_MODES
from tests.unit.doc_tables import all_tables, flag_table, metric_table, thread_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_lists_every_flag_as_the_code_has_it() -> None:
    assert flag_table() in (DOCS / "configuration.md").read_text()


def test_each_table_of_benchmarks_has_its_commit() -> None:
    """In its section, or in the list at the top, which has a row for each of the others."""
    head, *sections = re.split(r"^## ", (DOCS / "benchmarks.md").read_text(), flags=re.MULTILINE)
    with_tables = [section for section in sections if "\n|" in section]
    without = [each for each in with_tables if not re.search(r"\b[0-9a-f]{8}\b", each)]
    rows = re.findall(r"^\| ([^|]*) \| [0-9a-f]{8}", head, flags=re.MULTILINE)
    for section in without:
        title = section.partition("\n")[0].lower()
        assert any(row.strip("`") in title for row in rows), title


def test_the_architecture_lists_every_thread_as_the_code_has_it() -> None:
    assert thread_table() in (DOCS / "architecture.md").read_text()


def test_operations_lists_every_metric_as_the_code_has_it() -> None:
    assert metric_table() in (DOCS / "operations.md").read_text()


@pytest.mark.parametrize("name", all_tables())
def test_compatibility_is_the_allow_list(name: str) -> None:
    text = (DOCS / "compatibility.md").read_text()
    assert f"<!-- {name} -->\n{all_tables()[name]}\n<!-- end -->" in text


def test_what_is_said_to_be_served_is_tested() -> None:
    proofs = [kind.proof for kind in MODEL_KINDS.values() if kind.is_served]
    for proof in [*proofs, *(mode.proof for mode in SERVED_MODES)]:
        assert (DOCS.parent / proof.partition(";")[0]).is_file(), proof
