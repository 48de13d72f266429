"""What the store's log says was acknowledged, and what is on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import xxhash

from bench.faults.tally import check
from sglang_ext.tiers.base import Location, ReadRequest
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.records.record import HEADER_BYTES, VerifyResult, parse_header

_GONE = ("lost", "reclaimed")
_LARGE_BYTES = 1 << 40


@dataclass
class Log:
    """The event logs of servers that ran one after another over one folder.

    Attributes:
        acknowledged: pages that are on disk, as the logs say.
        times_saved: how often each page was computed and saved.
        saves: pages of each save, in order.
    """

    acknowledged: set[str] = field(default_factory=set)
    times_saved: Counter[str] = field(default_factory=Counter)
    saves: list[list[str]] = field(default_factory=list)
    _read_to: dict[Path, int] = field(default_factory=dict)

    def follow(self, path: Path) -> None:
        """Reads what was added to a log since the last call; a last line may be cut short."""
        start = self._read_to.get(path, 0)
        data = path.read_bytes()[start:] if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        self._read_to[path] = start + len(complete)
        for line in complete.splitlines():
            self._apply(json.loads(line))

    def _apply(self, event: dict[str, object]) -> None:
        pages = event.get("pages")
        if not isinstance(pages, list):
            return
        kind = event["e"]
        if kind == "written":
            self.acknowledged.update(pages)
        elif kind in _GONE:
            self.acknowledged.difference_update(pages)
        elif kind == "saved":
            self.saves.append(pages)
            self.times_saved.update(pages)

    def wait_written(self, path: Path, pages: list[str], timeout_s: float) -> None:
        """Follows a log until it says that all of `pages` are on disk.

        Raises:
            FaultCheckError: it does not.
        """
        deadline = time.monotonic() + timeout_s
        while not self.acknowledged.issuperset(pages):
            check(time.monotonic() < deadline, f"not on disk within {timeout_s:.0f} s")
            time.sleep(0.02)
            self.follow(path)


@dataclass
class Seen:
    """A page's payload when it was first found on disk."""

    digest: int
    times_saved: int


class Auditor:
    """Compares what is on disk with what the logs say, and with what was there before."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def audit(self, folder: Path, log: Log, scratch: Path) -> tuple[set[str], set[str]]:
        """Recovers a copy of a dead server's folder and reads every page in it.

        The copy leaves the recovery of the folder itself to the next server.

        Returns:
            Pages that were acknowledged and are not there, and pages whose bytes have changed
            although they were not computed again.
        """
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(folder, scratch)
        try:
            found = self._read_all(scratch)
        finally:
            shutil.rmtree(scratch)
        changed = {page for page, digests in found.items() if self._changed(page, digests, log)}
        return log.acknowledged - set(found), changed

    def _read_all(self, folder: Path) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        config = DiskConfig(folder, max_bytes=_LARGE_BYTES, min_free_bytes=0, direct_io="off")
        with DiskTier(config) as tier:
            for path in sorted(folder.glob("*/ns.msgpack")):
                namespace = msgpack.unpackb(path.read_bytes())
                digest, slot_bytes = namespace["digest"], namespace["slot_bytes"]
                pages = tier.open_namespace(digest, slot_bytes, namespace["label"])
                out = aligned_array(slot_bytes)
                for row in range(len(pages)):
                    page = pages.hashes[row].tobytes()
                    at = Location(int(pages.segment[row]), int(pages.block[row]))
                    (result,) = tier.read(digest, [ReadRequest(at, page, b"", out)])
                    if result is not VerifyResult.OK:
                        continue  # the server would not find it either
                    payload_bytes = parse_header(out)[1]
                    payload = out[HEADER_BYTES : HEADER_BYTES + payload_bytes]
                    found.setdefault(page.hex(), set()).add(xxhash.xxh3_64_intdigest(payload.data))
        return found

    def _changed(self, page: str, digests: set[int], log: Log) -> bool:
        seen = self._seen.get(page)
        times_saved = log.times_saved[page]
        if seen is None or seen.times_saved != times_saved:
            self._seen[page] = Seen(min(digests), times_saved)
            return False
        return seen.digest not in digests
