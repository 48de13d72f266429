"""Names and parts of stored values: pinned, for servers of different releases share a store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tiers.records.checks import verify
from sglang_ext.tiers.records.record import HEADER_BYTES, RecordMeta, VerifyResult, write_meta
from sglang_ext.tiers.remote.base import (
    Deadline,
    Fetch,
    RemoteEngine,
    RemoteKey,
    Usage,
    level_name,
    value_name,
)
from sglang_ext.tiers.remote.engines.redis_nodes import slot_of
from sglang_ext.tiers.remote.record_values import (
    MAX_RECORD_BYTES,
    HeaderFacts,
    checked_facts,
    part_names,
    split,
)
from sglang_ext.tiers.remote.remote_store import RemoteStore, RemoteStoreConfig
from tests.tiers.remote.remote_cases import ADAPTER, NAMESPACE, WAIT_S, make_item

PAGE = hashlib.sha256(b"1").digest()


def test_names_are_what_they_were() -> None:
    plain = RemoteKey(NAMESPACE, PAGE)
    assert value_name("hkv", plain) == f"hkv:1:{NAMESPACE.hex()}:{PAGE.hex()}:-:raw"
    key = RemoteKey(NAMESPACE, PAGE, ADAPTER, level_name("hier", 2))
    assert value_name("a", key) == f"a:1:{NAMESPACE.hex()}:{PAGE.hex()}:{ADAPTER.hex()}:hier.2"
    # The slot of a cluster, as `redis-cli cluster keyslot` computes it.
    assert slot_of("123456789") == 0x31C3


def test_a_name_is_short_and_plain() -> None:
    longest = RemoteKey(NAMESPACE, PAGE, ADAPTER, level_name("c" * 32, 255))
    name = value_name("p" * 32, longest)
    assert len(name) <= 290
    assert re.fullmatch(r"[A-Za-z0-9:._-]+", name)


@pytest.mark.parametrize(
    "key",
    [
        RemoteKey(b"short", PAGE),
        RemoteKey(NAMESPACE, PAGE + b"x"),
        RemoteKey(NAMESPACE, PAGE, b"x"),
        RemoteKey(NAMESPACE, PAGE, b"", ""),
        RemoteKey(NAMESPACE, PAGE, b"", "raw/../x"),
        RemoteKey(NAMESPACE, PAGE, b"", "a{b}"),
        RemoteKey(NAMESPACE, PAGE, b"", "é"),
    ],
)
def test_what_is_no_key_has_no_name(key: RemoteKey) -> None:
    with pytest.raises(ValueError, match=r"a key has|a level is"):
        value_name("hkv", key)


@given(num_bytes=st.integers(512, 40_000), part_bytes=st.integers(512, 20_000))
def test_parts_make_the_record_again(num_bytes: int, part_bytes: int) -> None:
    item = make_item(1, num_bytes)
    values = split("name", item.record, part_bytes)
    parts = [np.concatenate(value.pieces) for value in values]
    assert all(part.size == part_bytes for part in parts[:-1])
    assert 0 < parts[-1].size <= part_bytes
    whole = np.concatenate(parts)
    assert whole.size == num_bytes
    assert verify(whole, item.key.page_hash, NAMESPACE, b"") is VerifyResult.OK
    # A reader needs the first value alone to know the others.
    facts = checked_facts(parts[0], item.key)
    assert isinstance(facts, HeaderFacts)
    assert ["name", *part_names("name", facts, parts[0].size)] == [value.name for value in values]


def test_parts_are_named_after_the_checksum() -> None:
    item = make_item(1, 5000)
    names = [value.name for value in split("n", item.record, 2000)]
    checksum = xxhash.xxh3_64_intdigest(item.record[24:5000].tobytes())
    assert names == ["n", f"n/{checksum:016x}.1", f"n/{checksum:016x}.2"]


@given(st.binary(max_size=700))
def test_any_bytes_are_no_header(data: bytes) -> None:
    found = checked_facts(np.frombuffer(data, np.uint8), make_item(1).key)
    assert isinstance(found, VerifyResult)


def test_a_length_beyond_the_room_is_no_header() -> None:
    item = make_item(1, 5000)
    assert isinstance(checked_facts(item.record[:HEADER_BYTES], item.key, 5000), HeaderFacts)
    found = checked_facts(item.record[:HEADER_BYTES], item.key, 4999)
    assert found is VerifyResult.BAD_HEADER


class _Forger(RemoteEngine):
    """Says of every record that it is as long as any may be, whatever the parts."""

    max_value_bytes = 64 << 20
    keeps_ttl = True

    def __init__(self) -> None:
        self.num_deleted = 0

    def ping(self, deadline: Deadline) -> None: ...

    def fetch(
        self, fetches: Sequence[Fetch], on_fetched: Callable[[int, int], None], deadline: Deadline
    ) -> None:
        for position, fetch in enumerate(fetches):
            header = np.zeros(HEADER_BYTES, np.uint8)
            write_meta(header, RecordMeta(PAGE, NAMESPACE, b"", 0, 64, "pre"), 0)
            header[8:16] = np.frombuffer(np.uint64(MAX_RECORD_BYTES - HEADER_BYTES).tobytes(), "u1")
            fetch.out[:HEADER_BYTES] = header
            on_fetched(position, HEADER_BYTES)

    def put(self, *_: Any) -> None: ...

    def touch(self, *_: Any) -> None: ...

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        self.num_deleted += len(names)
        return 0

    def usage(self, deadline: Deadline) -> Usage:
        return Usage(0, 0)

    def close(self) -> None: ...


def test_a_forged_length_makes_no_millions_of_names() -> None:
    engine = _Forger()
    store = RemoteStore(engine, RemoteStoreConfig(part_bytes=64 << 10))
    try:
        assert store.wait_usable(WAIT_S)
        store.delete([RemoteKey(NAMESPACE, PAGE, b"", level_name("raw", 0))])
    finally:
        store.close()
    assert engine.num_deleted == 1
