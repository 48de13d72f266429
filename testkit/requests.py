"""Requests to a server as the benches make them: timed, with where their tokens came from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testkit.dummy_model import VOCAB
from testkit.errors import UnexpectedAnswerError
from testkit.server import Server, ServerError

TIERS = ("device", "host", "disk", "remote")
_FIRST_ID, _POLL_S, _SETTLE_TIMEOUT_S = 16, 0.02, 300.0


@dataclass(frozen=True)
class Timed:
    """One answered request.

    Attributes:
        ttft_ms: from sending it until the first token came.
        cached: tokens of the prompt that were reused.
        by_tier: the same by tier; empty from a server without the plugin.
    """

    ttft_ms: float
    cached: int
    by_tier: dict[str, int]


def random_ids(rng: np.random.Generator, num: int) -> list[int]:
    """Token ids of a prompt that nobody sent before."""
    ids: list[int] = rng.integers(_FIRST_ID, VOCAB, num).tolist()
    return ids


def timed(server: Server, ids: Sequence[int], num_new: int = 1) -> Timed:
    """Sends a prompt as a stream and times its first token."""
    start_s = time.perf_counter()
    first_s, meta = 0.0, {}
    sampling = {"max_new_tokens": num_new, "ignore_eos": True}
    for event in server.stream(input_ids=ids, sampling_params=sampling):
        first_s = first_s or time.perf_counter()
        meta = event["meta_info"]
    return Timed(1e3 * (first_s - start_s), int(meta["cached_tokens"]), by_tier(meta))


def by_tier(meta: dict[str, Any]) -> dict[str, int]:
    """Reused tokens by tier, from an answer's `meta_info`."""
    details = meta.get("cached_tokens_details") or {}
    report = details.get("hier_kv") or {}
    return {tier: num for tier, num in report.items() if isinstance(num, int)}


def missed(meta: dict[str, Any]) -> dict[str, int]:
    """Tokens that were stored once and computed again, by reason, from an answer's `meta_info`."""
    details = meta.get("cached_tokens_details") or {}
    return dict((details.get("hier_kv") or {}).get("missed") or {})


def expect_tier(answer: Timed, tier: str, tokens: int, what: str) -> Timed:
    """The answer itself, if its whole prefix came from one tier.

    Raises:
        UnexpectedAnswerError: it did not, so its time would be reported for the wrong tier.
    """
    if tier == "recompute":
        if answer.cached:
            raise UnexpectedAnswerError(
                f"{what}: expected nothing reused, got {answer.cached} tokens"
            )
    elif answer.by_tier.get(tier) != tokens or answer.cached != tokens:
        raise UnexpectedAnswerError(
            f"{what}: expected {tokens} tokens from {tier}, got {answer.by_tier} "
            f"of {answer.cached} cached tokens"
        )
    return answer


def tier_state(server: Server) -> dict[str, Any]:
    """Counters of the tiers, from `/server_info`."""
    state: dict[str, Any] = server.get("/server_info")["internal_states"][0]["hier_kv"]
    return state


def num_on_their_way(host: Mapping[str, int]) -> int:
    """What is queued or under way, by the counters: saves, writes, deletions, lines of the log."""
    num_stored = host["save_queue"] + host["spill_queue_pages"] + host["clears_pending"]
    return num_stored + host.get("event_log_waiting_lines", 0)


def settle(server: Server) -> dict[str, Any]:
    """Waits until every save is done and written to disk; returns the counters.

    Raises:
        UnexpectedAnswerError: that takes unreasonably long.
    """
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    before: tuple[int, ...] | None = None
    while time.monotonic() < deadline_s:
        state = tier_state(server)
        host, disk = state["host"], state["disk"]
        now = (
            host.get("saved_pages", 0),
            host.get("written_pages", 0),
            int(disk.get("records_written", 0)),
            num_on_their_way(host),
        )
        if now == before and not now[-1]:
            return state
        before = now
        time.sleep(_POLL_S)
    raise UnexpectedAnswerError(
        f"saves did not end in {_SETTLE_TIMEOUT_S:.0f} s: {tier_state(server)}"
    )


def let_go(server: Server) -> None:
    """Waits until SGLang has let go of the batch of the last answer, which it sends a step before.

    It refuses to flush until then, and so does a change of weights. What asks for its state is
    answered in a step of its own.
    """
    for _ in range(2):
        server.get("/server_info")


def flush_device(server: Server) -> None:
    """Drops the device tier, on each scheduler as soon as it is idle enough to do so.

    Of several schedulers SGLang tells of the first one alone whether it did. So each is to wait by
    itself, which SGLang does where a time is given.
    """
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        try:
            server.post(f"/flush_cache?timeout={_SETTLE_TIMEOUT_S:.0f}")
        except ServerError as error:
            if time.monotonic() > deadline_s:
                raise UnexpectedAnswerError(f"/flush_cache was refused: {error}") from error
            time.sleep(_POLL_S)
        else:
            return


def cpu_seconds(server: Server) -> float:
    """CPU seconds, user and system, that all processes of a server have used so far."""
    total = 0.0
    for process in server.tree():
        times = process.cpu_times()
        total += times.user + times.system
    return total
