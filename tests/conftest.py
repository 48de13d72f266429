"""What every test run shares: marks that follow from the machine, and hypothesis's profile."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from runtime_cpu import launch
from testkit.slow.threads import are_threads_late, late_threads_if_asked
from tests.cases import is_among

# Three test files run at a time, and an idle scheduler would spin on a core that others need.
os.environ.setdefault("CPU_IDLE_SLEEP_MS", "200")
# Collectives through TCP were two fifths of the CPU time of requests to two ranks.
os.environ.setdefault("CPU_SHARED_MEMORY_RANKS", "1")

# Several test files run at a time, and torch's threads spin at their barriers where others want the
# cores. Before torch is imported; servers have one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A server that is forked from a process which has imported SGLang starts in a third of the time.
# All that run tests, and what tests run, share that process.
if "HIER_KV_FORK_SERVERS" not in os.environ:
    _folder = tempfile.mkdtemp(prefix="hier-kv-zygotes-")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    os.environ["HIER_KV_FORK_SERVERS"] = _folder

# Page hashes in this process are of the extension that `make dev` has built for servers.
os.environ.setdefault(launch.EXTENSIONS_VARIABLE, launch.extensions_folder())

# Every server is three processes, which would compile the plugin's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `make late`: before the plugin makes its locks. Servers do it themselves.
late_threads_if_asked()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--long``."""
    parser.addoption("--long", action="store_true", help="long forms of tests, too (CONTRIBUTING)")


def pytest_configure(config: pytest.Config) -> None:
    """Sets what test modules read at their import; workers inherit the switch."""
    if config.getoption("--long") and not _are_long_forms_on():
        os.environ["HIER_KV_LONG"] = "1"
    _load_profile()


def _load_profile() -> None:
    """How hypothesis searches."""
    from tests.long_form import count  # behind its switch

    # Deadlines and "too slow" checks measure a shared machine, not the code. In CI the examples are
    # the same on each run, so that a red build can be repeated.
    settings.register_profile(
        "default",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        max_examples=count(50, 500),
    )
    settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "default")


def _are_long_forms_on() -> bool:
    # As `tests.long_form` has it, which imports nothing that is needed before this.
    return os.environ.get("HIER_KV_LONG", "") not in ("", "0")


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Does not look for garbage among what is imported for tests, now or later: there is none.

    Looking took a fifth of the processor time of collection, in every process that runs tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries that count what they leave would count all
        # As servers look for it (runtime_cpu/stubs/sitecustomize.py): imports of SGLang and parses
        # of its source, which come later, took more than half as long again otherwise.
        gc.set_threshold(200_000, 50, 50)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves long forms out, skips what this machine or this run cannot do, and orders the rest."""
    _leave_long_forms_out(config, items)
    _skip_what_cannot_be_done(items)
    _put_the_longest_first(items)


def _leave_long_forms_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _are_long_forms_on():
        return
    # Of named tests, and of those that failed before (`--lf`), not all cases need be here.
    if not config.getoption("lf", False) and not any("::" in arg for arg in config.args):
        _check_samples(items)
    left_out = [item for item in items if _is_long(item)]
    items[:] = [item for item in items if not _is_long(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Says why there may have been nothing to run; in the process that has the workers, too."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not _are_long_forms_on():
        terminalreporter.write_line(
            "no test was run: cases of the long forms alone need --long, or LONG=1 with make "
            "(CONTRIBUTING.md, Tests)"
        )


def _is_long(item: pytest.Item) -> bool:
    """Whether a test, or this case of it, is for the long forms alone."""
    if item.get_closest_marker("long") is not None:
        return True
    sample = item.get_closest_marker("sampled")
    if sample is None or not hasattr(item, "callspec"):
        return False
    return not is_among(item, sample.args)


def _check_samples(items: list[pytest.Item]) -> None:
    """What is to be kept of a test is one of its cases.

    Raises:
        pytest.UsageError: it is not; a default run would miss it, and nobody would notice.
    """
    ids: dict[tuple[Path, str], list[str]] = {}
    for item in items:
        sample = item.get_closest_marker("sampled")
        if sample is not None and hasattr(item, "callspec"):
            for pattern in sample.args:
                ids.setdefault((item.path, pattern), []).append(item.callspec.id)
    for (path, pattern), found in ids.items():
        if not any(fnmatchcase(name, pattern) for name in found):
            raise pytest.UsageError(f"{path}: expected a case {pattern!r} among {sorted(found)}")


def _skip_what_cannot_be_done(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` without CUDA, and those marked ``on_time`` with late threads."""
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


def _put_the_longest_first(items: list[pytest.Item]) -> None:
    """Files with the mark ``longest``, which else would end alone, when all others are through.

    By whole files: workers take one at a time, in order, and a file's servers are for its tests.
    """
    longest = {item.path for item in items if item.get_closest_marker("longest") is not None}
    items.sort(key=lambda item: item.path not in longest)
