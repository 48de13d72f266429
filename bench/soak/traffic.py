"""What clients do in a round: chats and documents of three tenants, some of which give up.

Half of the requests have hints, some conversations are steered, and one chat outgrows its context.
A round's texts follow from its number, and each comes in two rounds, so that the second one finds
what the first left in DRAM, on disk or in the shared folder.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bench.soak import chats, wishes
from testkit.server import Server, ServerError
from testkit.workload import Reply, drive, load_tokenizer, make_workload, reply_of

_IN_FLIGHT = 4
_TENANTS = ("", "a", "b")
# A share of the requests gives up: told while it waits, told or hung up while it is answered.
_WAYS = (*("answered",) * 7, "aborted in the queue", "aborted running", "hung up")
_LONG_ANSWER = 128  # tokens: whoever gives up does so before the end of it
_TOKENIZER = load_tokenizer()


@dataclass
class Traffic:
    """One round on one server.

    Attributes:
        server: who is asked.
        has_tiers: whether it has the plugin, and so an endpoint to steer it.
        number: of the round; decides texts, tenants and who gives up.
        counts: requests by how they ended.
        reused: prompt tokens by the tier they came from.
    """

    server: Server
    number: int
    has_tiers: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, in_the_middle: Callable[[], None] | None = None) -> None:
        """Sends all requests; calls a function when half of them are answered, while others go on.

        Raises:
            ServerError, OSError: a request failed that nobody aborted.
        """
        workload = make_workload(
            num_chats=3,
            num_turns=2,
            num_documents=2,
            num_questions=2,
            max_new_tokens=8,
            seed=self.number // 2,
            tokenizer=_TOKENIZER,
        )
        half, begun = len(workload.order) // 2, threading.Event()

        def interrupt() -> None:
            begun.wait()
            if in_the_middle is not None:
                in_the_middle()

        with ThreadPoolExecutor(2) as helpers:
            asides = [helpers.submit(interrupt), helpers.submit(self._talk)]
            try:
                drive(
                    workload,
                    self._send,
                    in_flight=_IN_FLIGHT,
                    progress=lambda done, _: begun.set() if done >= half else None,
                )
            finally:
                begun.set()
        for aside in asides:
            aside.result()

    def _talk(self) -> None:
        told = chats.talk(self.server, self.number)
        with self._lock:
            self.counts += told

    def _send(self, name: str, prompt: list[int], num_tokens: int) -> Reply:
        rng = random.Random(f"{self.number} {name}")
        way = rng.choice(_WAYS)
        rid = f"soak-{self.number}-{name}"
        extra_key = _TENANTS[int(name.split("-")[1]) % len(_TENANTS)]
        hints = wishes.hints_of(rng)
        body: dict[str, Any] = {
            "input_ids": prompt,
            "rid": rid,
            **({"extra_key": extra_key} if extra_key else {}),
            "sampling_params": {
                "max_new_tokens": num_tokens if way == "answered" else _LONG_ANSWER,
                "ignore_eos": True,
                **({"custom_params": hints} if hints else {}),
            },
        }
        if way == "answered":
            reply = reply_of(self.server.generate(**body))
        elif way == "aborted in the queue":
            reply = self._abort_at_once(body)
        else:
            reply = self._give_up(body, hang_up=way == "hung up")
        said = wishes.steer(self.server, rng, prompt, extra_key) if self.has_tiers else ""
        with self._lock:
            self.counts[way] += 1
            self.counts["with hints"] += bool(hints)
            self.counts[said] += bool(said)
            self.reused.update(reply.by_tier)
        # A chat goes on with no more than was planned, or it would outgrow its context.
        return replace(reply, output_ids=reply.output_ids[:num_tokens])

    def _abort_at_once(self, body: dict[str, Any]) -> Reply:
        """An abort that races the request; it may come first, and is ignored then."""
        aborter = threading.Thread(target=self._abort, args=(body["rid"],))
        aborter.start()
        try:
            answer = self.server.generate(**body)
        except ServerError as error:  # an abort is answered with an error, or with what there is
            if "abort" not in error.body.lower():
                raise
            return Reply((), 0)
        finally:
            aborter.join()
        return Reply(tuple(answer.get("output_ids", ())), 0)

    def _give_up(self, body: dict[str, Any], *, hang_up: bool) -> Reply:
        """Takes one event of the answer; then hangs up, or aborts and reads to the end."""
        last: dict[str, Any] = {}
        stream: Any = self.server.stream(**body)
        with closing(stream):
            for event in _events(stream):
                if not last and not hang_up:
                    self._abort(body["rid"])
                last = event
                if hang_up:
                    break
        return Reply(tuple(last.get("output_ids", ())), 0)

    def _abort(self, rid: str) -> None:
        with suppress(ServerError, OSError):
            self.server.post("/abort_request", {"rid": rid})


def _events(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events of a stream that is an answer; an error in it ends it."""
    for event in stream:
        if "error" in event:
            return
        yield event
