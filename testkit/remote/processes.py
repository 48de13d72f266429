"""Child processes that serve on a port, ended for certain."""

from __future__ import annotations

import abc
import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class ServerError(RuntimeError):
    """A server did not start."""


class EndedWithBlock(abc.ABC):
    """A server, or several, that a `with` block kills at its end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kills it at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class Process:
    """One server process with its log in a file. Ends with the process that started it."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        # Debian's setpriv: the kernel kills the server when its parent dies, however it dies.
        setpriv = shutil.which("setpriv")
        self.command = [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *command]
        self._log = log
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, is_up: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Starts it and waits until `is_up` says so.

        Raises:
            ServerError: it ended, or is not up in time; the end of its log is in the message.
        """
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError):
                if is_up():
                    return
            if self._child.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                tail = self._log.read_text("utf-8", "replace")[-1500:]
                raise ServerError(f"{self.command[0]} did not start:\n{tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kills it at once and waits for its end."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGCONT)
            self._child.kill()
            self._child.wait()
            self._child = None

    def freeze(self) -> None:
        """Stops it without ending it: connections stay, answers do not come.

        Returns when all of its threads stand still: until then one may answer.
        """
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)
        while not _stands_still(self._child.pid):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets it go on."""
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None


def _stands_still(pid: int) -> bool:
    """Whether each thread of a process is stopped, or has ended."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                return False
    return True
