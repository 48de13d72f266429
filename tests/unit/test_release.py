"""What is built is released only with an entry in the changelog."""

from __future__ import annotations

import pytest

from sglang_ext import __version__
from testkit.release import ROOT, ReleaseError, check_changelog


def test_the_newest_entry_is_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    check_changelog(text, __version__)
    with pytest.raises(ReleaseError, match=f"version 9.9.9, it is of {__version__}"):
        check_changelog(text, "9.9.9")
    with pytest.raises(ReleaseError, match="it is of none"):
        check_changelog("# Changelog", "9.9.9")
