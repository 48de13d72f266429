"""A real SGLang server as a context manager, for tests, benches and the demo.

    with Server(["--max-total-tokens", "8192"]) as server:
        answer = server.generate(text="Hello", sampling_params={"max_new_tokens": 8})

The server runs on the CPU runtime of ``runtime_cpu/`` (or on a CUDA device, as SGLang starts it) in
a process session of its own, writes its log to a file, and is stopped on every way out, also when
the process that started it is killed.
Methods may be called from several threads.

An idle SGLang scheduler spins on a whole core. With two servers at once, give the plain one
``--sleep-on-idle`` (not one that holds requests back: they would wait for its one-second poll).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Self

import psutil

from runtime_cpu import launch
from runtime_cpu.forked import ForkedServer, Nursery
from testkit.ports import free_port, port_of_ranks
from testkit.slow import on_path
from testkit.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent
TINYLM = ROOT / "tests" / "assets" / "tinylm"

# How often a server starts again because its port was taken between its choice and its use.
_OTHER_PORTS = 3
_IN_USE = "address already in use"
# SGLang's warm-up request and per-request access log say nothing that a test needs.
_QUIET_OPTIONS = ("--skip-server-warmup", "--log-level-http", "warning")
# /health generates a token and sleeps a second for it; _first_request() below replaces that.
_QUIET_ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}

# Set: servers are forked from one process that has imported SGLang, which takes 20 s of a core less
# each. For tests: memory is shared between servers, which a measurement may notice. A folder; all
# processes with the same one share that process.
FORK_SERVERS = "HIER_KV_FORK_SERVERS"

_LOG_TAIL_CHARS, _STACKS_CHARS = 4_000, 30_000
_POLL_S = 0.05
# Longest time in which processes end that were killed, and in which somebody reaps those that did.
_ENDS_S, _REAPED_S = 60.0, 2.0


class ServerError(RuntimeError):
    """The server answered with an HTTP error, or did not start, or did not stop."""

    def __init__(self, message: str, status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Leftovers:
    """What a stopped server left behind, and how it ended.

    Attributes:
        exit_code: of the main process; negative for a signal.
        stop_s: seconds from the signal to the end of the main process.
        processes: "pid name" of each process of the server that still ran afterwards.
        zombies: the same for ended processes that nobody has reaped.
        shared_memory: files in /dev/shm that the server had mapped and that are still there, but
            for ``sglang_own``.
        sglang_own: such files that plain SGLang leaves behind too; they are removed here.
    """

    exit_code: int
    stop_s: float
    processes: list[str] = field(default_factory=list)
    zombies: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    sglang_own: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing stayed that plain SGLang does not leave too."""
        return not (self.processes or self.zombies or self.shared_memory)


class Server:
    """One server process tree, from start to stop.

    It has many methods because tests do much with a server.

    Args:
        args: options added to ``sglang.launch_server``, after the quiet defaults.
        model: path of the model; None when `args` name it.
        port: TCP port on 127.0.0.1; a free one when None.
        log_path: file for stdout and stderr, appended to; ``build/logs/`` when None.
        env: variables added to the environment.
        release: a folder with another SGLang than the installed one (`testkit.releases.wheels`).
        device: "cuda" for plain ``python -m sglang.launch_server``, without the CPU runtime.
        start_timeout_s: how long a start may take.
        stop: how leaving the ``with`` block ends it. SGLang looks for SIGTERM every 5 s only, so
            tests of anything but the shutdown are faster with "kill".
        progress: called with one line about every second while the server starts.
    """

    def __init__(
        self,
        args: Sequence[str] = (),
        *,
        model: Path | str | None = TINYLM,
        port: int | None = None,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        release: Path | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
        start_timeout_s: float = 300.0,
        stop: Literal["terminate", "kill"] = "terminate",
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._other_ports = 0 if port else _OTHER_PORTS
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path or ROOT / "build" / "logs" / f"server-{self.port}.log"
        self.startup_s = 0.0
        self._args = [*_QUIET_OPTIONS, "--port", str(self.port), *map(str, args)]
        if model is not None:
            self._args = ["--model-path", str(model), *self._args]
        self._release = release
        self._device = device
        self._env = on_path({**server_environment(release, device), **(env or {})})
        self._start_timeout_s = start_timeout_s
        self._stop = stop
        self._progress = progress
        self._process: subprocess.Popen[bytes] | ForkedServer | None = None
        self._watchdog: Watchdog | None = None
        self._started_at = 0.0
        self._log_start = 0

    # ---- start ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *exc_info: object) -> None:
        if self.alive() and self._stop == "terminate" and exc_info[0] is None:
            self.terminate()
        else:
            self.kill()

    def start(self) -> Self:
        """Starts the process and returns at once; `wait_ready` waits for it.

        Two servers started before either is awaited share the two cores well.
        """
        if self.alive():
            raise ServerError(f"the server on port {self.port} already runs (pid {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = self._launch(log)
        # Behind it: what forks servers may have to import SGLang first, and to compile loops, which
        # takes minutes on busy cores and is no slow start of this server.
        self._started_at = time.monotonic()
        self._watchdog = Watchdog(self.pid)
        _live.add(self)
        return self

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedServer:
        args = [*self._args, *port_of_ranks(self._args)]
        if os.environ.get(FORK_SERVERS) and self._device == "cpu":
            nursery = nursery_of(self._release)
            if nursery.can_start(args, self._env):
                return nursery.start(launch.arguments(args), self._env, log)
        plain = [sys.executable, "-m", "sglang.launch_server", *args]
        return subprocess.Popen(
            launch.command(args) if self._device == "cpu" else plain,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )

    def wait_ready(self) -> Self:
        """Waits until the server answers requests.

        Raises:
            ServerError: it ended or did not answer in time; the message has the log's end.
        """
        deadline = self._started_at + self._start_timeout_s
        next_report_s = 1.0
        while not self._healthy():
            elapsed_s = time.monotonic() - self._started_at
            if not self.alive():
                code = self._running().returncode
                if self._other_ports and _IN_USE in self.log():
                    self._other_ports -= 1
                    self._start_on_another_port()
                    continue
                raise ServerError(f"the server ended with {code} at start:\n{self._tail()}")
            if time.monotonic() > deadline:
                tail = self._tail()
                raise ServerError(f"no answer after {elapsed_s:.0f} s:\n{tail}\n{self._stacks()}")
            if self._progress is not None and elapsed_s >= next_report_s:
                self._progress(f"starting the server: {elapsed_s:.0f} s")
                next_report_s = elapsed_s + 1.0
            time.sleep(_POLL_S)
        self._first_request()
        self.startup_s = time.monotonic() - self._started_at
        return self

    def _start_on_another_port(self) -> None:
        """Somebody took the port meanwhile: SGLang's processes listen on ports of their own."""
        self.kill()
        old, self.port = self.port, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._args[self._args.index("--port") + 1] = str(self.port)
        with self.log_path.open("a") as log:
            log.write(f"port {old} was taken; the server starts again on {self.port}\n")
        self.start()

    def _healthy(self) -> bool:
        try:
            self.get("/health", timeout_s=5.0)
        except (ServerError, OSError):
            return False
        return True

    def _first_request(self) -> None:
        # SGLang installs its SIGTERM handler on the first request: before it, SIGTERM is a kill.
        if "--is-embedding" in self._args:
            self.post("/encode", {"input_ids": [0]})
        else:
            self.generate(input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0})

    # ---- requests ------------------------------------------------------------------------------

    def generate(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Calls ``/generate`` for one prompt, given as text or as token ids; greedy by default.

        Args:
            text: the prompt as text.
            input_ids: the prompt as token ids.
            sampling_params: SGLang's; ``temperature`` 0 unless given.
            fields: further fields of the request (``return_logprob``, ``rid``, ...).
        """
        body = self._request_body(text, input_ids, sampling_params, fields)
        answer = self.post("/generate", body)
        assert isinstance(answer, dict)
        return answer

    def stream(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """Like `generate`, but yields each event of the stream as it comes."""
        body = self._request_body(text, input_ids, sampling_params, fields) | {"stream": True}
        with self._open("/generate", body, timeout_s) as response:
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[len(b"data: ") :])

    def post(self, path: str, body: Any = None, *, timeout_s: float = 600.0) -> Any:
        """POSTs JSON and returns the decoded answer, or its text where it is not JSON.

        Raises:
            ServerError: with ``status`` and ``body``, for any answer but 2xx.
        """
        with self._open(path, {} if body is None else body, timeout_s) as response:
            return _decoded(response.read())

    def get(self, path: str, *, timeout_s: float = 600.0) -> Any:
        """GETs a path; answers and errors as for `post`."""
        with self._open(path, None, timeout_s) as response:
            return _decoded(response.read())

    @staticmethod
    def _request_body(
        text: str | None,
        input_ids: Sequence[int] | None,
        sampling_params: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
    ) -> dict[str, Any]:
        if (text is None) == (input_ids is None):
            raise ValueError("expected a prompt as text or as input_ids, and not both")
        prompt = {"text": text} if input_ids is None else {"input_ids": list(input_ids)}
        return {
            **prompt,
            "sampling_params": {"temperature": 0.0, **(sampling_params or {})},
            **fields,
        }

    def _open(self, path: str, body: Any, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            return _opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise ServerError(f"{path}: HTTP {error.code}: {text}", error.code, text) from None

    # ---- the process ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the server's main process, which takes SIGTERM."""
        return self._running().pid

    @property
    def scheduler_pid(self) -> int:
        """Process id of the scheduler, the child that owns the KV pools.

        Raises:
            ServerError: there is none, or more than one.
        """
        found: list[int] = [p.pid for p in self.tree() if "sglang::scheduler" in _title(p)]
        if len(found) != 1:
            titles = [_title(process) for process in self.tree()]
            raise ServerError(f"expected one scheduler process, found {found} among {titles}")
        return found[0]

    def tree(self) -> list[psutil.Process]:
        """The server's processes that still run, the main one first.

        Found by their process session, so that orphans of a dead main process are among them.
        """
        session = self.pid
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == session and not _is_zombie(process):
                    found.append(process)
        return sorted(found, key=lambda process: (process.pid != session, process.pid))

    def alive(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """The log since the last start."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def terminate(self, timeout_s: float = 300.0) -> Leftovers:
        """Sends SIGTERM to the main process, waits for the end, and reports what stayed.

        Raises:
            ServerError: it still runs after `timeout_s`; it is killed then.
        """
        tree, mapped = self.tree(), self._mapped_shared_memory()
        sent_at = time.monotonic()
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(
                f"still ran {timeout_s:.0f} s after SIGTERM:\n{self._tail()}"
            ) from None
        stop_s = time.monotonic() - sent_at
        others = [p for p in tree if p.pid != process.pid]
        _await_ends(others, _ENDS_S)
        _, running = psutil.wait_procs(others, timeout=_REAPED_S)
        own, foreign = _remove_sglang_own(mapped)
        left = Leftovers(
            exit_code=code,
            stop_s=stop_s,
            processes=[f"{p.pid} {_title(p)}" for p in running if not _is_zombie(p)],
            zombies=[f"{p.pid} {_title(p)}" for p in running if _is_zombie(p)],
            shared_memory=foreign,
            sglang_own=own,
        )
        _kill(running)
        self._forget()
        return left

    def kill(self) -> None:
        """Sends SIGKILL to the whole process tree and waits for its end."""
        if self._process is None:
            return
        mapped = self._mapped_shared_memory()
        tree = self.tree()
        self._process.kill()
        self._process.wait(_ENDS_S)  # reaped here, so that the exit code is kept
        _kill([process for process in tree if process.pid != self.pid])
        _remove_sglang_own(mapped)
        self._forget()

    def _stacks(self) -> str:
        """Ends the server and returns where the threads of its processes stood."""
        stuck, before = self.tree(), len(self.log())
        for process in reversed(stuck):  # SGLang's enable `faulthandler`: it prints at SIGABRT
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)
        _await_ends(stuck, _ENDS_S)
        return self.log()[before:][:_STACKS_CHARS]

    def _forget(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        _live.discard(self)

    def _running(self) -> subprocess.Popen[bytes] | ForkedServer:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    def _mapped_shared_memory(self) -> set[str]:
        mapped: set[str] = set()
        for process in self.tree():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                mapped |= {word for word in maps.split() if word.startswith("/dev/shm/")}
        return mapped

    def _tail(self) -> str:
        return self.log()[-_LOG_TAIL_CHARS:]


@functools.cache
def nursery_of(release: Path | None) -> Nursery:
    """What forks servers of a release; `FORK_SERVERS` says where."""
    name = f"zygote-{os.getpid()}{f'-{release.name}' if release else ''}.log"
    log_path, folder = ROOT / "build" / "logs" / name, Path(os.environ[FORK_SERVERS])
    return Nursery(on_path(server_environment(release, "cpu")), log_path, folder)


def server_environment(release: Path | None, device: str) -> dict[str, str]:
    """What every server of a release has; another one is found before the installed one."""
    base = dict(os.environ)
    if release is not None:
        paths = [str(release), base.get("PYTHONPATH", "")]
        base["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        base[launch.EXTENSIONS_VARIABLE] = launch.extensions_folder(release.name)
    return {**(launch.environment(base) if device == "cpu" else base), **_QUIET_ENVIRONMENT}


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return "?"


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _await_ends(processes, _ENDS_S)


def _await_ends(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    """Waits until processes have ended; whoever adopts their orphans may take long to reap them."""
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            select.select([pidfd], [], [], max(deadline_s - time.monotonic(), 0.0))
        finally:
            os.close(pidfd)


def _remove_sglang_own(mapped: set[str]) -> tuple[list[str], list[str]]:
    """Splits the files that still exist into SGLang's own leak and others; removes the former."""
    present = sorted(path for path in mapped if os.path.exists(path))
    own = [path for path in present if os.path.basename(path).startswith("sglang_loads_")]
    for path in own:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return own, [path for path in present if path not in own]


# Never through a proxy of the environment.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_live: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for server in list(_live):
        server.kill()
