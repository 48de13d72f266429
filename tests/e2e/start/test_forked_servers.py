"""Forked servers look like others, tell how they ended, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from testkit.server import FORK_SERVERS, ROOT, Server

pytestmark = pytest.mark.e2e

_HOLD = """
import sys, time
from testkit.server import Server
with Server(["--max-total-tokens", "2048"], stop="kill") as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


_IMPORT = """
from testkit.server import Server
first = Server([])
from runtime_cpu import inprocess
inprocess.prepare()
print(first._env == Server([])._env)
"""


def _with_root_on_path() -> dict[str, str]:
    """The environment of another process, with all that is on the import path of this one's."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *given])}


def _wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_forked_server_looks_and_ends_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORK_SERVERS, os.environ.get(FORK_SERVERS) or str(tmp_path))
    with Server(["--max-total-tokens", "2048"]) as server:
        titles = [" ".join(process.cmdline()) for process in server.tree()]
        assert "-m sglang.launch_server" in titles[0]
        assert psutil.Process(server.scheduler_pid).ppid() == server.pid
        assert any("sglang::detokenizer" in title for title in titles)
        assert not any("zygote" in title for title in titles)
        left = server.terminate()
    assert left.exit_code == 0
    assert left.clean
    with Server(["--max-total-tokens", "2048"]) as server:
        server.kill()
        assert not server.alive()
        assert not server.tree()


def test_servers_end_with_a_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others, who share what forks them, do not."""
    monkeypatch.setenv(FORK_SERVERS, os.environ.get(FORK_SERVERS) or str(tmp_path))
    env = _with_root_on_path()
    command = [sys.executable, "-c", _HOLD]
    with (
        Server(["--max-total-tokens", "2048"], stop="kill") as own,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as holder,
    ):
        assert holder.stdout is not None
        session = int(holder.stdout.readline())
        assert _session(session)
        parents = {psutil.Process(each).ppid() for each in (own.pid, session)}
        zygotes = {each: psutil.Process(each).cmdline() for each in parents}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        _wait_until(lambda: not _session(session))
        assert own.generate(text="Hello", sampling_params={"max_new_tokens": 1})
    assert len(zygotes) == 1, zygotes


def test_a_process_that_imports_sglang_itself_still_forks_servers() -> None:
    """SGLang sets variables as it is imported; a server with another environment is not forked."""
    env = _with_root_on_path()
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    assert done.stdout.split()[-1:] == [b"True"], done.stderr.decode()[-2000:]


def _session(number: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == number:
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found
