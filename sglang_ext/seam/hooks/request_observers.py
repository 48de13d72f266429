"""Calls functions with each request that a scheduler makes of a client's message.

Nothing is looked up here: `seam/cache.py` looks for a request's pages when it enters the queue
(`prefetch_from_storage`).

SGLang makes a request in several places: of a message alone, of a session's turn, of one whose
session is gone. All of them are inside its handling of the message, and before anything is looked
up by the request's key. Scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.seam.hooks.hooking import hook

_HANDLE = "sglang.srt.managers.scheduler.Scheduler.handle_generate_request"
_MAKE = "sglang.srt.managers.schedule_batch.Req.__init__"

Observer = Callable[[Any, Any, Any], None]


class RequestObservers:
    """Functions to call with each new request, and the message that is being handled."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._scheduler: Any = None
        self._message: Any = None

    def add(self, observer: Observer) -> None:
        """Calls a function with each new request from now on.

        Args:
            observer: takes the scheduler, the request, and the message that it is made of.
        """
        if not self._observers:
            hook(_HANDLE, self._around_handling, "around")
            hook(_MAKE, self._after_making)
        self._observers.append(observer)

    @property
    def scheduler(self) -> Any:
        """Whose request is being made; None: nobody's."""
        return self._scheduler

    def _around_handling(
        self, original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._scheduler, self._message = scheduler, recv_req
        try:
            return original(scheduler, recv_req, *args, **kwargs)
        finally:
            self._scheduler = self._message = None

    def _after_making(self, result: None, req: Any, *args: Any, **kwargs: Any) -> None:
        if self._message is not None:
            for observer in self._observers:
                observer(self._scheduler, req, self._message)


request_observers = RequestObservers()
