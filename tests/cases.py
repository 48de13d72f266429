"""Which cases of a test a mark means: those whose id is among its patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest


def is_among(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    """Whether a test is a case with one of these ids (``*`` for any text)."""
    case = getattr(item, "callspec", None)
    return case is not None and any(fnmatchcase(case.id, pattern) for pattern in patterns)
