"""What a router makes of a server's KV events: which tokens it has, and in which medium.

with KvReader(endpoint) as reader:
    ...
    reader.prefix(ids, {"GPU", "CPU_PINNED"})  # tokens of the prompt that are there
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

_POLL_MS = 50
_WAIT_S = 300.0

Place = tuple[int | None, str, tuple[int, ...]]


def publishing(endpoint: str, event_format: str = "default", **more: int) -> list[str]:
    """Arguments of a server whose events come from there, in one of SGLang's formats."""
    events = {"publisher": "zmq", "topic": "kv", "endpoint": endpoint, "bind": True, **more}
    events["format"] = event_format
    return ["--kv-events-config", json.dumps(events)]


class KvIndex:
    """The blocks of one server, by what is in them. Not thread-safe.

    Args:
        heard_all: whether it reads all events from the first on; then one that cannot be is an
            error, as is a copy in a tier that is told of twice: some readers count them.
    """

    def __init__(self, *, heard_all: bool = True) -> None:
        self._heard_all = heard_all
        self.media: dict[int, set[str]] = {}  # by block
        self._blocks: dict[Place, int] = {}  # by parent, salt and tokens
        self._unplaced: set[int] = set()  # blocks behind one that was nowhere

    def apply(self, events: Iterable[Any]) -> None:
        """Goes on with some events.

        Raises:
            ValueError: a block is removed from where it is not, or comes to where it is.
        """
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.media.clear()
                self._blocks.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        if parent is not None and parent not in self.media:
            self._unplaced.update(event.block_hashes)
            return
        for index, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            self._blocks[parent, event.cache_salt or "", tokens] = block
            media = self.media.setdefault(block, set())
            # What SGLang says of the device is its own.
            if self._heard_all and _name(event.medium) in media - {"GPU"}:
                raise ValueError(f"{event.medium}: a block that is in {sorted(media)} comes there")
            media.add(_name(event.medium))
            parent = block

    def _remove(self, event: BlockRemoved) -> None:
        for block in event.block_hashes:
            media = self.media.get(block, set())
            if _name(event.medium) not in media:
                if not self._heard_all or block in self._unplaced:
                    continue
                raise ValueError(f"{event.medium}: a block that is in {sorted(media)} is removed")
            media.discard(_name(event.medium))
            if not media:
                del self.media[block]

    def blocks(self, ids: Sequence[int], page_size: int, salt: str = "") -> list[int]:
        """The blocks of a prompt's leading pages that were ever told of."""
        found: list[int] = []
        parent = None
        for first in range(0, len(ids) - page_size + 1, page_size):
            tokens = tuple(ids[first : first + page_size])
            parent = self._blocks.get((parent, salt, tokens))
            if parent is None:
                break
            found.append(parent)
        return found

    def prefix(self, ids: Sequence[int], page_size: int, media: set[str], salt: str = "") -> int:
        """Leading tokens of a prompt that lie in one of some media."""
        num_pages = 0
        for block in self.blocks(ids, page_size, salt):
            if not self.media.get(block, set()) & media:
                break
            num_pages += 1
        return num_pages * page_size


def _name(medium: Any) -> str:
    """As it is on the wire, of an event that never was there, too."""
    return str(getattr(medium, "value", medium))


class KvReader:
    """Follows a server's events on a thread, as SGLang's subscribers do.

    Args:
        endpoint: where the server publishes.
    """

    def __init__(self, endpoint: str) -> None:
        self.index = KvIndex(heard_all=False)  # guarded by lock
        self.lock = threading.Lock()
        self.error: Exception | None = None
        self._endpoint = endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.connect(self._endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        try:
            while not self._stop.is_set() and self.error is None:
                if socket.poll(_POLL_MS):
                    _, _, payload = socket.recv_multipart()
                    with self.lock:
                        self.index.apply(decoder.decode(payload).events)
        except Exception as error:  # for the test, which is on another thread
            self.error = error
        finally:
            socket.close(linger=0)
            context.term()

    @property
    def has_heard(self) -> bool:
        """Whether any event came."""
        with self.lock:
            return bool(self.index.media)

    def until(self, condition: Any) -> None:
        """Waits until the index is as it should be.

        Raises:
            TimeoutError: it never is.
        """
        deadline_s = time.monotonic() + _WAIT_S
        while True:
            if self.error is not None:
                raise self.error
            with self.lock:
                if condition(self.index):
                    return
            if time.monotonic() > deadline_s:
                raise TimeoutError("the events never told what was waited for")
            time.sleep(0.01)

    def prefix(self, ids: Sequence[int], page_size: int, media: set[str]) -> int:
        """`KvIndex.prefix`."""
        with self.lock:
            return self.index.prefix(ids, page_size, media)
