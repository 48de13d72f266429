"""Programs that import SGLang, run in copies of the process that forks servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from testkit.server import FORK_SERVERS, ROOT, nursery_of, server_environment
from testkit.slow import on_path


def run_script(
    script: Path, *args: str, stdin: str = "", timeout_s: float = 600.0, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs ``python SCRIPT ARGS`` in the root of the tree, with the environment of a server.

    Importing SGLang takes eight seconds of a core, of each process; a copy has done so.

    Args:
        script: path of the program.
        args: its arguments.
        stdin: what it reads.
        timeout_s: how long it may take.
        fork: False for a process of its own, as a reader's; so it is where servers are not forked.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    env = on_path(server_environment(None, "cpu"))
    if not (fork and os.environ.get(FORK_SERVERS) and nursery_of(None).can_start(args, env)):
        return subprocess.run(
            [sys.executable, str(script), *args],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=env,
            timeout=timeout_s,
            check=False,
        )
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(stdin.encode())
        given.seek(0)
        process = nursery_of(None).run_script(script, args, env, errors, given, output)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        output.seek(0)
        errors.seek(0)
        said = (file.read().decode(errors="replace") for file in (output, errors))
        return subprocess.CompletedProcess([str(script), *args], code, *said)
