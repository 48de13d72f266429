"""What the tests on the simulated device share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet(quiet: None) -> None:
    """Failures are injected in all of them."""
