"""What every test run shares: marks that follow from the machine, and hypothesis's profile."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from testkit.slow.threads import are_threads_late, late_threads_if_asked

# Deadlines and "too slow" checks measure a shared machine, not the code. In CI the examples are the
# same on each run, so that a red build can be repeated.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Three test files run at a time, and an idle scheduler would spin on a core that others need.
os.environ.setdefault("CPU_IDLE_SLEEP_MS", "200")

# Several test files run at a time, and torch's threads spin at their barriers where others want the
# cores. Before torch is imported; servers have one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A server that is forked from a process which has imported SGLang starts in a third of the time.
# All that run tests, and what tests run, share that process.
if "HIER_KV_FORK_SERVERS" not in os.environ:
    _folder = tempfile.mkdtemp(prefix="hier-kv-zygotes-")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    os.environ["HIER_KV_FORK_SERVERS"] = _folder

# Every server is three processes, which would compile the plugin's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `make late`: before the plugin makes its locks. Servers do it themselves.
late_threads_if_asked()


_is_strict: list[bool] = []


@pytest.fixture(autouse=True)
def _steps_fit_their_states() -> Iterator[None]:
    """No table of pages takes a step from a state that it does not fit, in any test."""
    if "sglang_ext.tiers.store.books.page_table" not in sys.modules:
        yield
        return
    from tests import strict_steps

    if not _is_strict:
        _is_strict.append(True)
        strict_steps.check_steps()
    yield
    assert not strict_steps.misfits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` without CUDA, and those marked ``on_time`` with late threads."""
    if are_threads_late():
        for item in items:
            if item.get_closest_marker("on_time") is not None:
                item.add_marker(pytest.mark.skip(reason="its subject is time"))
    # Not `in item.keywords`: these are the names of the folders, too.
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch  # here only: a run without such tests need not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
