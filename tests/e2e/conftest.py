"""With the release of SGLang before (`make test RELEASE=0.5.22`) what is refused is skipped."""

from __future__ import annotations

from collections.abc import Generator
from importlib.metadata import version
from typing import Any

import pytest

from sglang_ext.settings.untried import NEWEST_RELEASE, older_release
from testkit.server import ServerError
from tests.cases import is_among

_IS_OLDER = bool(older_release(version("sglang")))
_REFUSED = f"--enable-hier-kv needs {NEWEST_RELEASE}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs the newest release, where the release before runs."""
    for item in items:
        mark = item.get_closest_marker("newest_release")
        if _IS_OLDER and mark is not None and (not mark.args or is_among(item, mark.args)):
            item.add_marker(pytest.mark.skip(reason=f"needs {NEWEST_RELEASE}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Takes a server that is refused for its release alone for a test that cannot be run."""
    report = yield
    if _IS_OLDER and call.excinfo is not None and call.excinfo.errisinstance(ServerError):
        said = [line for line in str(call.excinfo.value).splitlines() if _REFUSED in line]
        if said:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, said[-1])
    return report
