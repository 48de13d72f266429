"""A bad network, and a Redis that hangs or dies, under the running server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.inject import Control, environment
from bench.faults.prompts import PROMPT_PAGES, Answer, References, ask
from bench.faults.running import START_S
from bench.faults.tally import Tallies, Tally, check
from testkit.remote.proxy import Proxy
from testkit.remote.redis_server import RedisServer
from testkit.requests import flush_device
from testkit.server import Server, ServerError

_PATIENCE_S = 300.0  # for a state that comes soon, on any machine
_OPTIONS = (
    *("--max-total-tokens", "8192", "--enable-hier-kv", "--hier-kv-host-size", "0.1"),
    *("--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "3000"),
)
_NETWORKS: dict[str, dict[str, Any]] = {
    "replies_garbled": {"garbage_share": 0.1},
    "replies_repeated": {"repeated_share": 0.1},
    "replies_reordered": {"reordered_share": 0.2},
    "replies_late": {"late_share": 0.3},
    "connections_cut": {"drop_after_bytes": 400_000},
    "network_hung": {"stalls": True},
    "connections_refused": {"refuses": True},
    "server_hung": {},
}


@dataclass
class RemoteFaults:
    """One server with DRAM and a Redis behind a network that fails.

    Attributes:
        folder: for everything written.
        prompts: those of which the reference with any number of cached pages is known.
        references: plain SGLang's answers.
        tallies: where results go.
    """

    folder: Path
    prompts: list[list[int]]
    references: References
    tallies: Tallies
    stalls: dict[str, Any] = field(default_factory=dict)

    def run(self, rounds: int, seed: int) -> None:
        """Goes through every kind of fault so often; notes the stalls of the scheduler."""
        self.folder.mkdir(parents=True)
        control = Control(self.folder / "control.json")
        with (
            RedisServer(self.folder / "redis") as self.redis,
            Proxy(self.redis.port, seed=seed) as self.proxy,
            Server(
                [
                    *_OPTIONS,
                    "--hier-kv-remote-url",
                    f"redis://127.0.0.1:{self.proxy.port}?timeout=2s",
                ],
                log_path=self.folder / "server.log",
                env=environment(self.folder / "plugin", control),
                start_timeout_s=START_S,
                stop="kill",
            ) as self.server,
        ):
            harmless = Tally()
            for prompt in self.prompts:
                self._ask(prompt, harmless)
            check(harmless.harmless, "answers were wrong before any fault")
            self._until(self._are_all_stored)
            kinds = [kind for kind in _NETWORKS for _ in range(rounds)]
            random.Random(seed).shuffle(kinds)
            for kind in kinds:
                self._meet(kind)
            self.stalls = control.report()["stalls"]

    def _meet(self, kind: str) -> None:
        """Empties device and DRAM, and asks for all prompts while the fault is in force."""
        tally = self.tallies[f"server_redis_{kind}"]
        self._forget()
        self._until(lambda: self._part("remote")["breaker_state"] == 0)
        before = self.proxy.counts()
        if kind == "server_hung":
            self.redis.process.freeze()
        self.proxy.set(**_NETWORKS[kind])
        if kind in ("connections_refused", "connections_cut"):
            self.proxy.drop_all()
        for prompt in self.prompts:
            self._ask(prompt, tally)
        self.proxy.set(**{name: type(value)() for name, value in _NETWORKS[kind].items()})
        self.redis.process.thaw()
        self.proxy.drop_all()
        met = self.proxy.counts().get(kind)
        tally.injected += len(self.prompts) if met is None else met - before[kind]

    def _ask(self, prompt: list[int], tally: Tally) -> Answer | None:
        try:
            answer = ask(self.server, prompt)
        except (ServerError, OSError):
            tally.failed_requests += 1
            return None
        tally.wrong_tokens += not self.references.agree(prompt, answer)
        return answer

    def _are_all_stored(self) -> bool:
        host = self._part("host")
        wanted = PROMPT_PAGES * len(self.prompts)
        return int(host.get("remote_written_pages", 0)) >= wanted

    def _forget(self) -> None:
        flush_device(self.server)
        self.server.post("/hicache/storage-backend/clear")
        flush_device(self.server)

    def _part(self, name: str) -> dict[str, Any]:
        state = self.server.get("/server_info")["internal_states"][0]["hier_kv"]
        return dict(state[name])

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            check(time.monotonic() < deadline_s, "the store is not used")
            time.sleep(0.02)
