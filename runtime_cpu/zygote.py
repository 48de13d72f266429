"""A process that has imported SGLang and forks servers: ``python -m runtime_cpu.zygote FD``.

Each of a server's three processes spends about eight seconds of a core on importing SGLang; a fork
of a process that has done so spends none. `runtime_cpu.forked` starts a zygote and asks it for
servers. A forked server runs the same module with the same arguments as ``python -m
sglang.launch_server``. Its children get what they run pickled through a pipe, as `multiprocessing`
spawns them, but wake up in a copy of the process as it was before the server began.

The zygote has one thread, or no copy of it would be sound. Several processes may use it: servers
end when who asked for them closes its socket, and the zygote when nobody is left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from setproctitle import getproctitle, setproctitle

from runtime_cpu.imported_names import index_imported_names

SERVER_MODULE = "sglang.launch_server"
# What a server's processes import before they look at their arguments. `SERVER_MODULE` itself is
# not among them: it runs as the main module of each server.
PRELOADED = (
    "torch",
    "torch.utils.cpp_extension",
    "numba",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    # What they import later. Not what the plugin changes classes of before its import, which would
    # have the old ones: `serving_responses`.
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.dllm.algorithm",
    "uvicorn.protocols.http.auto",
    # The plugin's: their compiled loops take a second to load. Nothing is hooked by importing them.
    "sglang_ext.plugin",
    "sglang_ext.seam.hooks.scheduler",
    "sglang_ext.assembly.factory",
)
# For each process that one starts, in order, those that this one starts.
Children = list[Any]
MAX_MESSAGE_BYTES = 1 << 20
_MAX_FDS, _MOST_OF_JOB = 64, 4
_SPAWNED = "--multiprocessing-fork"
_PR_SET_THP_DISABLE = 41
_FIRST_HIGH_FD = 200  # above every descriptor that a server has open when it starts a child


@dataclass(frozen=True)
class Job:
    """One server, or another program.

    Attributes:
        argv: arguments behind ``python -m sglang.launch_server``, or behind ``python SCRIPT``.
        env: the whole environment.
        cwd: the working directory.
        children: the processes that it will start.
        script: path of another program; "" for a server.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    children: Children
    script: str = ""


class _Child:
    """A copy of this process, made before the server begins, that waits for what to run.

    Args:
        others: copies that were made before it.
        children: processes that it will start, which are copies of it.
        inbox: of this process, which is not for its copies.
    """

    def __init__(
        self, others: Sequence[_Child], children: Children, inbox: socket.socket | None = None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:  # at a number that no received descriptor wants
            high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD)
        self._socket = socket.socket(fileno=high)
        self.pid = os.fork()
        if self.pid == 0:
            for other in others:
                other._socket.close()
            if inbox is not None:
                inbox.close()
            self._socket.close()
            _run_spawned(theirs, children)
        theirs.close()

    def start(self, program: str, fds: Sequence[int]) -> int:
        """Lets it run a spawned interpreter's program with these descriptors; returns its pid."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        message = {"program": program, "fds": list(fds), "env": dict(os.environ)}
        socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
        self._socket.close()
        return self.pid


def _run_spawned(inbox: socket.socket, children: Children) -> None:
    """Waits for a program and runs it as a spawned interpreter would; never returns."""
    # Before descriptors come: a copy that had them, too, would hide from who watches one of them
    # that this process ended.
    _use_children(children, inbox)
    data, fds, _, _ = socket.recv_fds(inbox, MAX_MESSAGE_BYTES, _MAX_FDS)
    inbox.close()
    if not data:
        os._exit(0)  # the server ended, or needed fewer children
    message = json.loads(data)
    _renumber(fds, message["fds"])
    os.environ.clear()
    os.environ.update(message["env"])
    random.seed()  # or every copy would draw the same numbers
    sys.argv = ["-c", _SPAWNED]
    # The program is the one that `multiprocessing` has put on a command line.
    exec(message["program"], {"__name__": "__main__"})
    sys.exit(0)


def _renumber(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Gives received descriptors the numbers that they have in the sender."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, wanted, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def _use_children(wanted: Children, inbox: socket.socket | None = None) -> None:
    """Makes copies of this process, which `multiprocessing` then starts instead of interpreters.

    Its other helper, the resource tracker, starts as ever.

    Args:
        wanted: for each copy, those that it will make of itself.
        inbox: of this process, which is not for its copies.
    """
    children: list[_Child] = []
    for each in wanted:
        children.append(_Child(children, each, inbox))
    if not children:
        return
    spawn = multiprocessing.util.spawnv_passfds

    def start(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if args[-1] == _SPAWNED and children:
            return children.pop(0).start(str(args[-2]), passfds)
        return int(spawn(path, args, passfds))

    multiprocessing.util.spawnv_passfds = start


def _run(job: Job, fds: Sequence[int]) -> None:
    """The rest of this process's life is that of ``sglang.launch_server``, or of a script.

    Args:
        job: what to run.
        fds: stderr, and for a script stdin and stdout; a server has nothing to read, and one log.
    """
    os.setsid()
    stderr, *others = fds
    stdin, stdout = others or (os.open(os.devnull, os.O_RDONLY), os.dup(stderr))
    for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.env)
    _extend_path(job.env.get("PYTHONPATH", ""))
    random.seed()
    _use_children(job.children)
    if job.script:
        setproctitle(" ".join([sys.executable, job.script, *job.argv]))
        sys.argv = [job.script, *job.argv]
        sys.path.insert(0, os.path.dirname(job.script))
        _run_script(job.script)
    setproctitle(" ".join([sys.executable, "-m", SERVER_MODULE, *job.argv]))
    sys.argv = [SERVER_MODULE, *job.argv]
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> NoReturn:
    """Runs a program as ``python PATH`` does, but for its end.

    There an interpreter takes apart what was imported: three seconds of a core, and libraries that
    count what they leave would count all that is frozen.
    """
    code: Any = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # with them an engine's processes end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _extend_path(path: str) -> None:
    """Puts the folders on the import path that it lacks; children are told by `multiprocessing`."""
    added = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[:0] = added
    importlib.invalidate_caches()


class Zygote:
    """Forks a server for each request of its clients, and tells how each ended.

    Args:
        listener: where clients connect; the first one has. A request comes with descriptors: a
            socket that is sent the pid first and the exit code last, the server's log, and for a
            script stdin and stdout.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: set[socket.socket] = set()
        self._servers: dict[int, Forked] = {}  # by pidfd

    def serve(self) -> tuple[Job, list[int]] | None:
        """Serves requests until no client is left.

        Returns:
            In a forked process what it is to run, with its descriptors; None in the zygote.
        """
        while True:
            sources: list[socket.socket | int] = [self._listener, *self._clients, *self._servers]
            readable, _, _ = select.select(sources, [], [])
            for ready in readable:
                if isinstance(ready, int):
                    self._reap(ready)
                elif ready is self._listener:
                    self._clients.add(ready.accept()[0])
                elif (forked := self._answer(ready)) is not None:
                    return forked
            if not self._clients and not self._servers and self._may_end():
                return None

    def _answer(self, client: socket.socket) -> tuple[Job, list[int]] | None:
        try:
            data, fds, _, _ = socket.recv_fds(client, MAX_MESSAGE_BYTES, _MOST_OF_JOB)
        except ConnectionResetError:
            data = b""
        if data:
            return self._fork(Job(**json.loads(data)), fds, client)
        self._clients.remove(client)
        client.close()
        for server in self._servers.values():
            if server.client is client:
                _kill(server.pid)
        return None

    def _may_end(self) -> bool:
        """Gives its place up, unless somebody has just connected."""
        path = Path(self._listener.getsockname())
        with contextlib.suppress(FileNotFoundError), lock_of(path).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if select.select([self._listener], [], [], 0.0)[0]:
                return False
            path.unlink()
        return True

    def _fork(
        self, job: Job, fds: Sequence[int], client: socket.socket
    ) -> tuple[Job, list[int]] | None:
        status_fd, *own_fds = fds
        status = socket.socket(fileno=status_fd)
        pid = os.fork()
        if pid == 0:
            for own in (status, self._listener, *self._clients):
                own.close()
            for pidfd, other in self._servers.items():
                os.close(pidfd)
                other.status.close()
            return job, own_fds
        for fd in own_fds:
            os.close(fd)
        self._servers[os.pidfd_open(pid)] = Forked(pid, status, client)
        _tell(status, {"pid": pid})
        return None

    def _reap(self, pidfd: int) -> None:
        server = self._servers.pop(pidfd)
        os.close(pidfd)
        _, code = os.waitpid(server.pid, 0)
        _tell(server.status, {"returncode": os.waitstatus_to_exitcode(code)})
        server.status.close()


class Forked(NamedTuple):
    """A server that runs: its main process, who is told of it, and who asked for it."""

    pid: int
    status: socket.socket
    client: socket.socket


def lock_of(path: Path) -> Path:
    """A file whose lock is held by who connects to a zygote's socket, or takes that away."""
    return path.with_name(f"{path.name}.lock")


def _kill(pid: int) -> None:
    # Itself first: one that was just forked leads no group yet, and no child of it could be missed
    # once it is gone.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _tell(status: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know any more
        status.sendall(json.dumps(message).encode() + b"\n")


def _load_loops() -> None:
    """Has the compiled loops ready that every scheduler with the plugin would load from disk."""
    import torch
    from sglang.srt.mem_cache.cpp_utils import native_hash

    from sglang_ext.kernels import rope
    from sglang_ext.tiers.host import HostArena
    from sglang_ext.tiers.index import PageIndex
    from sglang_ext.tiers.policy import PolicyConfig
    from sglang_ext.tiers.store import PageStore, PageStoreConfig

    settings = PageStoreConfig(placement=PolicyConfig())
    PageStore(HostArena(2, 4096), PageIndex(64), None, settings).close()  # ends its threads
    rope.warm_up(torch.bfloat16)
    # By SGLang's own loader, which runs the compiler's driver and ninja to see that it is built.
    with contextlib.suppress(RuntimeError):  # without a compiler each server finds out itself
        native_hash.get_native_hash([1, 2, 3], None, page_size=1)


def _use_small_pages() -> None:
    """No huge pages in this process and its copies.

    Where a virtual machine's host takes free memory back, each of them costs 2 ms of a core to get
    again: a quarter of a second for the DRAM of a test's server, ten times as much as small pages.
    """
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def main() -> None:
    """Imports SGLang, then serves; a forked process goes on as a server."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    setproctitle(getproctitle())  # it finds its room only while the environment is untouched
    _use_small_pages()
    for module in PRELOADED:
        importlib.import_module(module)
    _load_loops()
    index_imported_names()
    gc.collect()
    gc.freeze()  # what was imported is never walked again, so its pages stay shared
    sys.stdout.flush()  # or each copy would say it once more
    forked = Zygote(listener).serve()
    if forked is not None:
        _run(*forked)


if __name__ == "__main__":
    main()
