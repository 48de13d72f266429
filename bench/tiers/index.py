"""Speed and memory of the page index, for the `tiers` case.

Every figure comes from a process of its own, so that memory is the growth of the resident set and
no table warms another's caches. A look-up that gives a wrong row ends the measurement.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.index import PageIndex

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
FILLS = (0.35, 0.7, 1.0)
BATCH = 4096
_NAMESPACE = 1
_MIN_PAGES_FOR_RSS = 500_000
_CHUNK = 1 << 14  # keys made at a time; one chunk is re-made from its own seed


def measure_index(sizes: Sequence[int] = SIZES, quick: bool = False) -> list[dict[str, Any]]:
    """Measure an index of each size.

    Args:
        sizes: Capacities, in pages.
        quick: Fewer repetitions; every key is kept.

    Returns:
        One dict per size:
        `pages`; `lookups_per_s`, the lower of the medians for hits and for misses, batches of 4096
        in random order in a full index; `bytes_per_page`, key included, the highest over the fills;
        `hit_lookups_per_s`, `miss_lookups_per_s`, `inserts_per_s`; `bytes_per_page_by_fill`;
        `samples`: the rates of each repetition.

    Raises:
        RuntimeError: The index gave a wrong answer, or a process failed.
    """
    return [_measure_size(size, quick) for size in sizes]


def _measure_size(pages: int, quick: bool) -> dict[str, Any]:
    by_fill = {fill: _in_new_process(pages, fill, quick) for fill in FILLS}
    full = by_fill[1.0]
    hit, miss = (float(np.median(full[name])) for name in ("hit", "miss"))
    bytes_by_fill = {str(fill): result["bytes_per_page"] for fill, result in by_fill.items()}
    return {
        "pages": pages,
        "lookups_per_s": min(hit, miss),
        "bytes_per_page": max(bytes_by_fill.values()),
        "hit_lookups_per_s": hit,
        "miss_lookups_per_s": miss,
        "inserts_per_s": full["inserts_per_s"],
        "bytes_per_page_by_fill": bytes_by_fill,
        "samples": {"hit": full["hit"], "miss": full["miss"]},
    }


def _in_new_process(pages: int, fill: float, quick: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.tiers.index", str(pages), str(fill), str(int(quick))],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Measuring an index of {pages:,} pages failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _measure(pages: int, fill: float, quick: bool) -> dict[str, Any]:
    """Run in a process of its own: fill an index, then look up."""
    for _ in range(3):  # afterwards interpreter, kernels and batches have their memory
        _fill(PageIndex(_CHUNK), _CHUNK)
    # The resident set moves by some 100 KB of its own: several small tables stand above that.
    num_tables = max(_MIN_PAGES_FOR_RSS // pages, 1)
    num = int(pages * fill)
    before_bytes = _resident_bytes()
    tables = [PageIndex(pages) for _ in range(num_tables)]
    insert_s = sum(_fill(table, num) for table in tables)
    result: dict[str, Any] = {
        "bytes_per_page": (_resident_bytes() - before_bytes) / (num * num_tables),
        "inserts_per_s": num * num_tables / insert_s,
    }
    if fill == 1.0:
        num_batches = 64 if quick else 256
        result.update(_lookups(tables[0], num, num_batches, repeats=3 if quick else 7))
    return result


def _fill(index: PageIndex, num: int) -> float:
    spent_s = 0.0
    for chunk in range(-(-num // _CHUNK)):
        hashes = _hashes(chunk)[: num - chunk * _CHUNK]
        start_s = time.perf_counter()
        rows = index.insert(hashes, _NAMESPACE).rows
        index.lru_add(rows)
        spent_s += time.perf_counter() - start_s
    if len(index) != num:
        raise RuntimeError(f"{num:,} pages were inserted and {len(index):,} are known.")
    return spent_s


def _lookups(index: PageIndex, num: int, num_batches: int, repeats: int) -> dict[str, list[float]]:
    # Rows were given in order of insertion, which tells the right answer beforehand.
    rows = np.random.default_rng(7).integers(0, num, num_batches * BATCH)
    known, _ = index.keys(rows)
    absent = np.random.default_rng(8).integers(0, 256, known.shape, dtype=np.uint8)
    _check_sample(index, num)
    return {
        "hit": [_rate(index, known, rows) for _ in range(repeats)],
        "miss": [_rate(index, absent, np.full(len(rows), -1)) for _ in range(repeats)],
    }


def _check_sample(index: PageIndex, num: int) -> None:
    """Look up freshly made keys, so that the keys compared are not the index's own copies."""
    for chunk in {0, (num - 1) // _CHUNK}:
        hashes = _hashes(chunk)[: num - chunk * _CHUNK]
        expected = chunk * _CHUNK + np.arange(len(hashes))
        if not np.array_equal(index.lookup(hashes, _NAMESPACE), expected):
            raise RuntimeError("The index gave a wrong row for a page it holds.")


def _rate(index: PageIndex, hashes: npt.NDArray[np.uint8], expected: npt.NDArray[Any]) -> float:
    batches = [hashes[first : first + BATCH] for first in range(0, len(hashes), BATCH)]
    start_s = time.perf_counter()
    found = [index.lookup(batch, _NAMESPACE) for batch in batches]
    spent_s = time.perf_counter() - start_s
    if not np.array_equal(np.concatenate(found), expected):
        raise RuntimeError("The index gave a wrong row in the timed look-ups.")
    return len(hashes) / spent_s


def _hashes(chunk: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([1, chunk]).integers(0, 256, (_CHUNK, 32), dtype=np.uint8)


def _resident_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no Rss line; Linux 4.14 or later is needed.")


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1")))
