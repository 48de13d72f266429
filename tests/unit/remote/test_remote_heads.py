"""Headers in a store that are not those that were asked for: misses, each counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_ext.tiers.records.page_rules import AnyPage
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.records.record import HEADER_BYTES
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.base import value_name
from sglang_ext.tiers.store import Epoch, KeySpace
from sglang_ext.tiers.store.remote.remote_heads import RemoteHeads
from tests.faults.hostile_targets import DictEngine
from tests.tiers.protection_cases import OTHER_KEY, protected_store
from tests.tiers.remote.remote_cases import NAMESPACE, OK, WAIT_S, make_items

ITEMS = make_items(range(4))
NAMES = [value_name("hkv", item.key) for item in ITEMS]
HASHES = np.frombuffer(b"".join(item.key.page_hash for item in ITEMS), np.uint8).reshape(-1, 32)
SPACE = KeySpace(0, NAMESPACE, b"", Epoch())
Values = dict[str, bytes]


def opened(engine: DictEngine, mode: str, *keys: bytes) -> RemoteStore:
    store = RemoteStore(config=RemoteStoreConfig(), **protected_store(engine, mode, *keys))
    assert store.wait_usable(WAIT_S)
    return store


def stored(mode: str, *keys: bytes) -> Values:
    """What a server with these keys leaves in the store."""
    engine = DictEngine()
    store = opened(engine, mode, *keys)
    assert store.put(ITEMS) == [OK] * len(ITEMS)
    store.close()
    return engine.values


def another_pages(value: bytes) -> bytes:
    return stored("plain")[NAMES[3]]


def of_another_key(value: bytes) -> bytes:
    return stored("tag", OTHER_KEY)[NAMES[1]]


def without_a_tag(value: bytes) -> bytes:
    return stored("plain")[NAMES[1]]


def half_a_header(value: bytes) -> bytes:
    return value[: HEADER_BYTES // 2]


def a_bit_of_the_header(value: bytes) -> bytes:
    return value[:60] + bytes([value[60] ^ 1]) + value[61:]


@pytest.mark.parametrize(
    ("mode", "change", "kind"),
    [
        ("plain", another_pages, "foreign"),
        ("plain", half_a_header, "bad_header"),
        ("tag", of_another_key, "unknown_key"),
        ("tag", without_a_tag, "unprotected"),
        ("tag", a_bit_of_the_header, "unauthentic"),
    ],
)
def test_a_header_that_is_not_the_pages_is_a_miss_and_counted_once(
    mode: str, change: Callable[[bytes], bytes], kind: str
) -> None:
    engine = DictEngine()
    engine.values = stored(mode)
    engine.values[NAMES[1]] = change(engine.values[NAMES[1]])
    store = opened(engine, mode)
    heads = RemoteHeads(store, AnyPage())
    try:
        for _ in range(2):  # it is asked for when a request comes, and again before it is read
            assert len(heads.leading(SPACE, HASHES, ANY)) == 1
            assert heads.first(SPACE, HASHES[1:], ANY) == 1
        errors = {name: num for name, num in store.stats().items() if name.startswith("error_")}
        assert errors == {f"error_rejected_{kind}": 1}
        assert store.put(ITEMS)[1] is OK  # and gives way
        assert len(heads.leading(SPACE, HASHES, ANY)) == len(ITEMS)
    finally:
        store.close()


def test_what_is_behind_a_gap_is_not_judged() -> None:
    engine = DictEngine()
    engine.values = stored("plain")
    engine.values[NAMES[2]] = engine.values[NAMES[3]]
    del engine.values[NAMES[1]]
    store = opened(engine, "plain")
    try:
        assert len(RemoteHeads(store, AnyPage()).leading(SPACE, HASHES, ANY)) == 1
        assert not [name for name in store.stats() if name.startswith("error_")]
    finally:
        store.close()
