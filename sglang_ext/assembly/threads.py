"""All threads of the plugin: who runs each, and what it may wait for.

docs/architecture.md shows this table. The scheduler's thread takes the store's lock for work in
memory only; no other thread holds it while it copies or does I/O. A thread that meets an error
counts it, logs it, ends that job as failed and goes on, later and later while one follows another.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class PluginThread(NamedTuple):
    """One thread, or several of one kind.

    Attributes:
        names: as Python has them; `*` stands for a number or a suffix.
        runs_in: the file that starts it, or holds what it runs.
        may_wait_for: everything that it may block on, apart from waiting for work.
        only_with: where it runs; "" for every server.
        is_daemon: whether the process may end while it works.
    """

    names: tuple[str, ...]
    runs_in: str
    may_wait_for: str
    only_with: str = ""
    is_daemon: bool = True


SCHEDULER: Final = (
    "each layer of a load: on a CPU until it is copied, with CUDA until `hier-kv-load` has queued "
    "its copy; with several ranks, the collective of a step, and the exchanges outside of it "
    "(parallel.md). Between requests: saves under way before weights change, then the digest of "
    "the new ones; saves, too, where rows or states that wait for them leave no room for others; "
    "on a CPU, the copy of a restored last page; the folder's list at start; until a deadline, a "
    "flush at shutdown"
)
"""What SGLang's own scheduler thread may wait for in `seam/`."""

FRONT: Final = "arithmetic: tokenises long texts, takes digests of images"
"""The same of the threads of SGLang's front process, in `seam/hooks/front.py`."""

THREADS: Final = (
    PluginThread(
        ("hier-kv-save",), "device/save_thread.py", "the device (on a CPU: the copy itself)"
    ),
    PluginThread(
        ("hier-kv-load",), "device/load_thread.py", "on a CPU, the copy itself; on a GPU nothing"
    ),
    PluginThread(
        ("hier-kv-load-v*",), "device/copier.py", "the copy itself", "a CPU", is_daemon=False
    ),
    PluginThread(("hier-kv-landed",), "device/ports/cuda.py", "events of the device", "CUDA"),
    PluginThread(("hier-kv-spill",), "tiers/store/movers/spiller.py", "the disk, coding", "a disk"),
    PluginThread(
        ("hier-kv-promote-*",), "tiers/store/movers/promoter.py", "the disk, decoding", "a disk"
    ),
    PluginThread(
        ("hier-kv-disk-*",),
        "tiers/disk/workers.py",
        "the disk; they share the runs of a spill or a promotion",
        "a disk",
    ),
    PluginThread(
        ("hier-kv-remote",),
        "tiers/remote/guard.py",
        "the store: probes one that is down, connects, renews values that have a `ttl`",
        "a remote store",
    ),
    PluginThread(
        ("hier-kv-remote-ask",),
        "tiers/store/remote/remote_lookup.py",
        "the store: headers for waiting requests",
        "a remote store",
    ),
    PluginThread(
        ("hier-kv-remote-upload",),
        "tiers/store/remote/upload_queue.py",
        "the store",
        "a remote store",
    ),
    PluginThread(
        ("hier-kv-remote-fetch",),
        "tiers/store/remote/remote_pages.py",
        "the store",
        "a remote store",
    ),
    PluginThread(
        ("hier-kv-remote-leave",),
        "tiers/store/remote/leaving_pages.py",
        "the store, the disk",
        "`on_eviction`",
    ),
    PluginThread(
        ("hier-kv-stream-*",),
        "coded_remote/streams.py",
        "the store (two of them), decoding (one)",
        "a coded store",
    ),
    PluginThread(
        ("hier-kv-remote-reclaim",),
        "tiers/remote/engines/file_reclaim.py",
        "the shared folder",
        "`file://`",
    ),
    PluginThread(
        ("hier-kv-remote-file",),
        "tiers/remote/deadline_executor.py",
        "the shared folder; one a call into a mount, at most 16, each given up at its deadline",
        "`file://`",
    ),
    PluginThread(
        ("hier-kv-remote-name",),
        "tiers/remote/engines/name_lookup.py",
        "the system's resolver; one a connection, at most 16, each given up at its deadline",
        "Redis",
    ),
    PluginThread(
        ("hier-kv-profile",),
        "codec/page_codec.py",
        "arithmetic: learns a profile once, and ends",
        "a codec that learns",
    ),
    PluginThread(
        ("hier-kv-quotes*",),
        "truncation/quote_search.py",
        "arithmetic: indexes text, on each of several ranks",
        "`match`",
        is_daemon=False,
    ),
    PluginThread(
        ("hier-kv-prefault",), "assembly/parts/store.py", "page faults of the arena; ends by itself"
    ),
    PluginThread(
        ("hier-kv-close",),
        "tiers/store/ending.py",
        "one part of the store each, at shutdown: the disk, the store, the log's file",
    ),
    PluginThread(("hier-kv-event-log",), "tiers/store/events.py", "the log's file", "an event log"),
    PluginThread(
        ("hier-kv-doctor-store",),
        "assembly/doctor/store_answer.py",
        "the store, and the name of its host",
        "`hier-kv doctor`, in its own process",
    ),
)
"""Threads that the plugin starts, all but the doctor's in a scheduler's process."""
