"""One server from start to end: rounds of traffic, what happens between them, readings at rest."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from bench.core.case import CaseFailedError
from bench.soak.gauges import Gauges, read, rest, wait_for
from bench.soak.probes import Probes
from bench.soak.traffic import Traffic
from bench.soak.world import HOST_PAGES, World
from testkit.kv_reader import KvIndex, KvReader
from testkit.ports import free_port
from testkit.requests import flush_device, tier_state
from testkit.server import Leftovers, Server, ServerError

_UPDATE_EVERY, _FLUSH_EVERY, _CLEAR_EVERY = 3, 2, 7  # rounds
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"  # SGLang's words
End = Literal["terminate", "kill"]


@dataclass
class Life:
    """What one server did and held.

    Attributes:
        end: how it ended.
        readings: one a round.
        ended_s: seconds of `time.monotonic` at the end of each round.
        counts: of requests by how they ended, and of what was done to the server.
        reused: prompt tokens by tier.
        counters: the plugin's, at the end.
    """

    end: End
    readings: list[Gauges] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class Soak:
    """Servers one after the other over the same folders.

    Attributes:
        world: what they share.
        probes: answers to compare.
        tell: is given a line after each round.
        lives: of the servers so far.
        num_rounds: of all lives so far.
    """

    world: World
    probes: Probes
    tell: Callable[[str], None]
    lives: list[Life] = field(default_factory=list)
    num_rounds: int = 0
    _key: str = ""  # of the last probes, with the bundled model

    def live(self, end: End, goes_on: Callable[[int], bool], *, beside_plain: bool = False) -> None:
        """Starts a server, and ends it when `goes_on`, given its number of rounds, says no.

        Args:
            end: how it is ended.
            goes_on: asked before each round.
            beside_plain: a plain server does each round's traffic and changes of weights, too, as
                torch and SGLang take memory of their own for them.

        Raises:
            CaseFailedError: an answer or a count was wrong, or the server did not end cleanly.
            ServerError, OSError: a request failed, or the server ended.
        """
        life = Life(end)
        self.lives.append(life)
        with ExitStack() as stack:
            events = f"tcp://127.0.0.1:{free_port()}"
            server = stack.enter_context(self.world.server(len(self.lives), events))
            reader = stack.enter_context(KvReader(events))
            plain = self.world.plain("first", "beside") if beside_plain else None
            if plain is not None:
                stack.enter_context(plain)
            model = "first"
            _join(server, reader)
            if self._key:
                self.probes.again(server, model, self._key)
            while goes_on(len(life.readings)):
                model = self._round(server, plain, life, model, reader)
            self._set_model(server, "first", flush=True)
            self._key = f"last of {len(self.lives)}"
            self.probes.new(server, "first", self._key)
            rest(server)
            life.counters = dict(tier_state(server)["host"])
            _check_log(server)
            if end == "terminate":
                _check_end(server.terminate(timeout_s=300.0))

    def _round(
        self, server: Server, plain: Server | None, life: Life, model: str, reader: KvReader
    ) -> str:
        """One round; returns which model the servers have then."""
        number, self.num_rounds = self.num_rounds, self.num_rounds + 1
        wanted = model
        if number % _UPDATE_EVERY == _UPDATE_EVERY - 1:
            wanted = "other" if model == "first" else "first"
            life.counts["weights changed under traffic"] += 1
        traffic = self._drive(server, number, model, wanted)
        rest(server)
        if plain is not None:
            self._drive(plain, number, model, wanted, has_tiers=False)
            flush_device(plain)
        if wanted != model or number % _FLUSH_EVERY == 0:
            flush_device(server)  # else nothing is reused behind a change that did not flush
            life.counts["device flushed"] += 1
        if number % _CLEAR_EVERY == _CLEAR_EVERY - 1:
            server.post("/hicache/storage-backend/clear")
            life.counts["storage cleared"] += 1
            reader.until(_knows_no_tier)
        self.probes.new(server, wanted, f"round {number}")
        rest(server)
        reader.until(lambda index: _num_in_dram(index) <= HOST_PAGES)
        self._read(server, plain, life, traffic)
        return wanted

    def _drive(
        self, server: Server, number: int, model: str, wanted: str, *, has_tiers: bool = True
    ) -> Traffic:
        """The traffic of a round, in the middle of which the model is changed if need be."""
        traffic = Traffic(server, number, has_tiers)
        if wanted == model:
            traffic.run()
        else:
            traffic.run(lambda: self._set_model(server, wanted, flush=number % 2 == 0))
        return traffic

    def _read(self, server: Server, plain: Server | None, life: Life, traffic: Traffic) -> None:
        life.counts += traffic.counts
        life.reused += traffic.reused
        life.readings.append(read(server, self.world.disk, self.world.remote, plain))
        life.ended_s.append(time.monotonic())
        _check_counters(tier_state(server)["host"])
        now = life.readings[-1]
        beside = f" (plain {now.plain_rss_mib:.0f})" if now.plain_rss_mib else ""
        self.tell(
            f"server {len(self.lives)}, round {self.num_rounds}: {now.rss_mib:.0f} MiB{beside}, "
            f"{now.fds} files, {now.threads} threads, disk {now.disk_mib:.0f} MiB, "
            f"remote {now.remote_mib:.0f} MiB"
        )

    def _set_model(self, server: Server, model: str, *, flush: bool) -> None:
        body = {"model_path": str(self.world.models[model]), "flush_cache": flush}
        try:
            server.post("/update_weights_from_disk", body)
        except ServerError as error:
            # A request whose client hung up may run on; the device is flushed when all is at rest.
            if _NOT_FLUSHED not in error.body:
                raise


def _join(server: Server, reader: KvReader) -> None:
    """Waits until events are read: SGLang's publisher drops what nobody has subscribed to yet."""
    number = itertools.count(1)

    def has_heard() -> bool:
        server.generate(input_ids=[next(number)] * 70, sampling_params={"max_new_tokens": 1})
        return reader.has_heard

    wait_for(has_heard, "the server's events are read")


def _knows_no_tier(index: KvIndex) -> bool:
    return not any(media - {"GPU"} for media in index.media.values())


def _num_in_dram(index: KvIndex) -> int:
    return sum("CPU_PINNED" in media for media in index.media.values())


def _check_counters(host: dict[str, int]) -> None:
    """Nothing failed, and nothing that was read was refused: the disk is honest."""
    bad = {
        name: value
        for name, value in host.items()
        if value and (name.endswith("_failures") or name.startswith(("rejected_", "damaged_")))
    }
    if bad:
        raise CaseFailedError(f"expected no failures on a machine without faults, got {bad}")


def _check_log(server: Server) -> None:
    """SGLang's checks said nothing; they would have ended the server, or warned."""
    found = [line for line in server.log().splitlines() if "leak" in line.lower()]
    if found:
        raise CaseFailedError(f"SGLang's checks found something: {found[:3]}")


def _check_end(left: Leftovers) -> None:
    if left.exit_code or not left.clean:
        raise CaseFailedError(f"a server that was told to end left this behind: {left}")
