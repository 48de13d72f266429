"""Coded pages on their way to a remote store: which are coded, and what is sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import (
    RAW_CODEC,
    ByteArray,
    RecordMeta,
    parse_header,
    read_meta,
)
from sglang_ext.tiers.remote.base import Outcome, RemoteKey, level_name
from sglang_ext.tiers.remote.items import PutItem
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.remote.staged import stage
from sglang_ext.tiers.store.books.loads import Loads
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.remote.coded_remote import RemoteCodec
from sglang_ext.tiers.store.remote.profiles import RemoteProfiles
from sglang_ext.tiers.store.remote.tenant_puts import TenantPuts
from sglang_ext.tiers.store.types import Hashes, KeySpace

logger = logging.getLogger(__name__)


class CodedUploads:
    """Codes pages and puts them into the remote store. One thread.

    A page is put raw where

    - the codec is lossy, and the page's values have been through a codec before;
    - the codec does not know the model yet;
    - coding the page fails, or does not make it smaller.
    """

    def __init__(
        self,
        table: PageTable,
        loads: Loads,
        remote: RemoteStore,
        codec: RemoteCodec,
        profiles: RemoteProfiles,
        decoded: DecodedPages,
    ) -> None:
        self._table, self._loads = table, loads
        self._remote = remote
        self._puts = TenantPuts(table, remote)
        self._codec = codec
        self._profiles = profiles
        self._decoded = decoded
        self._has_warned = False

    def upload(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, list[Outcome]]:
        """Puts those of the pages that are in DRAM, but those that the store has coded as well.

        Returns:
            u8 `[n, 32]`, the pages that were in DRAM, and one outcome each.
        """
        hashes, slots = self._loads.pin_present(space, hashes)
        try:
            arena = self._table.arena.slots
            pages = [arena[slot] for slot in slots.tolist()]
            metas = [read_meta(page) for page in pages]
            outcomes = self._stored(space, metas)
            wanted = [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.KEPT]
            coded = {at: self._encode(pages[at], metas[at]) for at in wanted}
            raw = [at for at, record in coded.items() if record is None]
            for at, outcome in zip(raw, self._put(space, [pages[at] for at in raw]), strict=True):
                outcomes[at] = outcome
        finally:
            self._loads.release(slots)  # raw pages were put; coded records are copies
        records = {at: record for at, record in coded.items() if record is not None}
        sent = self._put(space, list(records.values())) if self._has_profiles(records) else None
        for number, at in enumerate(records):
            outcomes[at] = sent[number] if sent is not None else Outcome.UNAVAILABLE
        return hashes, outcomes

    def _stored(self, space: KeySpace, metas: Sequence[RecordMeta]) -> list[Outcome]:
        """Looks each page up under the name that its coded record would have.

        Returns:
            KEPT for a page that need not be put: it may be coded, and the store has a record of it
            that can be decoded and is no worse than a new one would be. Else the outcome of the
            look-up, which `upload` replaces by that of the put.
        """
        level = level_name(self._codec.codec_id, self._codec.level)
        keys = [RemoteKey(space.digest, meta.page_hash, space.lora, level) for meta in metas]
        found = self._remote.head(keys)
        lost = self._lost_profiles([head.meta for head in found if head.meta is not None])
        outcomes: list[Outcome] = []
        for key, head, meta in zip(keys, found, metas, strict=True):
            outcome = head.outcome
            if head.meta is not None and head.meta.profile in lost:
                self._remote.reject(key, "profile")  # so that what is put takes its place
            elif head.meta is not None and self._may_code(meta):
                is_as_good = head.meta.quality <= max(meta.quality, self._codec.quality)
                outcome = Outcome.KEPT if is_as_good else outcome
            outcomes.append(outcome)
        return outcomes

    def _lost_profiles(self, metas: Sequence[RecordMeta]) -> set[bytes]:
        """Which profiles of stored records nobody can get any more who has not got them yet.

        Looking such records up keeps them young, so that they would stay, and be of no use.
        """
        by_profile = {meta.profile: meta for meta in metas}
        return {each for each, meta in by_profile.items() if self._profiles.is_lost(meta)}

    def _may_code(self, meta: RecordMeta) -> bool:
        return self._codec.quality == Quality.EXACT or self._decoded.may_lose(meta)

    def _encode(self, slot: ByteArray, meta: RecordMeta) -> ByteArray | None:
        """The staged record of a page; None when the page is to be put raw."""
        if not self._may_code(meta):
            self._table.counters.add("remote_kept_raw_pages")
            return None
        try:
            record = self._codec.encode(slot)
            if record is None:
                return None
            levels = self._codec.levels(record)
            staged = stage(record, levels.first, levels.ends)
            return staged if staged.size < parse_header(slot)[1] else None
        except Exception:
            self._table.counters.add("encode_failures")
            if not self._has_warned:
                self._has_warned = True
                logger.exception("hier-kv: a page could not be coded; such pages are uploaded raw")
            return None

    def _has_profiles(self, records: dict[int, ByteArray]) -> bool:
        metas = {meta.profile: meta for meta in map(read_meta, records.values())}
        return all(self._profiles.publish(meta) for meta in metas.values())

    def _put(self, space: KeySpace, records: Sequence[ByteArray]) -> list[Outcome]:
        items = [PutItem(_key(read_meta(record)), record) for record in records]
        outcomes = self._puts.put(space, items)
        sizes = np.array([512 + parse_header(record)[1] for record in records], np.int64)
        is_sent = np.array([outcome is Outcome.OK for outcome in outcomes], np.bool_)
        coded = [item.key.level != RAW_CODEC for item in items]
        self._table.counters.add("remote_bytes_out", int(sizes[is_sent].sum()))
        self._table.counters.add(
            "remote_coded_pages", int((is_sent & np.array(coded, np.bool_)).sum())
        )
        return outcomes


def _key(meta: RecordMeta) -> RemoteKey:
    level = level_name(meta.codec, meta.level)
    return RemoteKey(meta.namespace, meta.page_hash, meta.lora, level)
