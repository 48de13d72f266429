"""Aborts that come while a thread tokenises a request's text.

SGLang tells its scheduler of an abort at once, and the scheduler does not know the request yet. So
it is told again behind the request. Runs on the front process's event loop; imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class _Flight:
    """A client's request on its way to the scheduler; parts of it may be tasks of their own.

    Attributes:
        aborts_before: how often all requests had been aborted when the first of its texts went to a
            thread; None: none did.
    """

    aborts_before: int | None = None


_flight: ContextVar[_Flight | None] = ContextVar("hier_kv_flight", default=None)


def begin_flight() -> None:
    """A request arrived: what this task, or one made by it, tokenises and sends is of it."""
    _flight.set(_Flight())


def went_to_thread(manager: Any) -> None:
    """A text of the request is about to be tokenised on a thread.

    Args:
        manager: SGLang's `TokenizerManager`.
    """
    flight = _flight.get()
    if flight is not None and flight.aborts_before is None:
        flight.aborts_before = _num_aborts_of_all(manager)


def before_abort(self: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE hook of `TokenizerManager.abort_request`: counts the aborts of all requests."""
    if abort_all:
        self._hier_kv_aborts_of_all = _num_aborts_of_all(self) + 1


async def around_sending(original: Callable[..., Any], self: Any, tokenized: Any) -> Any:
    """AROUND hook of `TokenizerManager._send_one_request`, a coroutine."""
    return await _send(self, [tokenized.rid], original(self, tokenized))


async def around_sending_batch(original: Callable[..., Any], self: Any, tokenized: Any) -> Any:
    """AROUND hook of `TokenizerManager._send_batch_request`, a coroutine."""
    return await _send(self, [each.rid for each in tokenized], original(self, tokenized))


async def _send(manager: Any, rids: list[str], sending: Awaitable[Any]) -> Any:
    """Sends requests, and the aborts of them that the scheduler missed."""
    flight = _flight.get()
    before = None if flight is None else flight.aborts_before
    all_aborted = before is not None and before != _num_aborts_of_all(manager)
    states = {rid: manager.rid_to_state.get(rid) for rid in rids}
    aborted = {
        rid: state
        for rid, state in states.items()
        if state is not None and (all_aborted or state.abort_sent)
    }
    result = await sending
    for rid, state in aborted.items():
        state.abort_sent = False
        manager.abort_request(rid=rid)
    return result


def _num_aborts_of_all(manager: Any) -> int:
    return getattr(manager, "_hier_kv_aborts_of_all", 0)
