"""Servers forked from a process that has imported SGLang; see `runtime_cpu.zygote`."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from runtime_cpu.zygote import Children, Job, lock_of

# Variables that are read when a server runs. Others may decide what an import does.
_READ_LATE = (
    *("SGLANG_HIER_KV_", "BENCH_FAULTS_", "BENCH_RANK_PROBE", "PYTEST_CURRENT_TEST"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"),
    *("SGLANG_PP_LAYER_PARTITION", "SGLANG_MAMBA_CONV_DTYPE"),
    "SGLANG_TEST_RETRACT",  # by `sglang_cpu.hooks`, once more
    *("HIER_KV_TEST_", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "SGLANG_TRACE_ASYNC"),
    *("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_", "SGLANG_CHECK_KV_PAGE_INVARIANTS"),
    *("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"),  # at the first product of matrices
    # When something is compiled. A process that imports some of transformers' models gets it set,
    # and all servers behind that would start as ever.
    "TORCHINDUCTOR_CACHE_DIR",
)
_ROOT = Path(__file__).resolve().parent.parent
_OWN = "PYTEST_"  # variables of one of pytest's processes
_PATH = "PYTHONPATH"
_IMPORTED_AT_START = ("sitecustomize", "usercustomize")
_NODE_OPTIONS = ("--nnodes",)
_RANK_OPTIONS = ("--tp-size", "--tensor-parallel-size", "--tp")
DATA_OPTIONS = ("--dp-size", "--data-parallel-size", "--dp")
_ATTENTION_DATA_OPTIONS = ("--attn-dp-size", "--attention-data-parallel-size")
_ATTENTION_DATA_SWITCH = "--enable-dp-attention"
_STAGE_OPTIONS = ("--pp-size", "--pipeline-parallel-size")
_TRACES, _TRACED_BY_OTHERS = "--enable-trace", "SGLANG_TRACE_ASYNC"


class ForkedServer:
    """A server's main process, with what `testkit.server` uses of `subprocess.Popen`.

    Attributes:
        pid: process id.
        returncode: how it ended, as `subprocess` counts it; None while it runs.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._lines = status.makefile("rb")
        self.pid = int(self._next("pid"))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._next("returncode"))
            self._lines.close()
            self._status.close()
        return self.returncode

    def _next(self, key: str) -> int:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the process that forks servers ended; see build/logs/zygote-*.log")
        return int(json.loads(line)[key])


class Nursery:
    """A zygote, started when it is first needed, that ends with who uses it. Thread-safe.

    Args:
        env: environment in which SGLang is imported.
        log_path: file for what the import prints.
        folder: processes with the same one, and the same environment, share a zygote, which ends
            with the last of them. Its path is short, as a socket's has to be.
    """

    def __init__(self, env: Mapping[str, str], log_path: Path, folder: Path) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None  # guarded by _lock
        self._base = dict(env)
        self._log_path = log_path
        self._folder = folder

    def can_start(self, args: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a server with these would be the same when it is forked."""
        changed = {
            name
            for name in {*env, *self._base} - {_PATH}
            if env.get(name) != self._base.get(name) and not name.startswith(_READ_LATE)
        }
        if changed:
            return False
        base, path = (each.get(_PATH, "").split(os.pathsep) for each in (self._base, env))
        return set(base) <= set(path) and all(map(_comes_late, set(path) - set(base)))

    def start(self, args: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> ForkedServer:
        """Forks a server.

        Args:
            args: arguments behind ``python -m sglang.launch_server``.
            env: its whole environment.
            log: takes stdout and stderr.
        """
        return self._ask_for(Job(list(args), dict(env), os.getcwd(), children(args, env)), [log])

    def run_script(
        self, script: Path, args: Sequence[str], env: Mapping[str, str], *files: IO[bytes]
    ) -> ForkedServer:
        """Forks a process for a program that imports SGLang, and may start an `sglang.Engine`.

        Args:
            script: path of the program.
            args: its arguments.
            env: its whole environment.
            files: its stderr, stdin and stdout.
        """
        job = Job(list(args), dict(env), os.getcwd(), children((), env), str(script))
        return self._ask_for(job, files)

    def _ask_for(self, job: Job, files: Sequence[IO[bytes]]) -> ForkedServer:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(
                self._connected(),
                [json.dumps(asdict(job)).encode()],
                [theirs.fileno(), *(file.fileno() for file in files)],
            )
        return ForkedServer(ours)

    def _connected(self) -> socket.socket:
        """The socket to the zygote; it sends nothing, so what can be read is its end."""
        if self._control is None or select.select([self._control], [], [], 0.0)[0]:
            self._control = self._connect(self._folder / self._digest())
            atexit.register(self._control.close)
        return self._control

    def _digest(self) -> str:
        """What a process has to have alike to share a zygote."""
        folders = self._base.get(_PATH, "").split(os.pathsep)
        alike = {_PATH: [folder for folder in folders if folder not in ("", str(_ROOT))]}
        for name in self._base.keys() - {_PATH}:
            if not name.startswith((*_READ_LATE, _OWN)):
                alike[name] = [self._base[name]]
        return hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:16]

    def _connect(self, path: Path) -> socket.socket:
        """Connects to the zygote that listens there, and starts it where none does."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_of(path).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                control.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)  # of one that was killed
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(str(path))
                    listener.listen()
                    control.connect(str(path))  # before it starts, so that it has somebody
                    self._start_zygote(listener)
        return control

    def _start_zygote(self, listener: socket.socket) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "runtime_cpu.zygote", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=self._base,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        process.returncode = 0  # nobody waits for it: others may use it for longer


def _comes_late(folder: str) -> bool:
    """Whether a folder on the import path has only what was not imported without it."""
    names = {Path(each).stem for each in os.listdir(folder) if not each.endswith(".dist-info")}
    names = {name for name in names if name.isidentifier() and name != "__pycache__"}
    return not any(name in _IMPORTED_AT_START or importlib.util.find_spec(name) for name in names)


def children(args: Sequence[str], env: Mapping[str, str]) -> Children:
    """The processes that a server starts, in order, each with those that it starts.

    A controller starts the schedulers where these are whole and data parallel. Where attention
    alone is, the server starts them, and a controller behind them. The detokenizer comes last.
    Nodes have as many schedulers each; those behind the first have no detokenizer, and the copy
    that waits to be one ends with its node. Where spans are sent by a process of their own, each
    process that makes some starts one: the server behind all others, a controller before.
    """
    num_ranks = _value(args, _RANK_OPTIONS) * _value(args, _STAGE_OPTIONS)
    num_ranks //= _value(args, _NODE_OPTIONS)
    num_data, num_attention_data = (
        _value(args, options) for options in (DATA_OPTIONS, _ATTENTION_DATA_OPTIONS)
    )
    senders: Children = [[]] if _TRACES in args and env.get(_TRACED_BY_OTHERS) == "1" else []
    scheduler, detokenizer = senders, list[Any]()
    if num_data * num_attention_data == 1:
        return [*[scheduler] * num_ranks, detokenizer, *senders]
    if num_attention_data > 1 or _ATTENTION_DATA_SWITCH in args:
        return [*[scheduler] * num_ranks, senders, detokenizer, *senders]
    controller = [*senders, *[scheduler] * (num_ranks * num_data)]
    return [controller, detokenizer, *senders]


def _value(args: Sequence[str], options: Sequence[str]) -> int:
    for option, value in pairwise(args):
        if option in options and value.isdigit():
            return int(value)
    return 1
