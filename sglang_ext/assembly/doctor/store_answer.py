"""Whether the remote store of a URL answers, and how fast. Changes nothing there."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from typing import NamedTuple

from sglang_ext.tiers.remote import RemoteStoreConfig, RemoteUrl, open_engine, parse_remote_url
from sglang_ext.tiers.remote.base import Deadline, RemoteAuthError, RemoteError, Usage

_MOST_S = 5.0
_LOOKUP_S = 2.0  # more, for the name of its host
_NUM_TRIPS = 9


class StoreAnswer(NamedTuple):
    """What a store said.

    Attributes:
        shown: its URL without secrets.
        problem: why there is no answer; "" where there was one.
        is_locked_out: whether it answers, and wants another login.
        connect_s: until the first answer, with what it takes to connect.
        trip_s: median of the answers behind it.
        usage: how full it is, as far as it says.
    """

    shown: str
    problem: str = ""
    is_locked_out: bool = False
    connect_s: float = 0.0
    trip_s: float = 0.0
    usage: Usage = Usage(0, 0)


def ask_store(text: str) -> StoreAnswer:
    """Asks a store as a server that starts does. Blocks for about 7 s at most.

    Args:
        text: `--hier-kv-remote-url`.

    Raises:
        TierConfigError: the URL cannot work.
    """
    url = parse_remote_url(text)
    answers: queue.Queue[StoreAnswer | Exception] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(_answer_of(url))
        except Exception as error:  # raised where it is waited for
            answers.put(error)

    # Nothing ends a lookup of a name early. Who does not wait for it leaves it to this thread.
    threading.Thread(target=ask, name="hier-kv-doctor-store", daemon=True).start()
    try:
        answer = answers.get(timeout=_MOST_S + _LOOKUP_S)
    except queue.Empty:
        problem = f"nothing came within {_MOST_S + _LOOKUP_S:g} s; is the name of its host known?"
        return StoreAnswer(url.shown, problem)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer_of(url: RemoteUrl) -> StoreAnswer:
    deadline = Deadline.after(min(RemoteStoreConfig.from_url(url).timeout_s, _MOST_S))
    engine = open_engine(url)
    try:
        took_s = []
        for _ in range(1 + _NUM_TRIPS):
            began_s = time.perf_counter()
            engine.ping(deadline)
            took_s.append(time.perf_counter() - began_s)
        usage = Usage(0, 0)
        with contextlib.suppress(RemoteError):  # a login that may not ask for it
            usage = engine.usage(deadline)
    except RemoteError as error:
        is_locked_out = isinstance(error, RemoteAuthError)
        return StoreAnswer(url.shown, str(error), is_locked_out)
    finally:
        engine.close()
    connect_s, *trips_s = took_s
    return StoreAnswer(
        url.shown, connect_s=connect_s, trip_s=statistics.median(trips_s), usage=usage
    )
