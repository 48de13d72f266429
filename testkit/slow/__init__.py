"""A slow disk, late threads and lost marks inside a server, unknown to every line of the product.

SGLang loads every plugin of its entry point group; `Server` puts `load` below on the import path of
all its servers. In a scheduler process it does what these variables say, and else nothing:

- `ENV_SPEED_FILE` names a file: reads of the disk tier are held to the speed that it states; or a
  folder, with a file for each rank, named as its folder on disk is;
- `ENV_LOAD_SPEED_FILE` names a file as well: copies from DRAM to the device are held to its speed;
- `ENV_JITTER` is a number of milliseconds: every operation of the page store is late by 0 to so
  many, in each process by delays of its own;
- `ENV_LATE_THREADS` and `ENV_LATE_SCHEDULER` are a seed and a number of milliseconds, `1:2000`: all
  threads of the plugin are late, or the scheduler is behind its answers (`threads.py`);
- `ENV_LOST_MARKS` is the number of a tensor parallel rank of a decode server: the marks of requests
  with a room from `FIRST_LOST_ROOM` on are lost on their way to it;
- `ENV_UNNAMED_ROWS`: a decode server names no page for the last rows of an index of such requests.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from testkit.slow.threads import (
    ENV_LATE_SCHEDULER,
    Lateness,
    late_threads_if_asked,
    make_scheduler_late,
)

ENV_SPEED_FILE = "HIER_KV_TEST_DISK_SPEED_FILE"
ENV_LOAD_SPEED_FILE = "HIER_KV_TEST_LOAD_SPEED_FILE"
ENV_JITTER = "HIER_KV_TEST_JITTER_MS"
ENV_LOST_MARKS = "HIER_KV_TEST_LOST_MARKS"
ENV_UNNAMED_ROWS = "HIER_KV_TEST_UNNAMED_ROWS"
FIRST_LOST_ROOM = 1_000_000_000

_FOLDER = Path(__file__).resolve().parent
_DELAYED = (
    "saves.begin", "saves.finish", "plans.begin", "plans.finish_promotion", "loads.pin_ready",
    "loads.pin_leading", "loads.begin", "loads.release", "spills.finish",
)  # fmt: skip


def on_path(env: dict[str, str]) -> dict[str, str]:
    """The environment of a server, with this plugin on its import path."""
    own = [str(_FOLDER / "plugin"), str(_FOLDER.parents[1])]
    given = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = os.pathsep.join([*given, *(entry for entry in own if entry not in given)])
    return {**env, "PYTHONPATH": path}


def load() -> None:
    """Entry point; acts where there is a scheduler, and there only if a variable says so."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    late_threads_if_asked()
    if os.environ.get(ENV_LATE_SCHEDULER):
        make_scheduler_late(Lateness.of(os.environ[ENV_LATE_SCHEDULER]))
    if os.environ.get(ENV_SPEED_FILE):
        slow_down_disks(Path(os.environ[ENV_SPEED_FILE]))
    if os.environ.get(ENV_LOAD_SPEED_FILE):
        slow_down_loads(Path(os.environ[ENV_LOAD_SPEED_FILE]))
    if os.environ.get(ENV_JITTER):
        make_stores_late(float(os.environ[ENV_JITTER]) / 1e3)
    if os.environ.get(ENV_LOST_MARKS):
        lose_marks(int(os.environ[ENV_LOST_MARKS]))
    if os.environ.get(ENV_UNNAMED_ROWS):
        leave_rows_unnamed()


def slow_down_disks(speed_file: Path) -> None:
    """Every disk tier that this process opens from now on reads at the speed of a file.

    Args:
        speed_file: see `ENV_SPEED_FILE`.
    """
    from sglang_ext.tiers.disk import DiskConfig, DiskTier
    from testkit.slow.disk import ThrottledIO

    original = DiskTier.__init__

    def opened_on_a_slow_disk(
        self: DiskTier, config: DiskConfig, *args: Any, io: Any = None, **kwargs: Any
    ) -> None:
        own = speed_file / config.path.name if speed_file.is_dir() else speed_file
        original(self, config, *args, io=io or ThrottledIO(own), **kwargs)

    DiskTier.__init__ = opened_on_a_slow_disk  # type: ignore[method-assign]


def slow_down_loads(speed_file: Path) -> None:
    """Every load from DRAM to a CPU's pool goes at the speed of a file, layer by layer.

    Args:
        speed_file: see `ENV_LOAD_SPEED_FILE`.
    """
    from sglang_ext.device.copier import PageCopier
    from testkit.slow.disk import SpeedFile

    original, speed, link = PageCopier.load_layer, SpeedFile(speed_file), threading.Lock()

    def load_layer(self: PageCopier, job: Any, layer: int, source: Any = None) -> None:
        with link:
            bytes_per_s = speed.bytes_per_s()
            if bytes_per_s is not None:
                time.sleep(len(job.page_slots) * self.layer_bytes[layer] / bytes_per_s)
        original(self, job, layer, source)

    PageCopier.load_layer = load_layer  # type: ignore[method-assign]


def make_stores_late(max_s: float) -> None:
    """Every page store that this process makes from now on is late by up to so many seconds."""
    from sglang_ext.tiers.store import PageStore
    from testkit.slow.store import add_jitter

    original = PageStore.__init__

    def late(self: PageStore, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add_jitter(self._books, _DELAYED, max_s)

    PageStore.__init__ = late  # type: ignore[method-assign]


def lose_marks(rank: int) -> None:
    """What a prefill server says of a request's KV does not come to one rank."""
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    original = DecodeTransferQueue._commit_transfer_to_req

    def without_mark(self: Any, decode_req: Any) -> Any:
        if self.tp_rank == rank and decode_req.req.bootstrap_room >= FIRST_LOST_ROOM:
            self.metadata_buffers.output_ids[decode_req.metadata_buffer_index][1:] = 0
        return original(self, decode_req)

    DecodeTransferQueue._commit_transfer_to_req = without_mark


def leave_rows_unnamed() -> None:
    """A decode server waits for an index's rows of a page less than for latent ones."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    original = MooncakeKVManager.build_receiver_metadata_message

    def of_fewer_pages(self: Any, *, state_indices: Any = None, **fields: Any) -> Any:
        if state_indices and fields["bootstrap_room"] >= FIRST_LOST_ROOM:
            state_indices = [pages[:-1] for pages in state_indices]
        return original(self, state_indices=state_indices, **fields)

    MooncakeKVManager.build_receiver_metadata_message = of_fewer_pages
