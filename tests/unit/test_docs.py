"""The documents say what the code does."""

from pathlib import Path

from sglang_ext.settings.flags import flag_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_lists_every_flag_as_the_code_has_it() -> None:
    assert flag_table() in (DOCS / "configuration.md").read_text()
