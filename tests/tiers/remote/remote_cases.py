"""Records and servers for the tests of the remote stores."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    parse_header,
    write_meta,
)
from sglang_ext.tiers.remote import (
    GetRequest,
    GetResult,
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
from sglang_ext.tiers.remote.shares.division import Division
from tests.tiers.protection_cases import protected_store

NAMESPACE = hashlib.sha256(b"namespace").digest()
OTHER_NAMESPACE = hashlib.sha256(b"other namespace").digest()
ADAPTER = hashlib.sha256(b"adapter").digest()
PAGE_BYTES = 20_000
LONG_BYTES = 700_000  # several parts of PART_BYTES
PART_BYTES = 128 << 10
WAIT_S = 75.0

OK, MISSING, REJECTED = Outcome.OK, Outcome.MISSING, Outcome.REJECTED
KEPT, FULL, MALFORMED = Outcome.KEPT, Outcome.FULL, Outcome.MALFORMED
TIMEOUT, UNAVAILABLE = Outcome.TIMEOUT, Outcome.UNAVAILABLE


def payload(key: RemoteKey, num_bytes: int) -> bytes:
    """The right payload of a key; not the same at another length."""
    seed = b"".join((key.namespace, key.page_hash, key.lora, key.level.encode(), b"%d" % num_bytes))
    return hashlib.shake_128(seed).digest(num_bytes)


def make_item(
    number: int,
    num_bytes: int = PAGE_BYTES,
    *,
    namespace: bytes = NAMESPACE,
    lora: bytes = b"",
    codec: str = "raw",
    level: int = 0,
    quality: int = 0,
    filler: bytes | None = None,
) -> PutItem:
    """A record of page `number`; the array is longer than the record, as a slot is."""
    page_hash = hashlib.sha256(b"%d" % number).digest()
    key = RemoteKey(namespace, page_hash, lora, level_name(codec, level))
    record = np.full(num_bytes + 777, 0xAA, np.uint8)
    meta = RecordMeta(page_hash, namespace, lora, 64 * number, 64, "pre", codec, level, quality)
    write_meta(record, meta, num_bytes - HEADER_BYTES)
    data = filler or payload(key, num_bytes - HEADER_BYTES)
    record[HEADER_BYTES:num_bytes] = np.frombuffer(data, np.uint8)
    return PutItem(key, record)


def make_items(
    numbers: range | list[int], num_bytes: int = PAGE_BYTES, **how: Any
) -> list[PutItem]:
    """Records of several pages."""
    return [make_item(number, num_bytes, **how) for number in numbers]


def read(
    store: RemoteStore,
    items: list[PutItem],
    *,
    room: int = 0,
    timeout_s: float = WAIT_S,
    on_result: Callable[[int, GetResult], None] | None = None,
) -> list[Outcome]:
    """Reads what was stored; fails the test if anything that is reported OK is wrong."""
    outs = [np.full(room or item.record.size, 0xEE, np.uint8) for item in items]
    requests = [GetRequest(item.key, out) for item, out in zip(items, outs, strict=True)]
    results = store.get(requests, on_result, timeout_s)
    for item, out, result in zip(items, outs, results, strict=True):
        if result.outcome is OK:
            assert_right(item.key, out[: result.num_bytes])
    return [result.outcome for result in results]


def heads(
    store: RemoteStore, items: Sequence[PutItem], timeout_s: float | None = None
) -> list[Outcome]:
    """What the store says of the items without their bytes."""
    return [head.outcome for head in store.head([item.key for item in items], timeout_s)]


def assert_right(key: RemoteKey, record: ByteArray) -> None:
    """Fails unless the record is of the key and has the key's payload."""
    meta, payload_bytes = parse_header(record)
    assert record.size == HEADER_BYTES + payload_bytes
    found = RemoteKey(meta.namespace, meta.page_hash, meta.lora, level_name(meta.codec, meta.level))
    assert found == key
    assert record[HEADER_BYTES:].tobytes() == payload(key, payload_bytes)


def open_store(
    text: str,
    *,
    breaker: BreakerConfig | None = None,
    protect: tuple[str, *tuple[bytes, ...]] = ("plain",),
    division: Division | None = None,
    **changes: Any,
) -> RemoteStore:
    """Opens the store of a URL, with small parts and a breaker that is quick to try again."""
    url = parse_remote_url(text)
    config = RemoteStoreConfig.from_url(url)
    breaker = breaker or BreakerConfig(first_wait_s=0.05, max_wait_s=0.2)
    defaults: dict[str, Any] = {"part_bytes": PART_BYTES, "breaker": breaker, "timeout_s": WAIT_S}
    values = {name: getattr(config, name) for name in RemoteStoreConfig.__dataclass_fields__}
    return RemoteStore(
        config=RemoteStoreConfig(**(values | defaults | changes)),
        shown=url.shown,
        division=division,
        **protected_store(open_engine(url), *protect),
    )


@contextmanager
def opened_stores() -> Iterator[Callable[..., RemoteStore]]:
    """Opens stores as `open_store` does, and closes them at the end."""
    opened: list[RemoteStore] = []

    def open_one(url: str, **how: Any) -> RemoteStore:
        opened.append(open_store(url, **how))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@contextmanager
def opened_folder(folder: Path, query: str, **others: Any) -> Iterator[Callable[..., RemoteStore]]:
    """Opens stores over a folder that can be used; all are closed at the end.

    Args:
        folder: of their URL.
        query: of it, where none is given.
        others: arguments of `open_store`, where none are given.
    """
    with opened_stores() as open_one:

        def open_usable(query: str = query, **how: Any) -> RemoteStore:
            store = open_one(f"file://{folder}?{query}", **(others | how))
            assert store.wait_usable(WAIT_S)
            return store

        yield open_usable


def until(is_so: Callable[[], bool], timeout_s: float = 4 * WAIT_S) -> bool:
    """Waits for something that another thread or process brings about."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True
