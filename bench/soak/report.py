"""The verdict of a soak: bounds, slopes, and the table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from bench.core.case import CaseFailedError, Report
from bench.core.output import Table
from bench.soak.gauges import settled
from bench.soak.life import Life, Soak
from bench.soak.trend import growth, slope
from bench.soak.world import DISK_MIB, REMOTE_MIB

WARM_UP_ROUNDS = 6  # until every tier is full and every path of the code was taken
_MOST_GROWTH = {"rss_mib": 64.0, "fds": 8.0, "threads": 8.0}
_FEWEST_READINGS = 4  # of which growth is told
_NAMES = ("rss_mib", "scheduler_rss_mib", "fds", "threads")
_PLAIN = "plain_rss_mib"
# The shared folder is brought back to its size by looking at it now and then.
_REMOTE_SLACK = 1.25


def make_report(soak: Soak) -> Report:
    """The report of a soak that has ended.

    Raises:
        CaseFailedError: something grew that should not; the text has the table.
    """
    table = Table(
        "at rest, after each round; growth is the last quarter's median over the first's",
        ("server", "ended by", "rounds", "MiB", "grew", "plain grew", "KiB/round", "files", "grew",
         "threads", "grew", "disk MiB", "remote MiB"),
    )  # fmt: skip
    for number, life in enumerate(soak.lives, 1):
        table.rows.append((number, life.end, len(life.readings), *_cells(life)))
    problems = [text for life in soak.lives for text in _problems(life)]
    if problems:
        raise CaseFailedError(f"{'; '.join(problems)}\n{table.render()}")
    return Report(
        results=_results(soak),
        samples={"lives": [[asdict(one) for one in life.readings] for life in soak.lives]},
        n={"rounds": soak.num_rounds, "compared answers": soak.probes.num_compared},
        tables=[table, _counts_table(soak)],
    )


def _results(soak: Soak) -> dict[str, Any]:
    lives = [
        {
            "end": life.end,
            "rounds": len(life.readings),
            "seconds": round(life.ended_s[-1] - life.ended_s[0], 1) if life.ended_s else 0.0,
            **{f"{name}_slope": round(slope(_values(life, name)), 4) for name in _NAMES},
            **{f"{name}_growth": _grown(life, name) for name in (*_NAMES, _PLAIN)},
            "counters": life.counters,
        }
        for life in soak.lives
    ]
    counts = sum((life.counts for life in soak.lives), Counter())
    return {"lives": lives, "counts": dict(counts), "probes_reused": dict(soak.probes.reused)}


def _grown(life: Life, name: str) -> float | None:
    """How much a life's values grew; None where the rounds behind its first ones are too few."""
    values = _values(life, name)
    return growth(values) if len(values) >= _FEWEST_READINGS else None


def _values(life: Life, name: str) -> list[float]:
    values = [getattr(reading, name) for reading in settled(life.readings, WARM_UP_ROUNDS)]
    return [float(value) for value in values if value is not None]


def _cells(life: Life) -> tuple[Any, ...]:
    readings = life.readings
    if not readings:
        return (None,) * 10
    last = readings[-1]
    rss = _values(life, "rss_mib")
    return (
        last.rss_mib, _grown(life, "rss_mib"), _grown(life, _PLAIN),
        1024 * slope(rss) if len(rss) > 1 else None,
        last.fds, _grown(life, "fds"), last.threads, _grown(life, "threads"),
        max(reading.disk_mib for reading in readings),
        max(reading.remote_mib for reading in readings),
    )  # fmt: skip


def _problems(life: Life) -> list[str]:
    """What of a life is out of bounds, in words."""
    found = []
    for name, most in _MOST_GROWTH.items():
        grown = _grown(life, name) or 0.0
        # What plain SGLang and torch take for the same rounds is not the plugin's.
        plain = max(0.0, _grown(life, _PLAIN) or 0.0) if name == "rss_mib" else 0.0
        if grown > most + plain:
            beside = f", plain SGLang by {plain:g}" if plain else ""
            found.append(
                f"{name} grew by {grown:g} in one server{beside}, at most {most:g} more expected"
            )
    most_disk = max((reading.disk_mib for reading in life.readings), default=0.0)
    if most_disk > DISK_MIB:
        found.append(f"the disk folder took {most_disk:.0f} MiB of {DISK_MIB}")
    most_remote = max((reading.remote_mib for reading in life.readings), default=0.0)
    if most_remote > REMOTE_MIB * _REMOTE_SLACK:
        found.append(f"the shared folder took {most_remote:.0f} MiB of {REMOTE_MIB}")
    return found


def _counts_table(soak: Soak) -> Table:
    table = Table("what was done", ("what", "number"))
    counts = sum((life.counts for life in soak.lives), Counter())
    table.rows += [(name, num) for name, num in sorted(counts.items())]
    reused = sum((life.reused for life in soak.lives), Counter())
    table.rows += [(f"prompt tokens reused from {tier}", num) for tier, num in reused.items()]
    table.rows.append(("answers compared bit for bit", soak.probes.num_compared))
    return table
