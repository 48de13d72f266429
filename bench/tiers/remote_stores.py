"""Remote stores on loopback against the link and against what each store's own client reaches.

`python -m bench.tiers.remote_stores [--quick] [--json FILE]`, or `measure_stores` from a case.
Every byte that the facade reads is verified, which its limits do not do.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError, disk_folder
from bench.core.output import Progress, Table
from bench.core.stats import median
from sglang_ext.tiers.records.record import HEADER_BYTES, ByteArray, RecordMeta, write_meta
from sglang_ext.tiers.remote import (
    GetRequest,
    Outcome,
    PutItem,
    RemoteKey,
    RemoteStore,
    RemoteStoreConfig,
    open_engine,
    parse_remote_url,
)
from testkit.remote.mooncake_server import MooncakeServer, mooncake_missing
from testkit.remote.redis_server import RedisServer, redis_binary

# A page of the bundled model, and a chunk of 1,500 tokens of a 7B model at about 2 bits a value.
SIZES = {"260 KiB": 266_240, "24 MiB": 24 << 20}
_NAMESPACE = hashlib.sha256(b"bench").digest()
_WAIT_S = 60.0
Samples = dict[str, list[float]]


def measure_stores(repeats: int, num_bytes: int, progress: Progress) -> dict[str, Any]:
    """Measures puts and gets of `num_bytes` in records of each size, through each store.

    Args:
        repeats: rounds; limit and store take turns in each.
        num_bytes: bytes of one round.
        progress: where to say how far it is.

    Returns:
        `raw_socket_gb_s`: list; `stores`: {store: {size: {"put", "get", "limit_put",
        "limit_get", ...}}}, lists of GB/s with one value a round. The limit of Redis is
        `redis-benchmark` on one connection (set, get) and, as `redis_py_get`, the usual Python
        client; that of a folder is writing and reading files of the size; that of Mooncake its own
        client in this process.

    Raises:
        CaseFailedError: a record was not stored or came back otherwise than it was.
    """
    results: dict[str, Any] = {"raw_socket_gb_s": [], "stores": {}}
    for turn in range(repeats):
        progress.update(f"raw socket, round {turn + 1}")
        results["raw_socket_gb_s"].append(_raw_socket(num_bytes))
    with disk_folder("bench-remote-") as folder:
        for kind, serve in _servers().items():
            with serve(folder / kind) as (url, limits):
                results["stores"][kind] = {
                    name: _rounds(url, limits, size, num_bytes, repeats, progress, f"{kind} {name}")
                    for name, size in SIZES.items()
                }
    return results


Limits = Callable[[list[PutItem], list[ByteArray]], dict[str, float]]


def _servers() -> dict[str, Any]:
    servers: dict[str, Any] = {"file": _folder}
    if redis_binary():
        servers["redis"] = _redis
    if not mooncake_missing():
        servers["mooncake"] = _mooncake
    return servers


def _rounds(
    url: str,
    limits: Limits,
    size: int,
    num_bytes: int,
    repeats: int,
    progress: Progress,
    label: str,
) -> Samples:
    parsed = parse_remote_url(url)
    config = RemoteStoreConfig.from_url(parsed)
    count = max(1, num_bytes // size)
    items = [_item(number, size) for number in range(count)]
    outs = [np.zeros(size, np.uint8) for _ in items]
    samples: Samples = {}
    with _opened(RemoteStore(open_engine(parsed), config, shown=parsed.shown)) as store:
        # The round in front warms memory, connections and the store's own memory.
        for turn in range(repeats + 1):
            progress.update(f"{label}, round {turn}")
            items = [_renamed(item, turn) for item in items]
            found = _store_round(store, items, outs) | limits(items, outs)
            store.delete([item.key for item in items], _WAIT_S)
            for name, value in found.items() if turn else ():
                samples.setdefault(name, []).append(value)
    return samples


def _store_round(
    store: RemoteStore, items: list[PutItem], outs: list[ByteArray]
) -> dict[str, float]:
    total = sum(item.record.size for item in items)
    start = time.perf_counter()
    stored = store.put(items, _WAIT_S)
    middle = time.perf_counter()
    requests = [GetRequest(item.key, out) for item, out in zip(items, outs, strict=True)]
    results = store.get(requests, timeout_s=_WAIT_S)
    end = time.perf_counter()
    if {*stored, *(result.outcome for result in results)} != {Outcome.OK}:
        raise CaseFailedError(f"records were lost: {set(stored)}, {store.stats()}")
    for item, out in zip(items, outs, strict=True):
        if not (item.record[HEADER_BYTES:] == out[HEADER_BYTES:]).all():
            raise CaseFailedError("a record came back otherwise than it was stored")
    return {"get": total / (end - middle) / 1e9, "put": total / (middle - start) / 1e9}


def _renamed(item: PutItem, turn: int) -> PutItem:
    """The same record as another page, for stores that do not give up what was just read."""
    page_hash = hashlib.sha256(item.key.page_hash + b"%d" % turn).digest()
    meta = RecordMeta(page_hash, _NAMESPACE, b"", 0, 64, "pre")
    write_meta(item.record, meta, item.record.size - HEADER_BYTES)
    return PutItem(item.key._replace(page_hash=page_hash), item.record)


def _item(number: int, size: int) -> PutItem:
    page_hash = hashlib.sha256(b"%d of %d" % (number, size)).digest()
    record = np.empty(size, np.uint8)
    write_meta(record, RecordMeta(page_hash, _NAMESPACE, b"", 0, 64, "pre"), size - HEADER_BYTES)
    record[HEADER_BYTES:] = np.random.default_rng(number).integers(
        0, 256, size - HEADER_BYTES, np.uint8
    )
    return PutItem(RemoteKey(_NAMESPACE, page_hash), record)


@contextmanager
def _opened(store: RemoteStore) -> Iterator[RemoteStore]:
    try:
        if not store.wait_usable(_WAIT_S):
            raise CaseFailedError(f"the store does not answer: {store.stats()}")
        yield store
    finally:
        store.close()


# ---- the stores and their limits ----


@contextmanager
def _folder(path: Path) -> Iterator[tuple[str, Limits]]:
    path.mkdir()
    (path / "raw").mkdir()

    def limits(items: list[PutItem], outs: list[ByteArray]) -> dict[str, float]:
        total = sum(item.record.size for item in items)
        start = time.perf_counter()
        for number, item in enumerate(items):
            with (path / "raw" / str(number)).open("wb", buffering=0) as file:
                file.write(item.record.data)
        middle = time.perf_counter()
        for number, out in enumerate(outs):
            with (path / "raw" / str(number)).open("rb", buffering=0) as file:
                file.readinto(out.data)
        end = time.perf_counter()
        for number in range(len(items)):
            (path / "raw" / str(number)).unlink()
        return {
            "limit_put": total / (middle - start) / 1e9,
            "limit_get": total / (end - middle) / 1e9,
        }

    yield f"file://{path}?size=8GB&free=1MB", limits


@contextmanager
def _redis(path: Path) -> Iterator[tuple[str, Limits]]:
    with RedisServer(path) as server:

        def limits(items: list[PutItem], outs: list[ByteArray]) -> dict[str, float]:
            size = items[0].record.size
            found = _redis_benchmark(server.port, min(size, 4 << 20), len(items) * size)
            if importlib.util.find_spec("redis") is not None:
                found["redis_py_get"] = _redis_py(server.port, items)
            server.call("FLUSHALL")
            return found

        yield f"redis://127.0.0.1:{server.port}", limits


def _redis_benchmark(port: int, value_bytes: int, total: int) -> dict[str, float]:
    """GB/s of `redis-benchmark` with values as long as the longest that the tier stores."""
    count = max(16, total // value_bytes)
    command = ["redis-benchmark", "-p", str(port), "-c", "1", "-P", "4", "-t", "set,get", "--csv"]
    command += ["-d", str(value_bytes), "-n", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rates = {}
    for line in done.stdout.splitlines():
        verb, rate = (cell.strip('"') for cell in line.split(",")[:2])
        if verb in ("SET", "GET"):
            rates[verb] = float(rate) * value_bytes / 1e9
    return {"limit_put": rates["SET"], "limit_get": rates["GET"]}


def _redis_py(port: int, items: list[PutItem]) -> float:
    """GB/s of redis-py's pipeline of GETs, with its values copied to where they are wanted."""
    import redis

    client = redis.Redis(port=port)
    pieces = [
        item.record[first : first + (4 << 20)]
        for item in items
        for first in range(0, item.record.size, 4 << 20)
    ]
    for number, piece in enumerate(pieces):
        client.set(f"raw-{number}", piece.tobytes())
    out = np.zeros(max(piece.size for piece in pieces), np.uint8)
    start = time.perf_counter()
    for first in range(0, len(pieces), 4):
        pipeline = client.pipeline(transaction=False)
        for number in range(first, min(first + 4, len(pieces))):
            pipeline.get(f"raw-{number}")
        for value in pipeline.execute():
            out[: len(value)] = np.frombuffer(value, np.uint8)
    seconds = time.perf_counter() - start
    client.close()
    return sum(piece.size for piece in pieces) / seconds / 1e9


@contextmanager
def _mooncake(path: Path) -> Iterator[tuple[str, Limits]]:
    from mooncake.store import MooncakeDistributedStore

    with MooncakeServer(path, segment_bytes=2 << 30, lease_ms=5000) as server:
        client = MooncakeDistributedStore()
        master = f"127.0.0.1:{server.port}"
        client.setup("127.0.0.1", server.metadata, 0, 16 << 20, "tcp", "", master)
        memory = np.zeros(64 << 20, np.uint8)
        client.register_buffer(memory.ctypes.data, memory.size)
        turns = iter(range(10**6))

        def limits(items: list[PutItem], outs: list[ByteArray]) -> dict[str, float]:
            turn, size = next(turns), min(items[0].record.size, 16 << 20)
            count = memory.size // size
            names = [f"raw-{turn}-{number}" for number in range(count)]
            places = [memory.ctypes.data + number * size for number in range(count)]
            start = time.perf_counter()
            put = client.batch_put_from(names, places, [size] * count)
            middle = time.perf_counter()
            got = client.batch_get_into(names, places, [size] * count)
            end = time.perf_counter()
            if set(put) != {0} or set(got) != {size}:
                raise CaseFailedError(f"Mooncake's own client fails: {set(put)}, {set(got)}")
            total = count * size
            return {
                "limit_put": total / (middle - start) / 1e9,
                "limit_get": total / (end - middle) / 1e9,
            }

        try:
            yield server.url, limits
        finally:
            client.close()


def _raw_socket(num_bytes: int) -> float:
    """GB/s from one thread to another over a TCP connection on loopback."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listener.accept()
        piece = bytes(1 << 20)
        with connection:
            for _ in range(num_bytes >> 20):
                connection.sendall(piece)

    sender = threading.Thread(target=send)
    sender.start()
    view = memoryview(bytearray(1 << 20))
    total = 0
    with socket.create_connection(listener.getsockname()) as receiver:
        start = time.perf_counter()
        while got := receiver.recv_into(view):
            total += got
        seconds = time.perf_counter() - start
    sender.join()
    listener.close()
    return total / seconds / 1e9


def tables(results: dict[str, Any]) -> list[Table]:
    """The results for people: medians, and the ratio to each limit."""
    raw = median(results["raw_socket_gb_s"])
    table = Table(
        f"Remote stores on loopback, GB/s (raw socket {raw:.2f})",
        ("store", "record", "put", "of limit", "get", "of limit", "of socket", "redis-py get"),
    )
    for store, sizes in results["stores"].items():
        for size, found in sizes.items():
            value = {name: median(samples) for name, samples in found.items()}
            table.rows.append(
                (
                    store,
                    size,
                    value["put"],
                    value["put"] / value["limit_put"],
                    value["get"],
                    value["get"] / value["limit_get"],
                    value["get"] / raw,
                    value.get("redis_py_get"),
                )
            )
    return [table]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    parser.add_argument("--json", type=Path, help="file for the raw samples")
    arguments = parser.parse_args()
    with Progress() as progress:
        results = measure_stores(3 if arguments.quick else 9, 192 << 20, progress)
    for table in tables(results):
        print(table.render())
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
