"""A command of `hier-kv` that works in processes of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from testkit.server import ROOT

_CALL = (
    "import signal, sys; from sglang_ext.cli import main; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)


def start_with_workers(
    arguments: Sequence[str], env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts a command, and waits until it has processes that work for it.

    Args:
        arguments: behind ``hier-kv``.
        env: the whole environment; None for that of this process.

    Returns:
        The command, which leads a process group and hears Ctrl-C, and the first of its processes.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _CALL, *arguments],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    workers: list[psutil.Process] = []
    while not workers:
        assert process.poll() is None, "nothing was done in another process"
        found = psutil.Process(process.pid).children()
        workers = [each for each in found if "spawn_main" in " ".join(each.cmdline())]
        time.sleep(0.01)
    return process, workers
