"""A test with a real server on what is installed: the wheel beside torch and SGLang.

Under one of the Pythons that run no other tests. There is no torch without CUDA's libraries for it
where the others come from, and it cannot be imported without them: 6 GB, for as long as it takes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from testkit.pythons import alone, pins

VERSION: Final = "3.12"
# A server starts, saves more than DRAM holds, with a disk behind it, loses its device, and answers
# from what it kept as before, bit for bit. What of it lay on disk depends on how fast that is.
TESTS: Final = ("tests/e2e/start/test_small_dram.py",)


def requirements(torch: str) -> list[str]:
    """What the server and the test need besides the wheel and SGLang.

    Args:
        torch: its version.
    """
    server = pins.without_torch(pins.extras("cpu"))
    return [*server, *alone.requirements(), f"torch=={torch}"]


def run(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the test, with warnings as errors; see `alone.run`."""
    return alone.run(python, folder, (*TESTS, "-k", "True"), has_assets=True)
