"""A scheduler that is left behind by a start that was ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A server that starts a scheduler; that goes on when it is told to, and says so.
SERVER = """
import multiprocessing
import os
import sys
from types import SimpleNamespace

from sglang_ext.seam.start.orphan import end_orphan


def schedule(pipe, has_plugin, said):
    assert pipe.recv() == "go on"
    parent = multiprocessing.parent_process()
    if sys.argv[2] == "dies":
        parent.join()
    arguments = SimpleNamespace(_hier_kv={}) if has_plugin else SimpleNamespace()
    end_orphan(None, arguments)
    os.write(said, b"served")


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    has_plugin, said = sys.argv[1] == "on", sys.stdout.fileno()
    child = context.Process(target=schedule, args=(theirs, has_plugin, said))
    child.start()
    ours.send("go on")
    if sys.argv[2] == "dies":
        os._exit(0)
    child.join()
"""


@pytest.mark.parametrize(
    ("plugin", "server", "expected"),
    [("on", "dies", ""), ("on", "lives", "served"), ("off", "dies", "served")],
)
def test_it_ends_where_its_server_has(
    tmp_path: Path, plugin: str, server: str, expected: str
) -> None:
    """It would load the model, and hold the disk folder against the next server."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    done = subprocess.run(  # until the last of both has ended, which have its end of the pipe
        [sys.executable, str(program), plugin, server],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout == expected
    is_told = "the server ended while it started, and so does its scheduler" in done.stderr
    assert is_told == (not expected)
