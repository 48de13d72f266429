"""The server that is warmed: sends it a document, and waits until its pages are stored."""

from __future__ import annotations

import contextlib
import http.client
import sys
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from sglang_ext.cli.server_stats import (
    ServerStatsError,
    address_of,
    ask,
    reason_of,
    server_info,
    states_of,
)
from sglang_ext.cli.warm.documents import Document

_READY = "/ready"
_STEER = "/hier_kv/steer"
_MOST_PAUSE_S = 0.5


class WarmError(ValueError):
    """A document is not warm; the message says why."""


class ServerGoneError(WarmError):
    """Nobody answers any more, or soon, so nothing else needs to be tried."""


class Served(NamedTuple):
    """What the server did with a document.

    Attributes:
        token_ids: of the prompt, as the model saw it.
        num_tokens: of the prompt.
        num_reused: of them that were not computed.
        by_tier: these by tier, as far as the server tells.
    """

    token_ids: list[int]
    num_tokens: int
    num_reused: int
    by_tier: Counter[str]


@dataclass(frozen=True)
class Keys:
    """SGLang's keys, empty for none.

    Attributes:
        api: of requests.
        admin: of the steering endpoint.
    """

    api: str = ""
    admin: str = ""


class WarmedServer:
    """A running server. Thread-safe: it keeps nothing that changes.

    Args:
        url: of it.
        keys: for it.
        timeout_s: of one request, and of what is waited for its pages.

    Raises:
        ServerStatsError: nobody answers there, or the plugin is off.
        WarmError: it does not say where pages lie, as to somebody without its admin key.
    """

    def __init__(self, url: str, keys: Keys, timeout_s: float) -> None:
        self._url, self._keys, self._timeout_s = url, keys, timeout_s
        info = server_info(url, keys.api, timeout_s)
        states = states_of(url, info)
        with _as_sglang(f"the state of {url}"):
            self.page_size = _number(states[0]["page_size"])
        self._priority = _lowest_priority(info)
        self._ask(_STEER, {"input_ids": [0], "locate": True}, keys.admin)

    def counts(self) -> Counter[str]:
        """The counters of all schedulers.

        Raises:
            ServerGoneError: nobody answers.
            WarmError: it says something else.
        """
        return sum(map(Counter, self._hosts()), Counter[str]())

    def _hosts(self) -> list[dict[str, int]]:
        """The counters of each scheduler."""
        try:
            info = server_info(self._url, self._keys.api, self._timeout_s)
            states = states_of(self._url, info)
        except ServerStatsError as error:
            raise ServerGoneError(str(error)) from error
        with _as_sglang(f"the state of {self._url}"):
            hosts = [state["host"].items() for state in states]
        return [{name: n for name, n in host if type(n) is int} for host in hosts]

    def warm(self, document: Document, pin_s: float | None) -> Served:
        """Sends a document, waits until it is stored, and pins it. Blocks.

        Raises:
            ServerGoneError: nobody answers, or the server is about to end.
            WarmError: it is not stored, or not pinned.
        """
        self._require_ready()
        served = self._send(document)
        if served.num_tokens < self.page_size:
            return served
        num_missing, have_ended = self._wait(document, served)
        if num_missing:
            why = (
                "there was no room for them; see --hier-kv-host-size"
                if have_ended
                else f"they were not saved in {self._timeout_s:g} s; run this again"
            )
            are = "is" if num_missing == 1 else "are"
            raise WarmError(
                f"{num_missing:,} of its pages {are} neither in DRAM nor on disk: {why}"
            )
        if pin_s is not None:
            self._steer(document, served, {"pin_s": pin_s})
        return served

    def _require_ready(self) -> None:
        """SGLang takes requests until it has none, and then ends, behind those that came late."""
        try:
            ask(address_of(self._url, _READY), self._keys.api)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise ServerGoneError(
                    f"{_READY} answers {error.code}: the server is about to end, or does not serve"
                ) from error
        except (OSError, ValueError, http.client.HTTPException):
            pass  # its answer is empty; what fails is said of the request

    def _send(self, document: Document) -> Served:
        body = document.body
        if self._priority is not None:
            body = {**body, "priority": self._priority}
        answer = self._ask(document.path, body, self._keys.api)
        with _as_sglang("the answer"):
            served, reason = _of_answer(answer)
        if reason:
            raise WarmError(reason)
        return served

    def _wait(self, document: Document, served: Served) -> tuple[int, bool]:
        """Waits for its pages, and for no save that was queued behind them.

        Returns:
            How many are not stored when there is nothing more to wait for, and whether all saves
            ended that were queued when it was answered.
        """
        deadline_s, pause_s = time.monotonic() + self._timeout_s, 0.02
        num_missing, have_ended = self._num_missing(document, served), False
        last = [queued + ended for queued, ended in self._saves()] if num_missing else []
        while num_missing and not have_ended:
            self._require_ready()  # a scheduler that has ended would leave the question unanswered
            # Asked for first: what is missing when its saves have ended stays missing.
            saves = zip(self._saves(), last, strict=True)
            have_ended = all(ended >= mine for (_, ended), mine in saves)
            is_late = time.monotonic() > deadline_s
            num_missing = self._num_missing(document, served)
            if is_late:
                break
            if num_missing and not have_ended:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return num_missing, have_ended

    def _saves(self) -> list[tuple[int, int]]:
        """Of each scheduler the saves that wait, and those that ended; they end in their order.

        Raises:
            WarmError: it does not say so.
        """
        try:
            return [(host["save_queue"], host["saves_ended"]) for host in self._hosts()]
        except KeyError as error:
            raise WarmError(
                f"its pages are not stored yet, and the server's state lacks {error}, which says "
                "whether they will be; use the hier-kv of the server's own release"
            ) from error

    def _num_missing(self, document: Document, served: Served) -> int:
        answer = self._steer(document, served, {"locate": True})
        with _as_sglang(f"the answer of {_STEER}"):
            found = [
                (each["pages"], each.get("host", 0), each.get("disk", 0))
                for each in answer["schedulers"]
            ]
            missing = [
                _number(pages) - _number(host) - _number(disk) for pages, host, disk in found
            ]
            return min(missing)  # of several schedulers one had the request

    def _steer(self, document: Document, served: Served, wish: dict[str, Any]) -> Any:
        body = {"input_ids": served.token_ids, **document.tenant, **wish}
        return self._ask(_STEER, body, self._keys.admin)

    def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        try:
            return ask(address_of(self._url, path), key, body, timeout_s=self._timeout_s)
        except urllib.error.HTTPError as error:
            raise WarmError(f"{path} answers {error.code}: {reason_of(error)}") from error
        except TimeoutError as error:
            raise WarmError(f"{path} did not answer in {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise WarmError(f"{path} did not answer in {self._timeout_s:g} s") from error
            raise ServerGoneError(f"{path} gives no answer ({error})") from error
        except (ValueError, RecursionError) as error:
            raise WarmError(f"{path} does not answer in JSON ({error})") from error


@contextlib.contextmanager
def _as_sglang(what: str) -> Iterator[None]:
    """Where what a server says is read.

    Raises:
        WarmError: it lacks something, or has something else in its place.
    """
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise WarmError(f"{what} lacks what SGLang's have ({error!r})") from error


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a whole number is expected, got {str(value)[:40]!r}")
    return value


def _lowest_priority(info: dict[str, Any]) -> int | None:
    """What lets everybody else go first; None where the server knows no priorities."""
    if not info.get("enable_priority_scheduling"):
        return None
    return sys.maxsize if info.get("schedule_low_priority_values_first") else -sys.maxsize - 1


def _of_answer(answer: Any) -> tuple[Served, str]:
    """What an answer says of its prompt, and why the prompt is not stored; empty where it is."""
    ended = answer["choices"][0] if "choices" in answer else answer
    meta = ended["meta_info"]
    report = (meta.get("cached_tokens_details") or {}).get("hier_kv") or {}
    tiers = ("device", "host", "disk", "remote")
    by_tier = Counter({tier: _number(report.get(tier, 0)) for tier in tiers})
    served = Served(
        ended["prompt_token_ids"],
        _number(meta["prompt_tokens"]),
        _number(meta["cached_tokens"]),
        by_tier,
    )
    why = meta["finish_reason"] or {}
    if why.get("type") == "abort":
        return served, f"the server ended the request: {why.get('message') or 'aborted'}"
    if report.get("dropped"):
        num_cut = _number(report["dropped"])
        return served, f"it is over the context length: {num_cut:,} tokens were cut"
    return served, ""
