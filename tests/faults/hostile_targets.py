"""The server's ways from bytes that somebody else wrote to rows of its pool, one a class."""

from __future__ import annotations

import abc
import contextlib
import shutil
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash

from sglang_ext.codec import CodecError
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.codec.page_codec import TAIL_LENGTH
from sglang_ext.coded_remote.lookup import Finder
from sglang_ext.coded_remote.publish import Publisher
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.coded_remote.run import parts_of
from sglang_ext.coded_remote.transfer import read_parts
from sglang_ext.device.layout import HEADER_BYTES, ROPE_BOUND, ROPE_DELTA, U8, write_tail
from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.errors import TierError
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.records.record import RAW_CODEC, RecordMeta, VerifyResult, parse_header
from sglang_ext.tiers.remote import (
    GetRequest,
    Outcome,
    PutItem,
    RemoteKey,
    RemoteStore,
    RemoteStoreConfig,
)
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteEngine,
    Usage,
    Value,
    level_name,
    value_name,
)
from sglang_ext.tiers.remote.staged import START_BYTES, stage
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.disk_coding import PageDecoder
from sglang_ext.tiers.store.events import EventLog
from sglang_ext.tiers.store.remote.profiles import RemoteProfiles, _key, _record
from sglang_ext.tiers.store.types import StoreCounters
from tests.faults.codec_mutations import Source, corrupt
from tests.faults.hostile_pages import (
    CODECS,
    LAYOUT,
    PAGE,
    SHAPE,
    SPACE,
    Device,
    codec_of,
    forge_header,
    page,
    page_hash,
    profile,
)
from tests.faults.record_mutations import (
    as_array,
    forge_tail,
    forged_page,
    forged_stages,
    number,
    resized,
    seal,
    seal_stages,
)
from tests.faults.record_mutations import (
    forge_header as forge_fields,
)
from tests.tiers.protection_cases import KEY, OTHER_KEY, protected_store

_SLOT = 1  # between two others
_NUM_PAGES = 4
_MAX_BYTES = (1 << 20) + 32 * LAYOUT.slot_bytes


class DictEngine(RemoteEngine):
    """Values in memory, which is enough for whoever forges them."""

    max_value_bytes = 64 << 20
    keeps_ttl = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`."""

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""
        for at, fetch in enumerate(fetches):
            part = self.values.get(fetch.name, b"")[fetch.offset :][: fetch.out.size]
            fetch.out[: len(part)] = np.frombuffer(part, np.uint8)
            on_fetched(at, len(part))

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`."""
        for at, value in enumerate(values):
            self.values[value.name] = b"".join(piece.tobytes() for piece in value.pieces)
            on_stored(at, True)

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`."""

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`."""
        return sum(self.values.pop(name, None) is not None for name in names)

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`."""
        return Usage(0, 0)

    def close(self) -> None:
        """See `RemoteEngine.close`."""


class Store:
    """A real store's facade over values that are forged one at a time."""

    def __init__(self, mode: str = "plain", key: bytes = KEY) -> None:
        self.engine = DictEngine()
        given = protected_store(self.engine, mode, key)
        self.remote = RemoteStore(config=RemoteStoreConfig(part_bytes=1 << 20), **given)
        assert self.remote.wait_usable(300.0)

    def hold(self, key: RemoteKey, value: bytes) -> None:
        """Has the store hold one value more; what was known of others is forgotten."""
        self.hold_named(value_name("hkv", key), value)

    def hold_named(self, name: str, value: bytes) -> None:
        """As `hold`, by the name that the engine knows."""
        with self.remote._lock:
            self.remote._bad.clear()
        self.remote._guard._note(ok=True)
        self.engine.values[name] = value

    def raw_page(self, at: int, device: Device) -> U8 | None:
        """As `RemotePages` fetches a page; None for a miss, otherwise its slot."""
        key = RemoteKey(SPACE.digest, page_hash(at), b"", RAW_CODEC)
        (head,) = self.remote.head([key])
        rules = device.copier.rules
        if head.meta is None or not rules.admits_header(head.meta, head.num_bytes - HEADER_BYTES):
            return None
        out: U8 = device.slots[_SLOT]
        (result,) = self.remote.get([GetRequest(key, out)])
        return out if result.outcome is Outcome.OK and rules.admits_page(out) else None


class Target(abc.ABC):
    """One way in.

    Attributes:
        name: for reports.
        weight: share of the cases.
        device: arena and pool.
        limit_bytes: more memory than an honest record takes.
    """

    name: str
    weight: float
    limit_bytes = _MAX_BYTES

    def __init__(self, device: Device) -> None:
        self.device = device

    @abc.abstractmethod
    def forge(self, random: Random) -> Any:
        """Something for `use`."""

    @abc.abstractmethod
    def use(self, forged: Any) -> Any:
        """What the server makes of it: None for a miss; otherwise all that can be seen of it."""

    def close(self) -> None:  # noqa: B027
        """Ends it."""

    def shown(self, number: int) -> bytes | None:
        """What a request sees of a page in the slot that it asked for."""
        loaded = self.device.load([_SLOT], number * PAGE)
        if loaded is None:
            return None
        if 0 < number <= _NUM_PAGES:
            self._check_neighbours(number)
        slot: bytes = self.device.slots[_SLOT].tobytes()
        return slot + loaded

    def _check_neighbours(self, number: int) -> None:
        """Honest pages are what they are, whatever page of the same prompt is between them.

        Raises:
            AssertionError: one of them is not.
        """
        pages = [_SLOT - 1, _SLOT, _SLOT + 1]
        beside = [pages[0], pages[2]]
        tenants = self.device.slots[beside].copy()
        self.device.slots[beside] = honest_page(number - 1), honest_page(number + 1)
        alone = [self.device.rows([slot], (number + slot - _SLOT) * PAGE) for slot in pages]
        assert None not in alone, f"{self.name}: an honest page is not loaded"
        together = self.device.rows(pages, (number - 1) * PAGE)
        assert together == [rows for one in alone for rows in one or []], (
            f"{self.name}: it changes another page of its prompt"
        )
        self.device.slots[beside] = tenants


@cache
def honest_page(number: int) -> U8:
    """As `page`, made once."""
    return page(number)


def honest_pages() -> list[U8]:
    """Pages of all kinds that this server stores, and one that it does not."""
    slots = [page(at, corrections) for at, corrections in ((0, 0), (1, 3), (2, 20))]
    for at, state, name in ((1, ROPE_BOUND, "bound"), (2, ROPE_DELTA, "delta")):
        slot = page(at, 0)
        payload_bytes = write_tail(slot, LAYOUT, rope_state=state, position=at * PAGE)
        forge_header(slot, payload_bytes, rope=name)
        slots.append(slot)
    return slots


def _number_of(slot: U8) -> int:
    return int.from_bytes(parse_header(slot)[0].page_hash, "big")


class RawPages(Target):
    """A raw page in a store."""

    name, weight = "raw", 40.0

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._store, self._pages = Store(), honest_pages()

    def forge(self, random: Random) -> tuple[int, bytes]:
        """A raw record."""
        slot = random.choice(self._pages)
        return _number_of(slot), forged_page(slot, random, LAYOUT)

    def use(self, forged: tuple[int, bytes]) -> bytes | None:
        """As a fetch brings it."""
        at, record = forged
        self._store.hold(RemoteKey(SPACE.digest, page_hash(at), b"", RAW_CODEC), record)
        return None if self._store.raw_page(at, self.device) is None else self.shown(at)

    def close(self) -> None:
        """See `Target.close`."""
        self._store.remote.close()


class KeyedPages(Target):
    """A raw page in a store of servers that have a key, which the writer has not."""

    weight = 10.0

    def __init__(self, device: Device, mode: str) -> None:
        super().__init__(device)
        self.name = f"keyed {mode}"
        self._store = Store(mode)
        self._names, self._values = self._honest(self._store)
        # What else a writer has: other pages, pages of another key, in the other mode, of none.
        self._others = list(self._values)
        for other_mode, key in ((mode, OTHER_KEY), ("tag", KEY), ("encrypt", KEY), ("plain", KEY)):
            other = Store(other_mode, key)
            self._others += self._honest(other)[1]
            other.remote.close()
        self._shown = [self._fetched(at) for at in range(len(self._names))]
        assert None not in self._shown

    @staticmethod
    def _honest(store: Store) -> tuple[list[str], list[bytes]]:
        names: list[str] = []
        for at in range(3):
            key = RemoteKey(SPACE.digest, page_hash(at), b"", RAW_CODEC)
            assert store.remote.put([PutItem(key, page(at))]) == [Outcome.OK]
            names += [name for name in store.engine.values if name not in names]
        return names, [store.engine.values[name] for name in names]

    def forge(self, random: Random) -> tuple[int, bytes]:
        """A page's number, and what lies there instead."""
        at = random.randrange(len(self._names))
        kind = random.random()
        if kind < 0.2:
            return at, forged_page(page(at), random, LAYOUT)
        value = self._values[at] if kind < 0.7 else random.choice(self._others)
        if kind < 0.45:
            changed = bytearray(value)
            _change_words(changed, 4, HEADER_BYTES, random)
            return at, bytes(changed)
        if kind < 0.6:  # the head of one and the rest of another
            cut = random.choice((24, 432, 440, 480, 496, HEADER_BYTES, len(value) // 2))
            return at, value[:cut] + random.choice(self._others)[cut:]
        return at, corrupt(value, random) if kind < 0.95 else value

    def use(self, forged: tuple[int, bytes]) -> bytes | None:
        """As a fetch brings it: the honest writer's page, or none."""
        at, value = forged
        self._store.hold_named(self._names[at], value)
        shown = self._fetched(at)
        assert shown in (None, self._shown[at]), f"{self.name}: a page nobody with the key wrote"
        return shown

    def _fetched(self, at: int) -> bytes | None:
        slot = self._store.raw_page(at, self.device)
        shown = None if slot is None else self.shown(at)
        return None if shown is None else shown[HEADER_BYTES:]

    def close(self) -> None:
        """See `Target.close`."""
        self._store.remote.close()


def forged_payload(payload: bytes, source: Source, random: Random) -> bytes:
    """A coded payload: its tail, its tail's length or its stream is another."""
    (tail_bytes,) = TAIL_LENGTH.unpack_from(payload)
    at = TAIL_LENGTH.size
    tail, stream = bytearray(payload[at : at + tail_bytes]), payload[at + tail_bytes :]
    kind = random.random()
    if kind < 0.4:
        forge_tail(tail, random, LAYOUT)
    elif kind < 0.8:
        stream = source.mutated(random)
    elif kind < 0.9:
        tail_bytes = number(random, tail_bytes) % 2**32
    else:
        tail += random.randbytes(random.choice((1, 4, 8, 4096)))
    return TAIL_LENGTH.pack(tail_bytes) + bytes(tail) + stream


class CodedRecords:
    """Honest coded records of one codec, and forgeries of them."""

    def __init__(self, codec: RemotePageCodec) -> None:
        self.records: list[U8] = []
        streams = []
        for slot in honest_pages()[:3]:
            record = codec.encode(slot)
            assert record is not None
            self.records.append(record)
            (tail_bytes,) = TAIL_LENGTH.unpack_from(record.data, HEADER_BYTES)
            streams.append(record[HEADER_BYTES + TAIL_LENGTH.size + tail_bytes :].tobytes())
        self._source = Source(streams, "HKVC")

    def forged(self, random: Random) -> tuple[int, bytes]:
        """A coded record, sealed, and which page it is of."""
        honest = random.choice(self.records)
        record = bytearray(honest[:HEADER_BYTES].tobytes())
        payload = honest[HEADER_BYTES:].tobytes()
        if random.random() < 0.7:
            payload = forged_payload(payload, self._source, random)
        struct.pack_into("<Q", record, 8, len(payload))
        record += payload
        if random.random() < 0.4:
            forge_fields(record, random)
        return _number_of(honest), resized(record, random)


class DiskPages(Target):
    """A record, raw or coded, that the disk or coded DRAM gave and that was verified."""

    name, weight = "disk record", 25.0

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._pages = honest_pages()
        self._coded = [CodedRecords(codec_of(codec_id)) for codec_id in CODECS]
        rules = device.copier.rules
        self._decoders = [
            PageDecoder(codec_of(codec_id), LAYOUT.slot_bytes, DecodedPages(), rules)
            for codec_id in ("hier", "zstd")
        ]
        self._decoders.append(PageDecoder(None, LAYOUT.slot_bytes, None, rules))

    def forge(self, random: Random) -> tuple[int, bytes, int]:
        """A record, and who decodes it."""
        which = random.choice((0, 0, 0, 1, 2))
        if random.random() < 0.3:
            slot = random.choice(self._pages)
            return _number_of(slot), forged_page(slot, random, LAYOUT), which
        return *random.choice(self._coded).forged(random), which

    def use(self, forged: tuple[int, bytes, int]) -> bytes | None:
        """As the promote threads bring it."""
        from sglang_ext.tiers.records.checks import verify

        at, record, which = forged
        slot = self.device.slots[_SLOT]
        part = as_array(record)[: slot.size]
        slot[: part.size] = part
        if verify(slot, page_hash(at), SPACE.digest, b"") is not VerifyResult.OK:
            return None
        quality, _ = self._decoders[which].decode(slot)
        shown = None if quality is None else self.shown(at)
        return None if shown is None else shown + bytes([quality or 0])


def forged_staged(codec: RemotePageCodec, record: U8, random: Random) -> bytes:
    """A staged record of a coded one; often something about its stages is forged.

    Raises:
        TierError, CodecError, ValueError, struct.error: the coded record has no stages.
    """
    levels = codec.levels(record)
    staged = bytearray(stage(record, levels.first, levels.ends).tobytes())
    if random.random() < 0.5:
        forged_stages(staged, random)
    if random.random() < 0.3:
        forge_fields(staged, random)
    if random.random() < 0.3:
        place = random.randrange(START_BYTES, len(staged))
        staged[place : place + 8] = random.randbytes(len(staged[place : place + 8]))
    seal_stages(staged)
    return seal(staged)


class CodedPages(Target):
    """A coded page in a store, with its levels."""

    weight = 10.0

    def __init__(self, device: Device, codec_id: str) -> None:
        super().__init__(device)
        self.name = f"staged {codec_id}"
        self._codec = codec_of(codec_id)
        self._level = level_name(codec_id, self._codec.level)
        self._store = Store()
        self._coded = CodedRecords(self._codec)
        profiles = RemoteProfiles(self._store.remote, self._codec)
        counters = StoreCounters()
        rules = device.copier.rules
        self._finder = Finder(
            self._store.remote, self._codec, profiles, counters, LAYOUT.slot_bytes, rules
        )
        books = Books(
            HostArena(2, LAYOUT.slot_bytes),
            PageIndex(16),
            disk_pages=None,
            write_policy="write_through",
            counters=counters,
            events=EventLog(""),
        )
        self._publisher = Publisher(books, self._store.remote, self._codec, DecodedPages(), rules)

    def forge(self, random: Random) -> tuple[int, bytes]:
        """A staged record."""
        record = random.choice(self._coded.records)
        at = _number_of(record)
        if random.random() < 0.5:  # the coded record is forged, and its stages are as they would be
            at, forged = self._coded.forged(random)
            record = as_array(forged)
        with contextlib.suppress(TierError, CodecError, struct.error, ValueError):
            return at, forged_staged(self._codec, record, random)
        record = random.choice(self._coded.records)
        return _number_of(record), forged_staged(self._codec, record, random)

    def use(self, forged: tuple[int, bytes]) -> list[bytes | None] | None:
        """As the streams bring it, at each of its levels."""
        at, record = forged
        hashes = np.frombuffer(page_hash(at), np.uint8)[None]
        key = RemoteKey(SPACE.digest, page_hash(at), b"", self._level)
        self._store.hold(key, record)
        found = self._finder.find(SPACE, hashes, ANY)
        shown: list[bytes | None] = []
        for each in found:
            for step in range(len(each.sizes)):
                self._store.hold(key, record)
                good = read_parts(self._store.remote, parts_of([each], step), lambda _: None)
                slot = self.device.slots[_SLOT]
                if good and self._publisher.decode(each, good[0], step, slot):
                    shown.append(self.shown(at))
        return shown or None

    def close(self) -> None:
        """See `Target.close`."""
        self._store.remote.close()


class Profiles(Target):
    """A profile in a store, and a page that it decodes."""

    name, weight = "profile", 4.0
    limit_bytes = 48 << 20

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._store = Store()
        self._source = Source([profile().to_bytes()], ">")

    def forge(self, random: Random) -> tuple[bytes, bytes, U8 | None]:
        """A file, the digest that names it, and a page coded with it if it can code one."""
        data = self._source.mutated(random)
        digest, record = profile().digest, None
        with contextlib.suppress(CodecError, MemoryError):
            own = Profile.from_bytes(data, None if len(data) > 1 << 20 else SHAPE_OF_MODEL)
            digest = own.digest
            record = RemotePageCodec(SHAPE, "hier", None, learned=own).encode(page(1))
        return data, digest, record

    def use(self, forged: tuple[bytes, bytes, U8 | None]) -> Any:
        """As a server obtains it that has none."""
        data, digest, record = forged
        codec = codec_of("hier", learned=False)
        meta = RecordMeta(page_hash(1), SPACE.digest, b"", PAGE, PAGE, "pre", "hier", 0, 1, digest)
        self._store.hold(_key(meta), seal(bytearray(_record(meta, data).tobytes())))
        if not RemoteProfiles(self._store.remote, codec).obtain(meta):
            return None
        assert codec.encode(page(1)) is None, "a foreign profile codes a page"
        slot = self.device.slots[_SLOT]
        if record is None or not codec.decode(record, slot):
            return True
        return self.device.copier.rules.admits_page(slot) and self.shown(1)

    def close(self) -> None:
        """See `Target.close`."""
        self._store.remote.close()


class Segments(Target):
    """A folder of the disk tier."""

    name, weight = "segment", 1.0
    limit_bytes = 64 << 20

    def __init__(self, device: Device, folder: Path) -> None:
        super().__init__(device)
        self._folder = folder
        self._decoder = PageDecoder(
            codec_of("hier"), LAYOUT.slot_bytes, DecodedPages(), device.copier.rules
        )
        self._honest = folder / "honest"
        disk = self._open(self._honest)
        disk.open_namespace(SPACE.digest, LAYOUT.slot_bytes, {})
        assert None not in disk.write(SPACE.digest, [page(at) for at in range(_NUM_PAGES)])
        disk.close()
        (segment,) = self._honest.glob("*/seg-*.hkv")
        self._segment = segment.relative_to(self._honest)
        self._bytes = segment.read_bytes()

    @staticmethod
    def _open(folder: Path) -> DiskTier:
        return DiskTier(DiskConfig(folder, 16 << 20, 0, segment_bytes=256 << 10, direct_io="off"))

    def forge(self, random: Random) -> bytes:
        """A segment's file: its header, table, trailer or a record is another."""
        data = bytearray(self._bytes)
        for _ in range(random.randrange(1, 3)):
            kind = random.random()
            if kind < 0.2:
                _change_words(data, 4, 64, random)
            elif kind < 0.6:
                end = len(data) - 128
                (offset,) = struct.unpack_from("<Q", self._bytes, len(self._bytes) - 104)
                _change_words(data, offset + 4, offset + 16 + 40 * _NUM_PAGES, random)
                struct.pack_into(
                    "<Q", data, end + 72, xxhash.xxh3_64_intdigest(bytes(data[offset:end]))
                )
            elif kind < 0.8:
                _change_words(data, len(data) - 124, len(data) - 48, random)
            else:
                at = random.randrange(_NUM_PAGES)
                start = 4096 + at * LAYOUT.slot_bytes
                record = forged_page(page(at), random, LAYOUT)[: LAYOUT.slot_bytes]
                data[start : start + len(record)] = record
        struct.pack_into("<Q", data, 64, xxhash.xxh3_64_intdigest(bytes(data[:64])))
        end = len(data) - 8
        struct.pack_into("<Q", data, end, xxhash.xxh3_64_intdigest(bytes(data[end - 120 : end])))
        if random.random() < 0.1:
            return corrupt(bytes(data), random)
        return bytes(data)

    def use(self, forged: bytes) -> Any:
        """As the next start finds it, and as its pages are read."""
        folder = self._folder / "case"
        shutil.copytree(self._honest, folder)
        (folder / self._segment).write_bytes(forged)
        disk = self._open(folder)
        shown = []
        try:
            found = disk.open_namespace(SPACE.digest, LAYOUT.slot_bytes, {})
            for at in range(min(len(found), 2 * _NUM_PAGES)):
                place = Location(int(found.segment[at]), int(found.block[at]))
                row, lora = found.hashes[at].tobytes(), found.lora[at].tobytes().rstrip(b"\0")
                slot = self.device.slots[_SLOT]
                request = ReadRequest(place, row, lora, slot, int(found.num_blocks[at]))
                (result,) = disk.read(SPACE.digest, [request])
                if result is VerifyResult.OK and self._decoder.decode(slot)[0] is not None:
                    shown.append(self.shown(int.from_bytes(row, "big") % (1 << 32)))
        finally:
            disk.close()
            shutil.rmtree(folder)
        return shown or None


def _change_words(data: bytearray, first: int, end: int, random: Random) -> None:
    width = random.choice((1, 2, 4, 8))
    at = random.randrange(first, end - width)
    old = int.from_bytes(data[at : at + width], "little")
    data[at : at + width] = (number(random, old) % (1 << 8 * width)).to_bytes(width, "little")


SHAPE_OF_MODEL = codec_of("hier")._learned_shape


def all_targets(kernels: str, folder: Path) -> list[Target]:
    """Every way in, into one device whose memory is guarded."""
    device = Device.guarded(_SLOT + 2, kernels)
    return [
        RawPages(device),
        DiskPages(device),
        *(KeyedPages(device, mode) for mode in ("tag", "encrypt")),
        *(CodedPages(device, codec_id) for codec_id in CODECS),
        Profiles(device),
        Segments(device, folder),
    ]
