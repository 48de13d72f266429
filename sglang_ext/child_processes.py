"""Processes that compute for a command, and end as soon as nobody waits for them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ChildProcesses(ProcessPoolExecutor):
    """An executor whose processes are killed where its `with` block ends with an exception.

    Python's own would wait for what they compute, which may take minutes after Ctrl-C. They do not
    hear Ctrl-C themselves, as each would tell of it with a traceback. However this process ends,
    they end, too: it starts them in the thread that submits, which has to stay as long as it does.
    """

    def __init__(
        self, num_processes: int, initializer: Callable[..., None] | None = None, *arguments: Any
    ) -> None:
        """Starts nothing yet.

        Args:
            num_processes: at a time.
            initializer: is called first in each of them.
            arguments: of that.
        """
        context = multiprocessing.get_context("spawn")  # of a fork, locks of threads may be held
        super().__init__(num_processes, context, _begin, (initializer, *arguments))
        self._others = set(multiprocessing.active_children())

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """As of the executor, which starts a process for it where all are busy."""
        with _interrupts_held():  # a process begins with what its parent holds back
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if kind is not None:
            for child in set(multiprocessing.active_children()) - self._others:
                child.kill()
        return super().__exit__(kind, error, trace)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Leaves Ctrl-C for later; it is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(initializer: Callable[..., None] | None, *arguments: Any) -> None:
    """A process begins."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it ended before
    if initializer is not None:
        initializer(*arguments)
