"""`hier-kv doctor` as users start it, in a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testkit.server import TINYLM


def test_in_a_checkout_without_a_gpu_it_says_whether_a_model_is_served() -> None:
    """The command itself: what tests put on the path, and servers are given, it does not have."""
    command = [Path(sys.executable).with_name("hier-kv"), "doctor", "--hier-kv-host-size", "0.01"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE")
    }
    done = subprocess.run(
        [*map(str, command), "--model-path", str(TINYLM)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nmodel: ok. Of it SGLang keeps K and V of every head" in done.stdout
    assert 'docs/compatibility.md, "Modes"' in done.stdout
