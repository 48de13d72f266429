"""Servers' page stores that share one remote store, and code pages for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.codec.registry import kind_of
from sglang_ext.coded_remote.coded import coded_pages
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.layout import HEADER_BYTES, U8
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.records.record import parse_header, write_meta
from sglang_ext.tiers.store import EVERY_PAGE, PageStore, PageStoreConfig, Plan, PutShare
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from sglang_ext.tiers.transcoder import PageTranscoder
from tests.tiers.remote.remote_cases import WAIT_S, open_store, until
from tests.unit.codec.test_page_codec import LAYOUT, SHAPE, page

DIGEST = bytes(32)  # as `page` says
NONE = np.empty((0, 32), np.uint8)


def no_prefill(num_new: int, num_before: int) -> float | None:
    """Nobody has measured how long computing takes."""
    return None


def codec_of(
    codec_id: str, level: int | None = None, folder: Path | None = None, *, learns: bool = True
) -> RemotePageCodec:
    """A codec that has learned from 4,096 tokens, if it is to; learned once for all tests."""
    learned = _learned(codec_id) if learns and kind_of(codec_id) is not None else None
    return RemotePageCodec(SHAPE, codec_id, level, learned=learned, folder=folder)


@cache
def _learned(codec_id: str) -> Any:
    codec = RemotePageCodec(SHAPE, codec_id, None)
    for number in range(1000, 1064):
        assert codec.encode(page(number)) is None
    assert codec._learner is not None
    codec._learner.join()
    record = codec.encode(page(0))
    assert record is not None
    return codec._known.find(codec_id, parse_header(record)[0].profile)


def hashes_of(numbers: range) -> np.ndarray:
    """Page hashes, u8 [N, 32]."""
    rows = [number.to_bytes(32, "big") for number in numbers]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)


class Host:
    """A server's page store, with a codec for the shared store; with a disk if it gets a folder."""

    def __init__(
        self,
        url: str,
        codec: RemotePageCodec,
        *,
        slots: int = 160,
        prefill_s: Callable[[int, int], float | None] = no_prefill,
        slo_s: float | None = None,
        folder: Path | None = None,
        transcoder: PageTranscoder | None = None,
        timeout_s: float = WAIT_S,
        share: PutShare = EVERY_PAGE,
    ) -> None:
        self.arena = HostArena(slots, LAYOUT.slot_bytes)
        self.remote = open_store(url, timeout_s=timeout_s)
        self.codec = codec
        self.store = PageStore(
            self.arena,
            PageIndex(1024),
            DiskTier(DiskConfig(folder, 64 << 20, 0, segment_bytes=1 << 20)) if folder else None,
            PageStoreConfig(put_share=share),
            transcoder,
            remote=self.remote,
            open_coded=coded_pages(codec, prefill_s, slo_s),
        )
        self.store.open_namespace(DIGEST, {})
        self.space = self.store.space(DIGEST)
        assert self.remote.wait_usable(WAIT_S)

    def save(self, numbers: range, quality: int = 0, slots: dict[int, U8] | None = None) -> None:
        """Saves pages as the device would: those of `page`, or the slots that are given."""
        hashes = hashes_of(numbers)
        qualities = np.full(len(hashes), quality, np.uint8)
        ticket = self.store.begin_save(self.space, hashes, NONE, qualities)
        for at, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
            number = numbers[at]
            data = slots[number] if slots is not None else page(number)
            self.arena.slots[slot] = data
            set_quality(self.arena.slots[slot], quality)
        self.store.finish_save(ticket, ok=True)

    def count(self, name: str) -> int:
        """A counter."""
        return self.store.stats().get(name, 0)

    def uploaded(self, num: int) -> bool:
        """Waits until so many pages were stored."""
        return until(lambda: self.count("remote_written_pages") >= num)

    def fetch(self, numbers: range, max_quality: int = ANY) -> None:
        """Has a request wait for pages."""
        plan = self.plan(hashes_of(numbers), max_quality=max_quality)
        if plan is not None:
            assert until(lambda: plan.done), self.store.stats()
            self.store.cancel_plan(plan)

    def plan(
        self, hashes: np.ndarray, sizes: np.ndarray | None = None, *, max_quality: int = ANY
    ) -> Plan | None:
        """A request's plan, made when the remote store has said what it has."""
        if sizes is None:
            sizes = self.found(hashes, max_quality)
        return self.store.plan(self.space, hashes, max_quality, remote_sizes=sizes)

    def found(self, hashes: np.ndarray, max_quality: int = ANY) -> np.ndarray:
        """Bytes of pages that the remote store says it has; 0 for none."""
        remote_lookup = RemoteLookup(self.space, hashes, 0, max_quality)
        sizes = np.zeros(len(hashes), np.int64)
        if self.store.ask_remote(remote_lookup):
            assert until(lambda: remote_lookup.done)
            sizes[: len(remote_lookup.sizes)] = remote_lookup.sizes
        return sizes

    def ready(self, numbers: range, max_quality: int = ANY) -> int:
        """Leading pages that are in DRAM."""
        return self.store.ready_prefix(self.space, hashes_of(numbers), max_quality)

    def slots(self, numbers: range) -> list[U8]:
        """Copies of pages that must be in DRAM."""
        ticket = self.store.pin_ready(self.space, hashes_of(numbers))
        assert ticket is not None
        copies = [self.arena.slots[slot].copy() for slot in ticket.slots.tolist()]
        self.store.release(ticket.slots)
        return copies

    def close(self) -> None:
        """Ends it, and checks that nothing is left pinned."""
        self.store.close(5)
        assert self.store.wait_idle(300)
        self.store.check()
        assert not self.arena._pins.any()


def set_quality(slot: U8, quality: int) -> None:
    """Says in a page's header how good it is."""
    meta, payload_bytes = parse_header(slot)
    write_meta(slot, replace(meta, quality=int(quality)), payload_bytes)


def body(slot: U8) -> bytes:
    """Payload of a page."""
    return slot[HEADER_BYTES : HEADER_BYTES + parse_header(slot)[1]].tobytes()


def expected(codec: RemotePageCodec, number: int) -> bytes:
    """What a page is once it was coded and decoded."""
    record = codec.encode(page(number))
    assert record is not None
    out = np.zeros(LAYOUT.slot_bytes, np.uint8)
    assert codec.decode(record, out)
    return body(out)
