"""Codec profiles in a remote store: what one server learned lets every other one decode.

A profile is a record of its own in the namespace of the pages that it is for, under a digest of
codec and profile digest. It is stored before the first page that names it.
"""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np

from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    VerifyResult,
    write_meta,
)
from sglang_ext.tiers.remote.base import Outcome, RemoteKey, level_name
from sglang_ext.tiers.remote.items import GetRequest, GetResult, PutItem
from sglang_ext.tiers.remote.ranges import RangeRequest
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.remote.coded_remote import RemoteCodec

_CODEC = "profile"  # stored; never rename
# Each server reads a profile only once, so a store may evict it; the uploading server renews it.
_LOOK_AFTER_S = 60.0
_TRY_AGAIN_S = 5.0
_MAX_NAMES = 1024  # from then on the oldest are forgotten


class RemoteProfiles:
    """Stores and fetches profiles. Thread-safe; blocks as long as the store takes."""

    def __init__(self, remote: RemoteStore, codec: RemoteCodec) -> None:
        self._remote = remote
        self._codec = codec
        self._obtaining = threading.Lock()
        self._lock = threading.Lock()
        self._next_look_s: dict[bytes, float] = {}  # by page hash of a profile; guarded by _lock
        self._next_try_s: dict[bytes, float] = {}

    def publish(self, meta: RecordMeta) -> bool:
        """Sees to it that others can decode a record of this header; False when they cannot."""
        name = _name(meta)
        if not meta.profile or not self._is_due(self._next_look_s, name, _LOOK_AFTER_S):
            return True
        is_stored = False
        try:
            is_stored = self._store(meta)
        finally:
            if not is_stored:  # also after an error: the next pages must not go without it
                with self._lock:
                    self._next_look_s.pop(name, None)
        return is_stored

    def is_lost(self, meta: RecordMeta) -> bool:
        """Whether who lacks a record's profile can get it nowhere: it is neither stored nor here.

        Where it is here it is stored anew, as far as there is room.
        """
        if self.publish(meta) or self._codec.knows(meta):
            return False
        (head,) = self._remote.head([_key(meta)])
        return head.outcome is Outcome.MISSING

    def obtain(self, meta: RecordMeta) -> bool:
        """Gets what is needed to decode a record of this header; False when it is not to be had."""
        if self._codec.knows(meta):
            return True
        with self._obtaining:  # who needs the same one waits for it
            return self._codec.knows(meta) or self._fetch(meta)

    def _fetch(self, meta: RecordMeta) -> bool:
        if not meta.profile or not self._is_due(self._next_try_s, _name(meta), _TRY_AGAIN_S):
            return False
        key = _key(meta)
        (head,) = self._remote.head([key])
        most = HEADER_BYTES + self._codec.max_profile_bytes(meta.codec)
        if head.rejected is not None:
            self._note_rejected(head.rejected.value)
            return False
        if head.meta is None:
            return False
        if not HEADER_BYTES < head.num_bytes <= most:
            self._note_rejected("profile")
            return False
        out = np.empty(head.num_bytes, np.uint8)
        result = self._read(key, out)
        if result.outcome is Outcome.REJECTED:  # on its way, perhaps
            result = self._read(key, out)
            if result.outcome is Outcome.REJECTED:
                self._remote.delete([key])  # for who has it to store it anew: they see its start
        if result.outcome is not Outcome.OK:
            return False
        if self._codec.learn(meta, out[HEADER_BYTES : result.num_bytes].tobytes()):
            return True
        self._remote.reject(key, "profile")  # not read again until it is stored anew
        return False

    def _note_rejected(self, kind: str) -> None:
        """Counts only: who has the profile stores it anew, and then it is to be read here."""
        self._remote.counters.error(f"rejected_{kind}")

    def _read(self, key: RemoteKey, out: ByteArray) -> GetResult:
        timeout_s = self._remote.transfer_timeout_s(out.size)
        (result,) = self._remote.get([GetRequest(key, out)], timeout_s=timeout_s)
        return result

    def _store(self, meta: RecordMeta) -> bool:
        # Reading some of it keeps it young, which asking whether it exists does not.
        key = _key(meta)
        start = RangeRequest(key, np.empty(HEADER_BYTES, np.uint8))
        (read,) = self._remote.read_ranges([start])
        if read.outcome is Outcome.OK:
            most = HEADER_BYTES + self._codec.max_profile_bytes(meta.codec)
            facts = self._remote.facts(start.out[: read.num_bytes], key, most)
            if not isinstance(facts, VerifyResult):
                return True
            # Of a server with another key or none, or forged: nobody here can use it.
            self._remote.reject(key, facts.value)
        try:
            profile = self._codec.profile(meta)
        except (LookupError, OSError):  # it is not here, or there is no room for its file
            return False
        (outcome,) = self._remote.put([PutItem(key, _record(meta, profile))])
        return outcome in (Outcome.OK, Outcome.KEPT)

    def _is_due(self, times: dict[bytes, float], name: bytes, pause_s: float) -> bool:
        """Whether the pause since the last time is over; begins another."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < times.get(name, 0.0):
                return False
            times.pop(name, None)
            while len(times) >= _MAX_NAMES:
                del times[next(iter(times))]
            times[name] = now_s + pause_s
        return True


def _name(meta: RecordMeta) -> bytes:
    return hashlib.sha256(b"%s:%s" % (meta.codec.encode(), meta.profile)).digest()


def _key(meta: RecordMeta) -> RemoteKey:
    return RemoteKey(meta.namespace, _name(meta), b"", level_name(_CODEC, 0))


def _record(meta: RecordMeta, profile: bytes) -> np.ndarray:
    record = np.empty(HEADER_BYTES + len(profile), np.uint8)
    described = RecordMeta(
        _name(meta), meta.namespace, b"", 0, 0, "pre", codec=_CODEC, profile=meta.profile
    )
    write_meta(record, described, len(profile))
    record[HEADER_BYTES:] = np.frombuffer(profile, np.uint8)
    return record
