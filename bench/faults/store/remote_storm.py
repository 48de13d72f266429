"""Random faults of the stores that servers share: a folder, Redis behind a bad network, Mooncake.

A client puts records and reads them back through the facade that the page store uses. What it is
given must be right, nothing may be raised, and what a store took over must be there when the faults
are over.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bench.faults.store.schedule import HONEST, LATE_S, Schedule, error_of
from bench.faults.store.world import wait_until
from bench.faults.tally import Tallies, Tally
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, write_meta
from sglang_ext.tiers.remote import (
    GetRequest,
    Outcome,
    PutItem,
    RemoteKey,
    RemoteStore,
    RemoteStoreConfig,
    level_name,
    open_engine,
    parse_remote_url,
)
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.remote.engines import file_engine as file_engine_module
from testkit.remote.mooncake_server import MooncakeServer, mooncake_missing
from testkit.remote.proxy import Proxy
from testkit.remote.redis_server import RedisServer, redis_binary

_NAMESPACE = hashlib.sha256(b"bench.faults.remote").digest()
_RECORD_BYTES = 20_000
_LONG_BYTES = 300_000  # several values
_BATCH = 6
_CALL_S = 1.0
_PATIENT_S = 60.0


class RemoteClient:
    """Puts and gets records; checks what it gets.

    Args:
        url: of the store.
        seed: of what it does.
    """

    def __init__(self, url: str, seed: int) -> None:
        parsed = parse_remote_url(url)
        config = RemoteStoreConfig.from_url(parsed)
        values = {name: getattr(config, name) for name in RemoteStoreConfig.__dataclass_fields__}
        # Quick to try again: each round of faults is to meet a store that is in use.
        quick: dict[str, Any] = {
            "part_bytes": 128 << 10,
            "breaker": BreakerConfig(first_wait_s=0.02, max_wait_s=0.1),
            "timeout_s": _CALL_S,
            "full_wait_s": 0.05,
        }
        self.store = RemoteStore(
            open_engine(parsed), RemoteStoreConfig(**(values | quick)), shown=parsed.shown
        )
        self.tally = Tally()
        self.kept: set[int] = set()  # records that the store said it took
        self._random = random.Random(seed)
        self._next = 0

    def wait_usable(self) -> None:
        """Waits until the breaker is closed."""
        wait_until(lambda: self.store.usable, "a sound store is not used")

    def act(self) -> None:
        """Puts a batch or reads one."""
        try:
            if not self._next or self._random.random() < 0.4:
                numbers = list(range(self._next, self._next + self._random.randint(1, _BATCH)))
                self._next = numbers[-1] + 1
                self.put(numbers)
            else:
                self.get(self._random.choices(range(self._next), k=_BATCH), _CALL_S)
        except Exception as error:
            self.tally.failed_requests += 1
            print(f"a call of the remote store raised {error!r}")

    def put(self, numbers: list[int]) -> None:
        """Puts records."""
        outcomes = self.store.put([PutItem(_key(n), _record(n)) for n in numbers])
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.KEPT):
                self.kept.add(number)

    def get(self, numbers: list[int], timeout_s: float) -> list[Outcome]:
        """Reads records; counts what is wrong."""
        outs = [np.zeros(_LONG_BYTES, np.uint8) for _ in numbers]
        requests = [GetRequest(_key(n), out) for n, out in zip(numbers, outs, strict=True)]
        results = self.store.get(requests, None, timeout_s)
        for number, out, result in zip(numbers, outs, results, strict=True):
            if result.outcome is Outcome.OK:
                right = _record(number)[HEADER_BYTES:]
                found = out[HEADER_BYTES : result.num_bytes]
                self.tally.wrong_tokens += not np.array_equal(found, right)
        return [result.outcome for result in results]

    def count_lost(self) -> None:
        """Reads, now without faults, everything that the store took over."""
        for number in sorted(self.kept):
            outcome = Outcome.UNAVAILABLE
            while outcome not in (Outcome.OK, Outcome.MISSING, Outcome.REJECTED):
                self.wait_usable()
                (outcome,) = self.get([number], _PATIENT_S)
            self.tally.lost_acknowledged_pages += outcome is not Outcome.OK


def _key(number: int) -> RemoteKey:
    page = hashlib.sha256(b"remote %d" % number).digest()
    return RemoteKey(_NAMESPACE, page, b"", level_name("raw", 0))


def _record(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    key = _key(number)
    num_bytes = _LONG_BYTES if number % 9 == 8 else _RECORD_BYTES
    record = np.zeros(num_bytes, np.uint8)
    meta = RecordMeta(key.page_hash, _NAMESPACE, b"", 64 * number, 64, "pre")
    write_meta(record, meta, num_bytes - HEADER_BYTES)
    content = hashlib.shake_128(key.page_hash).digest(num_bytes - HEADER_BYTES)
    record[HEADER_BYTES:] = np.frombuffer(content, np.uint8)
    return record


def _book(tallies: Tallies, store: str, injected: Counter[str], harm: Tally) -> None:
    for kind, count in injected.items():
        if count:
            tally = tallies[f"{store}_{kind}"]
            tally.injected += count
            tally.wrong_tokens += harm.wrong_tokens
            tally.failed_requests += harm.failed_requests
            tally.lost_acknowledged_pages += harm.lost_acknowledged_pages


# ---- a folder ------------------------------------------------------------------------------------

_FOLDER_SHARE = 0.05
_OPERATIONS = {
    "open": "open", "preadv": "read", "writev": "write", "statvfs": "allocate", "link": "rename",
    "replace": "rename", "unlink": "unlink",
}  # fmt: skip


class ScheduledOs:
    """The module `os` with calls that fail as a schedule says."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        operation = _OPERATIONS.get(name)
        if operation is None:
            return call

        def may_fail(*args: Any, **kwargs: Any) -> Any:
            kind = self._schedule.draw(operation)
            if kind.endswith(("_short", "_late", "_corrupted")):
                self._schedule.met(kind)
                if kind.endswith("_short"):
                    args = (args[0], [args[1][0][: max(1, len(args[1][0]) // 2)]], *args[2:])
                elif kind.endswith("_late"):
                    time.sleep(LATE_S)
            elif kind:
                self._schedule.met(kind)
                raise error_of(kind)
            found = call(*args, **kwargs)
            if kind == "read_corrupted" and found:
                args[1][0][self._schedule.below(found)] ^= 1 << self._schedule.below(8)
            return found

        return may_fail


_FOLDER_KINDS = (
    *(kind for kind in HONEST if kind not in ("write_repeated", "sync_error", "truncate_error")),
    "read_corrupted",
)


def storm_folder(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Rounds over a folder whose file system fails."""
    schedule = Schedule(seed, _FOLDER_SHARE, _FOLDER_KINDS, is_on=False)
    shared = folder / "shared"
    shared.mkdir()
    client = RemoteClient(f"file://{shared}?size=1GB&free=1", seed)
    module: Any = file_engine_module
    module.os = ScheduledOs(schedule)
    try:
        client.wait_usable()
        while sum(schedule.injected.values()) < wanted:
            schedule.is_on = True
            client.act()
            schedule.is_on = False
            client.wait_usable()
    finally:
        module.os = os
    client.count_lost()
    client.store.close()
    _book(tallies, "folder", schedule.injected, client.tally)


# ---- Redis ---------------------------------------------------------------------------------------


def storm_redis(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Rounds over a Redis behind a network that cuts, delays, repeats, garbles and reorders.

    Some rounds freeze the server, or its network, until a call has felt it.
    """
    rng, injected = random.Random(seed), Counter[str]()
    networks: dict[str, dict[str, Any]] = {
        "replies_garbled": {"garbage_share": 0.15},
        "replies_repeated": {"repeated_share": 0.15},
        "replies_reordered": {"reordered_share": 0.3},
        "replies_late": {"late_share": 0.3},
        "connections_cut": {"drop_after_bytes": 60_000},
        "network_hung": {"stalls": True},
        "connections_refused": {"refuses": True},
        "server_hung": {},
    }
    with RedisServer(folder / "redis") as server, Proxy(server.port, seed=seed) as proxy:
        client = RemoteClient(f"redis://127.0.0.1:{proxy.port}", seed)
        client.wait_usable()
        while sum(injected.values()) < wanted:
            kind = rng.choice(list(networks))
            before = proxy.counts()
            if kind == "server_hung":
                server.process.freeze()
            elif kind == "connections_refused":
                proxy.drop_all()
            proxy.set(**networks[kind])
            for _ in range(1 if kind.endswith("hung") else 8):
                client.act()
            proxy.set(**{name: type(value)() for name, value in networks[kind].items()})
            server.process.thaw()
            proxy.drop_all()  # what is half-way on a connection is not the next round's
            after = proxy.counts()
            injected[kind] += after[kind] - before[kind] if kind in after else 1
            client.wait_usable()
        client.count_lost()
        client.store.close()
    _book(tallies, "redis", injected, client.tally)


# ---- Mooncake ------------------------------------------------------------------------------------


def storm_mooncake(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Kills Mooncake's client processes and freezes its master while it is used.

    Its transport is its own, so nothing can be put between. Where its node lives nothing is lost,
    but Mooncake may evict when it likes, so what is missing is not counted.
    """
    rng, injected = random.Random(seed), Counter[str]()
    os.environ.setdefault("GLOG_minloglevel", "2")  # Mooncake's client, in processes of its own
    with MooncakeServer(folder / "mooncake") as server:
        client = RemoteClient(server.url, seed)
        client.wait_usable()
        client.put(list(range(12)))
        while sum(injected.values()) < wanted:
            kind = rng.choice(("client_killed", "master_hung"))
            if kind == "client_killed":
                engine: Any = client.store._engine
                for process in (engine._reads, engine._writes):
                    if process._child is not None:
                        process._child.kill()
            else:
                server.master.freeze()
            client.act()
            server.master.thaw()
            injected[kind] += 1
            client.wait_usable()
            client.act()
        client.store.close()
    _book(tallies, "mooncake", injected, client.tally)


def storm_remotes(folder: Path, wanted: int, seed: int, tallies: Tallies) -> None:
    """Every store that can run here: half on a folder, half on Redis, a few on Mooncake."""
    storm_folder(folder, wanted // 2, seed, tallies)
    if redis_binary() is not None:
        storm_redis(folder, wanted // 2, seed, tallies)
    if not mooncake_missing():
        storm_mooncake(folder, max(2, wanted // 50), seed, tallies)
