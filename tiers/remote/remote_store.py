"""The facade of a remote store: records in, verified records out, whatever happens. Start here."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_ext.tiers.disk.counters import Counters
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, VerifyResult
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    Outcome,
    RemoteEngine,
    RemoteKey,
    value_name,
)
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.remote.get_call import GetState
from sglang_ext.tiers.remote.guard import Guard
from sglang_ext.tiers.remote.items import (
    GetRequest,
    GetResult,
    HeadResult,
    OnKnown,
    OnResult,
    PutItem,
)
from sglang_ext.tiers.remote.put_call import Writing
from sglang_ext.tiers.remote.ranges import RangeReading, RangeRequest
from sglang_ext.tiers.remote.record_values import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    HeaderFacts,
    checked_facts,
    has_too_many_parts,
    part_names,
)
from sglang_ext.tiers.remote.shares.allowance import UploadAllowance
from sglang_ext.tiers.remote.shares.division import Division
from sglang_ext.tiers.remote.staged import Stages, read_stages
from sglang_ext.tiers.remote.url_options import RemoteUrl

logger = logging.getLogger(__name__)

_MAX_NOTED = 65536


@dataclass(frozen=True)
class RemoteStoreConfig:
    """How a store is used.

    Attributes:
        prefix: in front of every name; deployments with different ones do not see each other.
        ttl_s: how long a value stays after it was stored or last used; 0 for no bound.
        timeout_s: longest time of a call that brings none of its own.
        write_bytes_per_s: a put may take longer than `timeout_s` by its bytes over this.
        part_bytes: longest value in the store; what is longer is split.
        max_calls: calls at once; one more is turned away with `BUSY`.
        full_wait_s: how long nothing is stored after the store said that it is full.
        breaker: when the store is no longer asked.
    """

    prefix: str = "hkv"
    ttl_s: float = 0.0
    timeout_s: float = 5.0
    write_bytes_per_s: float = 16e6
    part_bytes: int = 4 << 20
    max_calls: int = 8
    full_wait_s: float = 2.0
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    @classmethod
    def from_url(cls, url: RemoteUrl) -> RemoteStoreConfig:
        """The settings in a URL's query.

        Raises:
            TierConfigError: one of them cannot work.
        """
        names = {
            "prefix": "prefix",
            "ttl": "ttl_s",
            "timeout": "timeout_s",
            "part": "part_bytes",
            "calls": "max_calls",
        }
        given = {names[name]: value for name, value in url.options.items() if name in names}
        config = cls(**given)
        config.check()
        return config

    def check(self, engine: RemoteEngine | None = None) -> None:
        """Refuses settings that cannot work.

        Args:
            engine: what they are to be used with, if that is known.

        Raises:
            TierConfigError: one sentence.
        """
        if self.ttl_s and engine is not None and not engine.keeps_ttl:
            raise TierConfigError(
                "--hier-kv-remote-url: this store forgets by its own rules and takes no ttl; leave"
                " ttl= out"
            )
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise TierConfigError(
                f"--hier-kv-remote-url: part must be from {MIN_PART_BYTES} to {MAX_PART_BYTES}"
                f" bytes, got {self.part_bytes}; give another or leave it out"
            )


class RemoteStore:
    """A store that many servers share. Thread-safe; no method raises for what the store does.

    Calls block up to their time: never call from SGLang's scheduler thread. One thread of its own
    tries the store again while the breaker is open, and renews what was read where values have a
    TTL. A store that is down at start is found when it comes up.

    It has many methods because all that one may do with a store is here, the same for every engine.

    Attributes:
        is_divided: whether tenants have shares of the store, so that each `PutItem` says whose.
        counters: see `stats`.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        config: RemoteStoreConfig,
        *,
        seals: RecordSeals = CHECKSUMS,
        shown: str = "",
        division: Division | None = None,
    ) -> None:
        """Starts the store's thread, which connects. Does not block.

        Args:
            engine: what speaks to the store; closed by `close`.
            config: the settings.
            seals: what proves that records are whole, or whose they are.
            shown: the store's address without secrets, for logs.
            division: shares of it that tenants have; None without any.

        Raises:
            TierConfigError: a setting cannot work with this engine.
        """
        config.check(engine)
        self._engine = engine
        self._config = config
        self._seals = seals
        self._part_bytes = min(config.part_bytes, engine.max_value_bytes)
        self.counters = Counters()
        self._lock = threading.Lock()
        self._bad: OrderedDict[str, None] = OrderedDict()  # names; guarded by _lock
        self._used: OrderedDict[str, None] = OrderedDict()  # names to renew; guarded by _lock
        self._full_until_s = 0.0  # guarded by _lock
        self._on_known: OnKnown | None = None
        self.is_divided = division is not None
        self._allowance: UploadAllowance | None = None
        if division is not None and not engine.divide(division):
            self._allowance = UploadAllowance(division)
            logger.warning("hier-kv: %s %s (docs/quotas.md)", shown, _not_divided(engine))
        engine.begin()
        self._guard = Guard(
            engine,
            self.counters,
            config.breaker,
            max_calls=config.max_calls,
            probe_timeout_s=min(config.timeout_s, 2.0),
            shown=shown,
            upkeep=self._renew if config.ttl_s else None,
            upkeep_every_s=min(60.0, config.ttl_s / 4),
        )

    # ---- state ----

    @property
    def usable(self) -> bool:
        """Whether calls go to the store now; False while the breaker is open. Does not block."""
        return self._guard.usable

    def wait_usable(self, timeout_s: float) -> bool:
        """Waits until the store answers; False when that takes longer."""
        return self._guard.wait_usable(timeout_s)

    def watch(self, on_known: OnKnown) -> None:
        """Has somebody told how each key fared in calls from now on; it must return at once."""
        self._on_known = on_known

    def stats(self) -> dict[str, int]:
        """Counts since start and the breaker's state, flat; docs/remote.md lists the names."""
        totals, errors, dropped = self.counters.snapshot()
        stats = dict(totals)
        stats |= {f"error_{kind}": amount for kind, amount in errors.items()}
        stats |= {f"refused_{reason}": amount for reason, amount in dropped.items()}
        return stats | self._guard.stats()

    # ---- reads ----

    def get(
        self,
        requests: Sequence[GetRequest],
        on_result: OnResult | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Reads records and verifies every byte of them.

        Records arrive in the order of the requests, and each is reported when it is there, so a
        stream may be cut where time runs out: what was reported OK stays. A record longer than
        `part_bytes` may be reported after shorter ones that were asked for after it.

        Args:
            requests: what to read.
            on_result: told of each result at once; must be quick, for the link idles meanwhile.
            timeout_s: for the whole call; the store's own by default.

        Returns:
            One result a request, in order.
        """
        names = self._names([request.key for request in requests])
        reading = GetState(names, requests, on_result, self._part_bytes, self._seals)
        deadline = self._deadline(timeout_s)
        error = self._guard.run(
            lambda: reading.run(self._engine, deadline), failed=reading.is_all_garbage
        )
        reading.fill_up(error or Outcome.UNAVAILABLE)
        self._count_reads(reading)
        self._tell([item.key for item in requests], [item.outcome for item in reading.results])
        return reading.results

    def read_ranges(
        self,
        requests: Sequence[RangeRequest],
        on_result: OnResult | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Reads parts of values as they are: who asked verifies them, and says `reject`.

        Args:
            requests: what to read; of a record that is split, its first value only.
            on_result: as for `get`.
            timeout_s: for the whole call; the store's own by default.

        Returns:
            One result a request, in order.
        """
        names = self._names([request.key for request in requests])
        with self._lock:
            bad = {name for name in names if name in self._bad}
        reading = RangeReading(names, requests, bad, on_result)
        deadline = self._deadline(timeout_s)
        error = self._guard.run(lambda: reading.run(self._engine, deadline))
        reading.fill_up(error or Outcome.UNAVAILABLE)
        self.counters.add("range_reads", len(requests))
        self.counters.add("range_bytes", reading.num_bytes)
        read = zip(names, reading.results, strict=True)
        self._note_used([name for name, result in read if result.outcome is Outcome.OK])
        self._tell([item.key for item in requests], [item.outcome for item in reading.results])
        return reading.results

    def facts(
        self, start: ByteArray, key: RemoteKey, room_bytes: int
    ) -> HeaderFacts | VerifyResult:
        """What the header at the start of a value says, read with `read_ranges`.

        Args:
            start: u8 [any number]; stays as it is.
            key: what was asked for.
            room_bytes: no record may be longer.
        """
        return checked_facts(start, key, room_bytes, self._seals)

    def read_stages(self, start: ByteArray, key: RemoteKey, room_bytes: int) -> Stages:
        """What the first bytes of a staged record say, read with `read_ranges`.

        Args:
            start: u8 [at least `START_BYTES`]; stays as it is.
            key: what was asked for.
            room_bytes: no record may be longer.

        Raises:
            RecordError: they are no such bytes, of another version, damaged or forged.
        """
        plain, opener = self._seals.open_start(start, key.namespace)
        return replace(read_stages(plain, room_bytes), opener=opener)

    def reject(self, key: RemoteKey, kind: str) -> None:
        """What `read_ranges` brought is not what it should be: a miss until it is stored anew."""
        self.counters.error(f"rejected_{kind}")
        self._note_bad([name for name in self._names([key]) if name])
        self._tell([key], [Outcome.REJECTED])

    def rejected(self, keys: Sequence[RemoteKey]) -> list[bool]:
        """Which keys have a value that proved to be bad here and was not stored anew from here.

        Asks nobody. The next `put` of such a key takes the value's place.
        """
        names = self._names(keys)
        with self._lock:
            return [name in self._bad for name in names]

    @property
    def has_rejected(self) -> bool:
        """Whether there is any such key."""
        return bool(self._bad)

    @property
    def part_bytes(self) -> int:
        """Records that are longer may be split."""
        return self._part_bytes

    def transfer_timeout_s(self, num_bytes: int) -> float:
        """How long a call may take that moves so many bytes."""
        return self._config.timeout_s + num_bytes / self._config.write_bytes_per_s

    def head(self, keys: Sequence[RemoteKey], timeout_s: float | None = None) -> list[HeadResult]:
        """Reads the headers of records: which there are, how long and how good. One round trip.

        One that is not the key's is told of and not counted: who takes it for a miss says `reject`.
        """
        names = self._names(keys)
        heads = [_head_of(found) for found in self._facts(keys, names, self._deadline(timeout_s))]
        self._tell(keys, [head.outcome for head in heads])
        return heads

    # ---- writes ----

    def put(self, items: Sequence[PutItem], timeout_s: float | None = None) -> list[Outcome]:
        """Stores records that the store does not have as good yet.

        What is there stays, unless it is worse than the record (by the quality in its header), no
        record of this key, or proved to be damaged when it was read. A record that is not exact
        never overwrites a sound one, even if another server stores that at the same moment.

        Args:
            items: what to store.
            timeout_s: for the whole call; by default the store's own, and more for many bytes.

        Returns:
            One outcome an item: OK when it was stored, KEPT when it was there, OVER_SHARE when its
            tenant has to wait.
        """
        with self._lock:
            is_full = time.monotonic() < self._full_until_s
            bad = set(self._bad)
        if is_full:
            return self._count_puts([Outcome.FULL] * len(items), 0)
        names = self._names([item.key for item in items])
        writing = Writing(names, items, self._part_bytes, bad, self._seals, self._allowance)
        if timeout_s is None:
            timeout_s = self.transfer_timeout_s(writing.num_bytes)
        deadline = Deadline.after(timeout_s)
        error = self._guard.run(lambda: writing.run(self._engine, deadline))
        outcomes = writing.outcomes(error or Outcome.UNAVAILABLE)
        with self._lock:
            if Outcome.FULL in outcomes:
                self._full_until_s = time.monotonic() + self._config.full_wait_s
            for name in writing.stored:
                self._bad.pop(name, None)
        self._note_used(writing.kept)
        self._tell([item.key for item in items], outcomes)
        return self._count_puts(outcomes, writing.stored_bytes)

    @property
    def takes_ends(self) -> bool:
        """Whether `let_go` does anything."""
        return self._engine.takes_ends

    def let_go(
        self, keys: Sequence[RemoteKey], max_bytes: int, timeout_s: float | None = None
    ) -> bool:
        """Makes records the first to go, until somebody uses them. Best effort.

        Args:
            keys: of what is over; not all need be there.
            max_bytes: none of the records is longer.
            timeout_s: for the whole call; the store's own by default.

        Returns:
            Whether the store did it for all that it has.
        """
        if not (self.takes_ends and keys):
            return False
        deadline = self._deadline(timeout_s)
        names = self._names(keys)
        parts = self._part_names(keys, names, deadline) if max_bytes > self._part_bytes else []
        named = [name for name in [*parts, *names] if name]
        with self._lock:
            for name in named:
                self._used.pop(name, None)
        return self._guard.run(lambda: self._engine.let_go(named, deadline)) is None

    def delete(self, keys: Sequence[RemoteKey], timeout_s: float | None = None) -> int:
        """Removes records; returns how many there were, as far as the store said. Best effort."""
        deadline = self._deadline(timeout_s)
        names = self._names(keys)
        parts = self._part_names(keys, names, deadline)
        removed = [0]

        def remove() -> None:
            removed[0] = self._engine.delete([name for name in names if name], deadline)
            if parts:
                self._engine.delete(parts, deadline)

        self._guard.run(remove)
        return removed[0]

    def used_by_tenant(self) -> list[int]:
        """Bytes there of each tenant with a share, and first of all others; empty where unknown."""
        return self._engine.used_by_tenant()

    def close(self) -> None:
        """Ends the thread and the engine; later calls are misses. Safe to call twice."""
        self._guard.close()
        self._engine.close()

    # ---- private ----

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._config.timeout_s if timeout_s is None else timeout_s)

    def _tell(self, keys: Sequence[RemoteKey], outcomes: Sequence[Outcome]) -> None:
        if self._on_known is not None:
            self._on_known(keys, outcomes)

    def _names(self, keys: Sequence[RemoteKey]) -> list[str]:
        """Names of the keys; "" for one that is none."""
        names: list[str] = []
        for key in keys:
            try:
                names.append(value_name(self._config.prefix, key))
            except (ValueError, TypeError, AttributeError):
                names.append("")
        return names

    def _part_names(
        self, keys: Sequence[RemoteKey], names: Sequence[str], deadline: Deadline
    ) -> list[str]:
        """Names of the parts of those records that are there and were split."""
        parts: list[str] = []
        for name, found in zip(names, self._facts(keys, names, deadline), strict=True):
            if isinstance(found, HeaderFacts) and not has_too_many_parts(found, self._part_bytes):
                parts += part_names(name, found, self._part_bytes)
        return parts

    def _facts(
        self, keys: Sequence[RemoteKey], names: Sequence[str], deadline: Deadline
    ) -> list[HeaderFacts | VerifyResult | Outcome]:
        """What the headers of records say, what is wrong with them, or why there is none."""
        outs = np.zeros((len(keys), HEADER_BYTES), np.uint8)
        wanted = [index for index, name in enumerate(names) if name]
        fetches = [Fetch(names[index], outs[index]) for index in wanted]
        found: list[HeaderFacts | VerifyResult | Outcome] = [Outcome.MALFORMED] * len(keys)

        def on_fetched(position: int, num_bytes: int) -> None:
            index = wanted[position]
            if num_bytes == 0 or names[index] in bad:
                found[index] = Outcome.MISSING
            else:
                start = outs[index, :num_bytes]
                found[index] = checked_facts(start, keys[index], seals=self._seals)

        with self._lock:
            bad = {name for name in names if name in self._bad}
        for index in wanted:
            found[index] = Outcome.UNAVAILABLE
        error = self._guard.run(lambda: self._engine.fetch(fetches, on_fetched, deadline))
        if error is None:
            return found
        return [error if item is Outcome.UNAVAILABLE else item for item in found]

    def _count_reads(self, reading: GetState) -> None:
        self.counters.add("get_records", len(reading.results))
        self.counters.add("get_bytes", reading.num_bytes)
        for result in reading.results:
            self.counters.add(f"get_{result.outcome.value}")
        for kind in reading.rejected:
            self.counters.error(f"rejected_{kind}")
        self._note_bad(reading.bad)
        self._note_used(reading.used)

    def _count_puts(self, outcomes: list[Outcome], num_bytes: int) -> list[Outcome]:
        self.counters.add("put_records", len(outcomes))
        self.counters.add("put_bytes", num_bytes)
        for outcome in outcomes:
            self.counters.add(f"put_{outcome.value}")
        return outcomes

    def _note_bad(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._bad[name] = None
            while len(self._bad) > _MAX_NOTED:
                self._bad.popitem(last=False)

    def _note_used(self, names: Sequence[str]) -> None:
        if not self._config.ttl_s:
            return
        with self._lock:
            for name in names:
                self._used[name] = None
                self._used.move_to_end(name)
            while len(self._used) > _MAX_NOTED:
                self._used.popitem(last=False)

    def _renew(self) -> None:
        """Makes what was used since the last time young again; on the store's own thread."""
        with self._lock:
            names = list(self._used)
            self._used.clear()
        for first in range(0, len(names), 512):
            batch = names[first : first + 512]
            deadline = self._deadline(None)
            self._guard.run(lambda: self._engine.touch(batch, deadline))  # noqa: B023


def _not_divided(engine: RemoteEngine) -> str:
    """What an operator is told of shares in a store that decides itself what leaves."""
    if not engine.tells_size:
        return "does not say how full it is: shares of tenants do not hold there"
    return (
        "decides itself what leaves: while it is full, a tenant uploads from this server at most "
        "its share of the store's size in an hour"
    )


def _head_of(found: HeaderFacts | VerifyResult | Outcome) -> HeadResult:
    if isinstance(found, HeaderFacts):
        return HeadResult(Outcome.OK, found.meta, found.total_bytes)
    if isinstance(found, VerifyResult):
        return HeadResult(Outcome.REJECTED, rejected=found)
    return HeadResult(found)
