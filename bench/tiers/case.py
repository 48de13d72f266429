"""The case `tiers`: copies with rotation against memcpy, the disk against raw I/O, the index.

The disk is measured empty and full, coded DRAM full.

All figures are of one core for the copies, and of the disk tier's own number of threads for the
disk. Runs of the things compared alternate, and medians are compared.
"""

from __future__ import annotations

import math
from typing import Any

from bench.core.case import Options, Report
from bench.core.output import Table
from bench.core.plots import plot_bars
from bench.core.speed import MEMCPY_BYTES
from bench.core.stats import median, median_interval
from bench.tiers.coded_host import SIZES as CODED_SIZES
from bench.tiers.coded_host import measure_placing
from bench.tiers.copy import SHAPES, measure_copies
from bench.tiers.disk import HELPER_THREADS, SLOT_SIZES, measure_disk
from bench.tiers.full_disk import measure_full_disk
from bench.tiers.index import measure_index

_HEADLINE_SHAPE = "16x8x64 eager"
_HEADLINE_SLOT = "2 MiB"
_SAVE_TARGET, _LOAD_TARGET, _DISK_TARGET = 0.2, 0.5, 0.8
_LOOKUPS_TARGET, _BYTES_TARGET = 1e6, 132.0


def run(options: Options) -> Report:
    """Measures all parts.

    Raises:
        CaseFailedError: a byte came back wrong.
        RuntimeError: the index gave a wrong answer.
    """
    progress, repeats = options.progress, 5 if options.quick else 15
    progress.stage("tiers: copies between device pool and DRAM")
    copies = measure_copies(repeats, progress)
    progress.stage("tiers: disk")
    disk = measure_disk(repeats, (256 << 20) if options.quick else (1 << 30), progress)
    full = measure_full_disk(3 if options.quick else 7, 256 << 20, progress)
    progress.stage("tiers: index from 1e4 to 1e7 pages (about a minute)")
    index = measure_index(quick=options.quick)
    progress.stage("tiers: records in coded DRAM")
    placing = measure_placing(CODED_SIZES[:2] if options.quick else CODED_SIZES)
    report = _report(copies, disk, index, repeats)
    _add_placing(report, placing)
    _add_full_disk(report, full)
    _plot(report, options)
    return report


def _report(
    copies: dict[str, Any], disk: dict[str, Any], index: list[dict[str, Any]], repeats: int
) -> Report:
    shape, slot = copies[_HEADLINE_SHAPE], disk["by_slot"][_HEADLINE_SLOT]
    results = {
        "memcpy_gb_s": median(shape["memcpy"]),
        "host_save_gb_s": median(shape["save"]),
        "host_load_gb_s": median(shape["load"]),
        "disk_write_gb_s": median(slot["write"]),
        "disk_read_gb_s": median(slot["read"]),
        "raw_disk_write_gb_s": median(slot["raw_write"]),
        "raw_disk_read_gb_s": median(slot["raw_read"]),
        "index": [{k: v for k, v in size.items() if k != "samples"} for size in index],
        "memcpy_buffer_bytes": MEMCPY_BYTES,
        "disk_mode": disk["mode"],
        "disk_threads": HELPER_THREADS + 1,
        "corrections_per_million": {
            name: values["corrections_per_million"] for name, values in copies.items()
        },
        "ratios": _ratios(copies, disk["by_slot"]),
    }
    samples = {
        "copies_gb_s": {
            name: {key: values[key] for key in ("memcpy", "save", "load")}
            for name, values in copies.items()
        },
        "disk_gb_s": disk["by_slot"],
        "index_lookups_per_s": {str(size["pages"]): size["samples"] for size in index},
    }
    tables = [_copy_table(copies, results), _disk_table(disk, results), _index_table(index)]
    notes = [
        (
            f"memcpy: one core, {MEMCPY_BYTES >> 20} MiB to {MEMCPY_BYTES >> 20} MiB, bytes moved "
            "counted once. Copies: K and V bytes, transform and search included, pinned to one "
            f"core. Disk: {disk['mode']} I/O, {HELPER_THREADS + 1} threads on both sides, "
            "checksums, or with a key tags or encryption, on the tier's. The keys without a shape "
            f"are those of {_HEADLINE_SHAPE} (layers x KV heads x head dim, rounding rule) and of "
            f"pages of {_HEADLINE_SLOT}."
        ),
    ]
    return Report(results, samples, {"copies": repeats, "disk": repeats}, tables, notes)


def _add_placing(report: Report, placing: dict[str, dict[str, float]]) -> None:
    """Adds what a record costs in a full coded DRAM."""
    report.results["coded_host_us_a_record"] = placing
    table = Table("a record in full coded DRAM, us", ("set-up", "records", "us a record"))
    for name, by_size in placing.items():
        table.rows += [(name, int(size), us) for size, us in by_size.items()]
    report.tables.append(table)


def _add_full_disk(report: Report, full: dict[str, Any]) -> None:
    """Adds the figures of a disk that is full."""
    table = Table(
        "a full disk, pages of 260 KiB given up at random; packed: half as long to as long",
        ("layout", "full GB/s", "of fresh", "held of its size", "written per byte"),
    )
    report.samples["full_disk"] = full
    report.results["full_disk"] = {}
    for layout, values in full.items():
        ratios = [a / b for a, b in zip(values["full"], values["fresh"], strict=True)]
        found = {name: median(each) for name, each in values.items()} | {"of_fresh": median(ratios)}
        report.results["full_disk"][layout] = found
        table.rows.append(
            (layout, *(found[name] for name in ("full", "of_fresh", "held", "amplification")))
        )
    report.tables.append(table)


def _ratios(copies: dict[str, Any], by_slot: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Paired ratios: median of the rounds' ratios, its 95 % interval, and the target."""
    pairs: dict[str, tuple[list[float], list[float], float | None]] = {
        f"save {name}": (values["save"], values["memcpy"], _SAVE_TARGET)
        for name, values in copies.items()
    }
    pairs |= {
        f"load {name}": (values["load"], values["memcpy"], _LOAD_TARGET)
        for name, values in copies.items()
    }
    for kind in ("write", "read"):
        pairs |= {
            f"disk {kind} {name}": (
                values[kind],
                values[f"raw_{kind}"],
                _DISK_TARGET if name in SLOT_SIZES else None,
            )
            for name, values in by_slot.items()
        }
    ratios = {}
    for name, (ours, limit, target) in pairs.items():
        values = [a / b for a, b in zip(ours, limit, strict=True)]
        ratios[name] = {
            "median": median(ours) / median(limit),
            "paired_median": median(values),
            "ci95": list(median_interval(values)),
            "target": target,
        }
    return ratios


def _verdict(ratio: dict[str, Any]) -> tuple[float, str, str]:
    low, high = ratio["ci95"]
    interval = f"{low:.2f} to {high:.2f}"
    if ratio["target"] is None:
        return ratio["median"], interval, "none"
    reached = "ok" if ratio["median"] >= ratio["target"] else "missed"
    if low <= ratio["target"] <= high:
        reached = "inconclusive"
    return ratio["median"], interval, f">= {ratio['target']} {reached}"


def _copy_table(copies: dict[str, Any], results: dict[str, Any]) -> Table:
    columns = ("shape", "way", "memcpy GB/s", "GB/s", "of memcpy", "95 %", "target", "corrections")
    table = Table("device pool <-> DRAM, one core, bf16, pages of 64 tokens", columns)
    for name in SHAPES:
        values = copies[name]
        per_million = f"{values['corrections_per_million']:.0f} per million K"
        for way, note in (("save", per_million), ("load", "")):
            ratio = _verdict(results["ratios"][f"{way} {name}"])
            table.rows.append(
                (name, way, median(values["memcpy"]), median(values[way]), *ratio, note)
            )
    return table


def _disk_table(disk: dict[str, Any], results: dict[str, Any]) -> Table:
    columns = ("page", "way", "raw GB/s", "tier GB/s", "of raw", "95 %", "target")
    table = Table(f"disk, {disk['mode']} I/O, {HELPER_THREADS + 1} threads", columns)
    for name, values in disk["by_slot"].items():
        for way in ("write", "read"):
            ratio = _verdict(results["ratios"][f"disk {way} {name}"])
            table.rows.append(
                (name, way, median(values[f"raw_{way}"]), median(values[way]), *ratio)
            )
    return table


def _index_table(index: list[dict[str, Any]]) -> Table:
    table = Table(
        "page index",
        ("pages", "look-ups/s", "bytes/page", f"targets: >= {_LOOKUPS_TARGET:,.0f}/s, <= 132 B"),
    )
    for size in index:
        reached = (
            size["lookups_per_s"] >= _LOOKUPS_TARGET and size["bytes_per_page"] <= _BYTES_TARGET
        )
        table.rows.append(
            (
                size["pages"],
                float(size["lookups_per_s"]),
                float(size["bytes_per_page"]),
                "ok" if reached else "missed",
            )
        )
    return table


def _plot(report: Report, options: Options) -> None:
    ratios = report.results["ratios"]
    path = plot_bars(
        options.out_dir / "tiers.png",
        "Speed as a share of the machine's own limit (memcpy, raw disk)",
        list(ratios),
        [ratio["median"] for ratio in ratios.values()],
        intervals=[ratio["ci95"] for ratio in ratios.values()],
        targets=[ratio["target"] or math.nan for ratio in ratios.values()],
    )
    report.notes.append(f"plot: {path}")
