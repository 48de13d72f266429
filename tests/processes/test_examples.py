"""The examples where nobody answers: one sentence that says what to do, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime_cpu import launch
from testkit.ports import free_port
from testkit.server import ROOT

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


# SGLang's import takes six seconds.
@pytest.mark.sampled("agents.py", "bench_serving.py", "documents.py", "shared_store.py")
@pytest.mark.parametrize("example", EXAMPLES)
def test_without_a_server_it_says_what_to_do(example: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, str(ROOT / "examples" / example), "--url", url]
    env = {**launch.environment(), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=os.sep
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{example}: no "), line
    assert f"answers at {url} (" in line
    assert "refused" in line
    assert line.endswith("start one as the head of this file says, or give its --url")
