"""Under which metric each of the plugin's values is published: one unit a metric, base units.

The values are named once, by what counts them; `/server_info` shows them under those names, and
docs/metrics.md explains each. The name's end says the unit. A metric's label holds the name, so
that a value found in one place is found in the others.

A new count is a call of the store's `counters.add`, and a row in docs/metrics.md. Its name ends
in its unit, as those of `UNITS`; one without counts as an event. What can fall is in `_NOW`, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sglang_ext.admission.miss_reasons import REASONS
from sglang_ext.admission.waiting_request import Awaited
from sglang_ext.provenance.miss_counts import counts_of_tenant

PREFIX = "sglang:hier_kv"
EVENT, OF = "event", "of"  # labels of counts, and of what is now


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: without what Prometheus appends to a counter's, or a histogram's.
        help: what it measures, for `/metrics`.
        label: the label that holds the value's name.
    """

    name: str
    help: str
    label: str


PAGES = Metric(f"{PREFIX}_pages", "Pages since start, by what happened to them.", EVENT)
TOKENS = Metric(f"{PREFIX}_tokens", "Tokens since start, by what happened to them.", EVENT)
REQUESTS = Metric(f"{PREFIX}_requests", "Requests since start, by what happened to them.", EVENT)
RECORDS = Metric(f"{PREFIX}_records", "Stored records since start, by what became of them.", EVENT)
BYTES = Metric(f"{PREFIX}_bytes", "Bytes since start, by where they went.", EVENT)
BUSY_SECONDS = Metric(f"{PREFIX}_busy_seconds", "Seconds since start, by what took them.", EVENT)
NODES = Metric(f"{PREFIX}_nodes", "Radix nodes since start, by what happened to them.", EVENT)
SEGMENTS = Metric(f"{PREFIX}_segments", "Segments of the disk since start, by their fate.", EVENT)
RESUME_POINTS = Metric(
    f"{PREFIX}_resume_points", "Windows and states of hybrids since start, by their fate.", EVENT
)
VALUES = Metric(f"{PREFIX}_values", "Values of K since start, by what happened to them.", EVENT)
LINES = Metric(f"{PREFIX}_lines", "Lines of logs since start, by what happened to them.", EVENT)
EVENTS = Metric(f"{PREFIX}_events", "How often something happened since start.", EVENT)
COUNTS = (
    PAGES, TOKENS, REQUESTS, RECORDS, BYTES, NODES, SEGMENTS, RESUME_POINTS, VALUES, LINES,
    BUSY_SECONDS, EVENTS,
)  # fmt: skip

DURATIONS = Metric(
    f"{PREFIX}_duration_seconds",
    "How long one took: a node's save, a batch's load, a read, a fetch.",
    OF,
)
WAITS = Metric(
    f"{PREFIX}_wait_seconds",
    "How long a request was held back for its pages, by what it waited for.",
    OF,
)
COST_ACTUAL = Metric(
    f"{PREFIX}_cost_actual_seconds", "How long one took that the cost model had foretold.", OF
)
COST_EXPECTED = Metric(
    f"{PREFIX}_cost_expected_seconds", "How long the cost model had expected it to take.", OF
)
HISTOGRAMS = (DURATIONS, WAITS, COST_ACTUAL, COST_EXPECTED)

HELD_PAGES = Metric(
    f"{PREFIX}_held_pages", "Pages held now, of all and of tenants, and DRAM's capacity.", OF
)
HELD_BYTES = Metric(f"{PREFIX}_held_bytes", "Bytes in a tier now, and its capacity.", OF)
HELD_RECORDS = Metric(f"{PREFIX}_held_records", "Records held now.", OF)
HELD_SEGMENTS = Metric(f"{PREFIX}_held_segments", "Segments held now.", OF)
OPEN_FILES = Metric(f"{PREFIX}_open_files", "Files that are open now.", OF)
WAITING_REQUESTS = Metric(f"{PREFIX}_waiting_requests", "Requests that wait now.", OF)
WAITING_NODES = Metric(f"{PREFIX}_waiting_nodes", "Radix nodes that wait now.", OF)
WAITING_JOBS = Metric(f"{PREFIX}_waiting_jobs", "What waits for a remote store's threads now.", OF)
WAITING_LINES = Metric(f"{PREFIX}_waiting_lines", "Lines of logs that wait now.", OF)
STATE = Metric(f"{PREFIX}_state", "What state something is in now.", OF)
SPEED = Metric(f"{PREFIX}_speed_bytes_per_second", "Speeds as the cost model sees them now.", OF)
ESTIMATE = Metric(f"{PREFIX}_estimated_seconds", "What the cost model expects one to take now.", OF)
GAUGES = (
    HELD_PAGES, HELD_BYTES, HELD_RECORDS, HELD_SEGMENTS, OPEN_FILES, WAITING_REQUESTS,
    WAITING_NODES, WAITING_JOBS, WAITING_LINES, STATE, SPEED, ESTIMATE,
)  # fmt: skip

# Upper ends of the histograms' buckets: from one page's copy to the longest wait for a store.
BUCKETS_S = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
)  # fmt: skip

# What can fall: the metric, and what it says to whoever reads it.
_NOW = {
    "host_pages": (HELD_PAGES, "in DRAM"),
    "host_capacity_pages": (HELD_PAGES, "for which DRAM has room"),
    "planned_pages": (HELD_PAGES, "that waiting requests pin in DRAM"),
    "pinned_now_pages": (HELD_PAGES, "that hints pin"),
    "spill_queue_pages": (HELD_PAGES, "on their way to disk"),
    "lost_pages_memory_bytes": (HELD_BYTES, "what remembers lost pages takes at most"),
    "disk_used_bytes": (HELD_BYTES, "of segments on disk"),
    "disk_max_bytes": (HELD_BYTES, "that segments may take"),
    "disk_coded_host_used_bytes": (HELD_BYTES, "of coded pages in DRAM"),
    "disk_coded_host_max_bytes": (HELD_BYTES, "that coded pages may take"),
    "waiting_requests": (WAITING_REQUESTS, "those in SGLang's queue"),
    "window_requests": (WAITING_REQUESTS, "those of them that have their turn in DRAM"),
    "save_queue": (
        WAITING_NODES,
        "those on their way to DRAM, and what is noted of a request behind its last one",
    ),
    "remote_upload_queue": (WAITING_JOBS, "uploads, runs of a node's pages each"),
    "remote_lookup_queue": (WAITING_JOBS, "questions what of a request the store has"),
    "remote_fetch_queue": (WAITING_JOBS, "fetches of a request's pages"),
    "event_log_waiting_lines": (WAITING_LINES, "those on their way to the event log"),
    "clears_pending": (STATE, "1 while the disk is still to delete what was cleared"),
    "openings_pending": (STATE, "namespaces that the disk has still to open"),
    "disk_segments": (HELD_SEGMENTS, "those on disk"),
    "disk_open_fds": (OPEN_FILES, "those of the disk"),
    "disk_coded_host_records": (HELD_RECORDS, "coded pages in DRAM"),
    "remote_breaker_state": (STATE, "0 the store is used, 1 tried, 2 left alone"),
}
# Of tenants, where there are quotas; N is 1, 2 and so on, as the flag names them.
_QUOTAS = {
    "quota_tenant_N_host_pages": "with `--hier-kv-quotas`, of the N-th tenant in DRAM",
    "quota_tenant_N_disk_pages": "of the N-th tenant on disk",
    "quota_others_host_pages": "of all tenants without a share in DRAM",
    "quota_others_disk_pages": "of all tenants without a share on disk",
    "quota_tenant_N_remote_bytes": "of the N-th tenant in a `file://` store",
    "quota_others_remote_bytes": "of all tenants without a share in a `file://` store",
}
_AWAITED = {
    Awaited.DISK: "pages on disk, or coded in DRAM",
    Awaited.REMOTE: "pages in a remote store, or its answer what it has",
    Awaited.BOTH: "both of these",
    Awaited.UNDERWAY: "pages that were coming to DRAM already, saved or fetched for other requests",
    Awaited.ROOM: "room in DRAM for its pages, and none of these",
    Awaited.STEP: "none of these: what other ranks bring, or the next look at what has come",
}
_FORETOLD = {
    "read": "reading and decoding pages from disk",
    "fetch": "fetching pages from a remote store",
    "device_load": "copying pages from DRAM to the device",
    "prefill": "a prefill beside which nothing is loaded",
}
# What is timed one by one, by the histogram: the label's values, and what each says.
TIMES = {
    DURATIONS: {
        "save": "a node's pages to DRAM, without what it waited for forwards",
        "load": "a batch's pages from DRAM to the device, without what it waited for forwards",
        "read": "pages from disk",
        "decode": "pages from disk, once read",
        "fetch": "pages from a remote store",
    },
    WAITS: {awaited.value: meaning for awaited, meaning in _AWAITED.items()},
    COST_ACTUAL: _FORETOLD,
    COST_EXPECTED: _FORETOLD,
}
# Of all requests, and with quotas of each tenant's.
_REUSE = (
    "requested_tokens", "reused_device_tokens", "reused_host_tokens", "reused_disk_tokens",
    "reused_remote_tokens",
)  # fmt: skip
# With quotas of all, and of each tenant.
OVER_SHARE = "remote_over_share_pages"
# Counts that are published as 0 before they are first counted: `rate` misses the step from no
# series to the first value, and an alert or a plot without a series looks like one that is broken.
# So is all that `deploy/hier-kv.rules.yml` takes the increase of: the first damaged page, or forged
# record, may be the only one.
FROM_START = (
    "saved_pages", "loaded_pages", "written_pages", "written_again_pages", "promoted_pages",
    "evicted_pages",
    "lost_pages", "damaged_pages", "evicted_wanted_pages", "lost_wanted_pages",
    "disk_evicted_wanted_pages", "save_dropped_pages", "admitted_ready_requests",
    "admitted_late_requests", "prefetch_timeouts", "cost_load", "cost_partial", "cost_recompute",
    *(
        f"{what}_failures"
        for what in (
            "save", "load", "spill", "promotion", "clear", "profile", "encode", "adapter_digest",
            "weight_digest", "namespace_open", "worker",
            "device_replace", "quote_search", "remote", "miss_report",
        )
    ),
    *(
        f"rejected_{kind}"
        for kind in (
            "bad_magic", "bad_version", "bad_header", "bad_checksum", "foreign", "unauthentic",
        )
    ),
    "remote_error_rejected_unauthentic", "disk_dropped_full", "disk_dropped_io",
    "disk_errors_io_read",
    *_REUSE,
    *(f"missed_{reason}_{what}" for reason in REASONS for what in ("tokens", "requests")),
)  # fmt: skip


def from_start(num_tenants: int) -> tuple[str, ...]:
    """The names of counts that are published as 0 before they are first counted.

    Args:
        num_tenants: that have a share; all others are one more, unless there is none.
    """
    if not num_tenants:
        return FROM_START
    of_tenant = (*_REUSE, OVER_SHARE)
    return (
        *FROM_START,
        OVER_SHARE,
        *(
            counts_of_tenant(number) + name
            for number in range(num_tenants + 1)
            for name in of_tenant
        ),
    )


UNITS = {
    "pages": PAGES,
    "tokens": TOKENS,
    "requests": REQUESTS,
    "records": RECORDS,
    "bytes": BYTES,
    "lines": LINES,
}
# Names that do not end in their unit, and what is counted by them.
UNIT_OF_NAME = {
    **{
        f"cost_{choice}": REQUESTS
        for choice in ("load", "partial", "recompute", "gave_up", "limited")
    },
    "refused_session_turns": REQUESTS,
    "saves_ended": NODES,
    "saved_windows": RESUME_POINTS,
    "saved_states": RESUME_POINTS,
    "unsaved_states": RESUME_POINTS,
    "misplaced_states": RESUME_POINTS,
    "corrections": VALUES,
    "disk_coded_host_hits": RECORDS,
}
# Beginnings of such names.
UNIT_OF_FAMILY = {
    "rejected_": RECORDS,
    "disk_records_": RECORDS,
    "disk_dropped_": RECORDS,
    "disk_segments_": SEGMENTS,
    "disk_codec_pages_": PAGES,
    "remote_get_": RECORDS,
    "remote_put_": RECORDS,
    "disk_bytes_": BYTES,
    "remote_bytes_": BYTES,
    "remote_error_rejected_": RECORDS,
    "pages_of_": PAGES,
}
# Parts of the names under which times are counted.
_HELD, _COST, _EXPECTED = "held_", "cost_", "_expected"
_ESTIMATES = {"_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
_MEGABYTE = 1e6


class Series(NamedTuple):
    """Where a value goes.

    Attributes:
        metric: the metric.
        value: of its label.
        scale: times this it is in the metric's unit.
    """

    metric: Metric
    value: str
    scale: float = 1.0


def values_now() -> Iterator[tuple[str, Metric, str]]:
    """The values that can fall: each one's name, its metric, and what it says."""
    for name, (metric, meaning) in _NOW.items():
        yield name, metric, meaning
    for name, meaning in _QUOTAS.items():
        yield name, _of_quota(name), meaning


def gauge_of(name: str) -> Series | None:
    """The series of a value that can fall; None where it only grows."""
    if name.startswith("quota_"):
        return Series(_of_quota(name), name)
    return Series(_NOW[name][0], name) if name in _NOW else None


def _of_quota(name: str) -> Metric:
    return HELD_BYTES if name.endswith("_bytes") else HELD_PAGES


def count_of(name: str) -> Series | None:
    """The counter's series of a value that only grows.

    None where it is a time that is no work, or is the cost model's: the sums of `WAITS` and of what
    was foretold hold it, and together with the times of work it would be counted twice.
    """
    if name.endswith("_us"):
        what = name.removesuffix("_us")
        is_work = time_of(what).metric is DURATIONS
        return Series(BUSY_SECONDS, what, 1e-6) if is_work else None
    metric = UNITS.get(name.rpartition("_")[2]) or UNIT_OF_NAME.get(name)
    families = (each for family, each in UNIT_OF_FAMILY.items() if name.startswith(family))
    return Series(metric or next(families, EVENTS), name)


def time_of(what: str) -> Series:
    """The histogram's series of something that is timed one by one."""
    if what.startswith(_HELD):
        return Series(WAITS, what.removeprefix(_HELD))
    if what.startswith(_COST):
        foretold = what.removeprefix(_COST)
        if foretold.endswith(_EXPECTED):
            return Series(COST_EXPECTED, foretold.removesuffix(_EXPECTED))
        return Series(COST_ACTUAL, foretold)
    return Series(DURATIONS, what)


def estimate_of(name: str) -> Series | None:
    """The series of one of the cost model's speeds; None where it is neither speed nor time."""
    if name.endswith("_mb_s"):
        return Series(SPEED, name.removesuffix("_mb_s"), _MEGABYTE)
    for end, scale in _ESTIMATES.items():
        if name.endswith(end):
            return Series(ESTIMATE, name.removesuffix(end), scale)
    return None
