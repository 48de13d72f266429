"""The documents say what the code does."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

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


def git(*words: str, given: str = "") -> str:
    """What git says; empty where this is no repository of its own."""
    command = ["git", "-C", str(DOCS.parent), *words]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False
    ).stdout.strip()


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="the history is not here"
)
def test_each_commit_that_a_document_names_is_there() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    texts = " ".join(page.read_text() for page in pages)
    words = set(re.findall(r"\b[0-9a-f]{7,8}\b", texts))
    named = sorted(word for word in words if re.search("[0-9]", word) and re.search("[a-f]", word))
    assert len(named) > 40
    kinds = git("cat-file", "--batch-check=%(objecttype)", given="\n".join(named)).splitlines()
    assert [name for name, kind in zip(named, kinds, strict=True) if kind != "commit"] == []


def test_the_architecture_lists_every_thread_as_the_code_has_it() -> None:
    assert thread_table() in (DOCS / "architecture.md").read_text()


def test_the_page_of_metrics_lists_each_as_the_code_has_it() -> None:
    assert metric_table() in (DOCS / "metrics.md").read_text()


def _section_of_operations(heading: str) -> str:
    text = (DOCS / "operations.md").read_text()
    return re.split(r"^##+ ", text.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]


def test_operations_says_what_to_do_about_each_alert() -> None:
    [group] = yaml.safe_load((DOCS.parent / "deploy" / "hier-kv.rules.yml").read_text())["groups"]
    rules = [f"`{rule['alert']}` ({rule['labels']['severity']})" for rule in group["rules"]]
    rows = re.findall(r"^\| (`HierKV[^|]*) \|", _section_of_operations("Alerts"), re.MULTILINE)
    assert rows == rules


def _texts(*folders: str) -> Iterator[str]:
    """Every text in the code of these folders."""
    for folder in folders:
        for path in (DOCS.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[\d.]*[sdgf]", "N", node.value)


def test_each_line_of_the_log_that_operations_shows_is_one_of_the_code() -> None:
    """By its pieces: `...` stands for some words, N for a number or a name."""
    texts = list(_texts("sglang_ext", "tiers"))
    cells = re.findall(r"^\| (`[^|]*) \|", _section_of_operations("Lines of the log"), re.MULTILINE)
    shown = [line for cell in cells for line in re.findall(r"`([^`]*)`", cell)]
    pieces = [piece.strip() for line in shown for piece in re.split(r"\.\.\.|\b[NM]\b", line)]
    pieces = [piece for piece in pieces if len(piece) > len("of")]
    assert len(pieces) > 30
    assert [piece for piece in pieces if not any(piece in text for text in texts)] == []


@pytest.mark.parametrize("name", all_tables())
def test_compatibility_is_the_allow_list(name: str) -> None:
    text = (DOCS / "compatibility.md").read_text()
    assert f"<!-- {name} -->\n{all_tables()[name]}\n<!-- end -->" in text


def _proofs() -> list[str]:
    """Each file that the tables of kinds and modes name as proof, once."""
    lists = [kind.proof for kind in MODEL_KINDS.values() if kind.is_served]
    lists += [mode.proof for mode in SERVED_MODES]
    return sorted({file for each in lists for file in each.split("; ")})


def _tests_by_default(path: Path) -> list[str]:
    """The tests of a file that a default run has, by the marks on them and on the file."""
    body = ast.parse(path.read_text()).body
    nodes = [node for each in body for node in ([each, *getattr(each, "body", ())])]
    tests = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assigned = [node for node in body if isinstance(node, ast.Assign)]
    marks = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    if any("pytest.mark.long" in ast.unparse(mark) for mark in marks):
        return []
    return [
        test.name
        for test in tests
        if not any("pytest.mark.long" in ast.unparse(each) for each in test.decorator_list)
    ]


@pytest.mark.parametrize("proof", _proofs())
def test_what_is_said_to_be_served_is_tested(proof: str) -> None:
    """By every file that is named, in each run."""
    assert proof.startswith("tests/")
    assert (DOCS.parent / proof).is_file()
    assert _tests_by_default(DOCS.parent / proof)


def test_nothing_is_said_to_be_served_without_a_proof() -> None:
    served = [kind for kind in MODEL_KINDS.values() if kind.is_served]
    assert all(kind.proof for kind in served)
    assert all(mode.proof for mode in SERVED_MODES)


def test_a_file_without_tests_is_no_proof(tmp_path: Path) -> None:
    path = tmp_path / "test_nothing.py"
    path.write_text("def helper() -> None: ...\n")
    assert _tests_by_default(path) == []
    path.write_text("@pytest.mark.long\ndef test_it() -> None: ...\n")
    assert _tests_by_default(path) == []
    path.write_text("def test_it() -> None: ...\n")
    assert _tests_by_default(path) == ["test_it"]
    path.write_text("pytestmark = [pytest.mark.long]\ndef test_it() -> None: ...\n")
    assert _tests_by_default(path) == []
