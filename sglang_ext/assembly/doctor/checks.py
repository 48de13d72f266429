"""`hier-kv doctor`: looks at SGLang and the machine as a start would, before a model is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_ext.assembly.doctor.cache_folder import cache_problem
from sglang_ext.assembly.doctor.checkout import use_stand_ins
from sglang_ext.assembly.doctor.listening import listening_problem
from sglang_ext.assembly.doctor.machine_speed import measure_disk, measure_dram
from sglang_ext.assembly.doctor.memory_nodes import memory_nodes
from sglang_ext.assembly.doctor.model_folder import folder_problem
from sglang_ext.assembly.doctor.store_answer import ask_store
from sglang_ext.assembly.preflight import (
    check_free,
    check_machine,
    others_problem,
    room_bytes,
    room_problem,
)
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.source import ContractError, SGLangSource
from sglang_ext.seam.contract.symbols import SYMBOLS
from sglang_ext.seam.contract.verdict import examine, installed
from sglang_ext.seam.model_kind import kind_of_folder
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.settings.model_kinds import MODEL_KINDS
from sglang_ext.settings.refusals import Resolved, check_resolved
from sglang_ext.settings.values import ALLOW_UNTESTED, is_set
from sglang_ext.tiers.anonymous_memory import available_bytes
from sglang_ext.tiers.disk.segments.fileio import FileIO, direct_io_works
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote.password import ENV_PASSWORD
from sglang_ext.truncation.secret import secret_problem

_BELOW = "below"  # the details, one a line
_GPU = Path("/dev/nvidiactl")
_MIB = 1 << 20
_SLOW_DISK = 500e6  # bytes a second


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it.
        state: whether a start would go on, go on with a loss, or be refused.
        text: what is so, and what to do about it; a sentence.
        details: more of it, a line each.
    """

    name: str
    state: Literal["ok", "warning", "refused"]
    text: str
    details: list[str] = field(default_factory=list)


def look(
    config: HierKVConfig,
    place: Path | None = None,
    *,
    model_path: str = "",
    host: str = "127.0.0.1",
    port: int | None = None,
    speeds: bool = False,
) -> Iterator[Check]:
    """Looks at everything, the cheapest first.

    Args:
        config: the settings that a server would be given.
        place: folder or wheel of the SGLang to look at; the installed one if None.
        model_path: a model's folder, or its name; empty for none.
        host: where the server would listen.
        port: of that; None to leave it out.
        speeds: measure disk and DRAM, for some seconds.
    """
    yield check_sglang(place)
    if port is not None:
        problem = listening_problem(host, port)
        yield Check("port", "refused" if problem else "ok", problem or f"{host}:{port} is free.")
    with _stand_in(config) as tried:
        for check in _looks(tried, model_path, speeds):
            yield _named(check, tried.disk_dir, config.disk_dir)


def _looks(config: HierKVConfig, model_path: str, speeds: bool) -> Iterator[Check]:
    folder = Path(config.disk_dir) if config.disk_dir else None
    yield _check_settings(config)
    if problem := cache_problem():
        yield Check("home", "refused", problem)
    elif model_path:
        yield _check_model(model_path, config)
    yield _check_memory_lock(config)
    yield _check_numa(config)
    if folder is not None and folder.is_dir():
        yield _check_disk(config)
    if config.remote_url:
        yield from _check_remote(config.remote_url)
    if speeds:
        yield _check_speeds(config, folder)


@contextlib.contextmanager
def _stand_in(config: HierKVConfig) -> Iterator[HierKVConfig]:
    """The settings, with a folder of our own where the disk tier's is not there yet.

    A server that starts meanwhile makes the tier's, and nothing here may take it away.
    """
    folder = Path(config.disk_dir).absolute()
    if not config.disk_dir or os.path.lexists(folder):
        yield config
        return
    above = next(path for path in folder.parents if os.path.lexists(path))
    try:
        made = tempfile.TemporaryDirectory(
            prefix=".hier-kv-doctor-", dir=above, ignore_cleanup_errors=True
        )
    except OSError:  # a start cannot make one there either, and the check of it says why
        yield config
        return
    with made:
        yield dataclasses.replace(config, disk_dir=made.name)


def _named(check: Check, tried: str, folder: str) -> Check:
    """What was found of the folder that was tried, under the name of the one that is meant."""
    if tried == folder:
        return check
    return dataclasses.replace(check, text=check.text.replace(tried, folder))


def check_sglang(place: Path | None = None) -> Check:
    """Compares an SGLang release with what was tested; runs nothing of it."""
    try:
        source = installed() if place is None else SGLangSource(place)
    except ContractError as error:
        return Check("sglang", "refused", str(error))
    verdict = examine(source)
    differs = [f"{one.symbol} is written differently" for one in verdict.unproven]
    told = [f"{one.symbol} is written differently (hooked only)" for one in verdict.changed]
    told += [f"{one.symbol} is written differently (called only)" for one in verdict.called]
    details = [*map(str, verdict.broken), *differs, *told]
    allowed = is_set(ALLOW_UNTESTED)
    refusal = verdict.refusal(allow_untested=allowed, others=_BELOW)
    if refusal:
        return Check("sglang", "refused", refusal, details)
    if not verdict.is_tested:
        return Check("sglang", "warning", f"{verdict.warning(others=_BELOW)}.", details)
    return Check("sglang", "ok", f"SGLang {verdict.version}, tested; {len(SYMBOLS)} names agree.")


def _check_settings(config: HierKVConfig) -> Check:
    try:
        config.validate()
        check_machine(config)
    except HierKVConfigError as error:
        return Check("settings", "refused", str(error))
    free = available_bytes() / GIB
    return Check("settings", "ok", f"{config.host_size:g} GiB of DRAM of {free:.1f} GiB free.")


def _check_model(model_path: str, config: HierKVConfig) -> Check:
    """Whether such a model is served with these settings, by what SGLang would keep of it."""
    use_stand_ins()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what SGLang has no use for on this machine
            name = kind_of_folder(model_path)
    except ImportError as error:
        if problem := folder_problem(model_path):
            return Check("model", "refused", problem)
        text = (
            f"SGLang cannot be imported here ({error}), so whether {model_path} is served is not "
            "known; install what SGLang needs (pip install sglang), or look on the machine that "
            "will serve it."
        )
        return Check("model", "warning", text)
    except Exception as error:  # whatever SGLang and transformers find wrong
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        text = f"--model-path must be a model that SGLang knows, got {model_path}: {reason}"
        return Check("model", "refused", text)
    try:
        check_resolved(Resolved({}, {}, {}, name, _release()), config)
    except HierKVConfigError as error:
        return Check("model", "refused", str(error))
    kind = MODEL_KINDS[name]
    text = (
        f"Of it SGLang keeps {kind.name}. Reused is: {kind.reused}. What these words mean: "
        'docs/compatibility.md, "Modes".'
    )
    return Check("model", "ok", text)


def _release() -> str:
    """SGLang's release; empty where it cannot be told, which `check_sglang` says."""
    try:
        return installed().version
    except ContractError:
        return ""


def _check_memory_lock(config: HierKVConfig) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not _GPU.exists():
        return Check("memlock", "ok", "No NVIDIA GPU here, so no memory is page-locked.")
    if soft in (resource.RLIM_INFINITY, -1) or soft >= config.host_bytes:
        return Check("memlock", "ok", "All of the host tier may be page-locked.")
    return Check(
        "memlock",
        "warning",
        f"--hier-kv-host-size {config.host_size:g} needs {config.host_bytes} bytes of locked "
        f"memory for fast copies, the limit is {soft}; raise it (`ulimit -l unlimited`).",
    )


def _check_numa(config: HierKVConfig) -> Check:
    """Whether DRAM near each GPU holds the host tier: copies from another node are slower."""
    nodes = memory_nodes()
    if len(nodes.free_bytes) < 2:
        return Check("numa", "ok", "One NUMA node: all DRAM is equally near.")
    near = nodes.near_gpus
    if config.host_bytes <= (min(near.values()) if near else max(nodes.free_bytes.values())):
        return Check(
            "numa",
            "ok",
            f"{nodes}: the host tier has room, and a start with a GPU takes the node nearest to "
            "that.",
        )
    return Check(
        "numa",
        "warning",
        f"--hier-kv-host-size {config.host_size:g} is more than a node has free that it would lie "
        f"on ({nodes}), so some copies cross nodes; start the server under `numactl "
        "--interleave=all`, or give each of several servers a node.",
    )


def _check_speeds(config: HierKVConfig, folder: Path | None) -> Check:
    """Measures what the cost model will go by, as far as it can be without a model."""
    told = [f"One core copies {measure_dram() / 1e9:.1f} GB/s from DRAM to DRAM"]
    if folder is None or not folder.is_dir():
        return Check("speeds", "ok", f"{told[0]}; there is no folder on disk to measure.")
    direct = config.disk_io != "buffered" and direct_io_works(FileIO(), folder)
    try:
        disk = measure_disk(folder, direct=direct)
    except OSError as error:
        return Check("speeds", "warning", f"{told[0]}; {folder} could not be measured ({error}).")
    told.append(
        f"the disk writes {disk.write / 1e6:,.0f} MB/s and reads {disk.read / 1e6:,.0f} MB/s"
    )
    if not direct:
        told.append("through the page cache, from which it may have read")
    text = f"{', '.join(told)}."
    if disk.read < _SLOW_DISK:
        return Check(
            "speeds", "warning", f"{text} Prompts may be computed as fast as that is read."
        )
    return Check("speeds", "ok", text)


def _check_remote(url: str) -> Iterator[Check]:
    """Whether the store answers: a server starts without it, and finds nothing there."""
    try:
        answer = ask_store(url)
    except TierConfigError:  # as is said of the settings
        return
    if answer.is_locked_out:
        text = (
            f"{answer.shown} does not let this user in ({answer.problem}), and a server would use "
            f"nothing of it; give its password in {ENV_PASSWORD} or password-file=."
        )
        yield Check("remote", "warning", text)
        return
    if answer.problem:
        text = (
            f"{answer.shown} does not answer ({answer.problem}), and a server would use nothing of "
            "it until it does; start the store, or correct --hier-kv-remote-url."
        )
        yield Check("remote", "warning", text)
        return
    used, most = answer.usage
    text = (
        f"{answer.shown} answers: {answer.connect_s * 1e3:.3g} ms to connect, "
        f"{answer.trip_s * 1e3:.3g} ms a round trip"
    )
    if used:
        bound = f" of {most / GIB:.3g} GiB" if most else ", and has no bound of its own"
        text += f"; it holds {used / _MIB:,.0f} MiB{bound}"
    yield Check("remote", "ok", f"{text}.")


def _check_disk(config: HierKVConfig) -> Check:
    folder = Path(config.disk_dir)
    try:
        check_free(config.disk_dir, 0.0)
    except HierKVConfigError as error:
        return Check("disk", "refused", str(error))
    mode = config.disk_io
    if mode == "auto":
        mode = "direct" if direct_io_works(FileIO(), folder) else "buffered"
    if mode == "direct" and not direct_io_works(FileIO(), folder):
        text = f"--hier-kv-disk-io direct needs O_DIRECT, which {folder} lacks; use auto."
        return Check("disk", "refused", text)
    problem = room_problem(config) or others_problem(folder)
    if not problem and config.truncation != "off":
        problem = secret_problem(config.disk_dir)
    if problem:
        return Check("disk", "warning", f"{problem}.")
    if mode == "buffered":
        text = "Buffered I/O: the page cache holds a second copy of what is read; a local disk"
        return Check("disk", "warning", f"{text} with O_DIRECT is faster.")
    return Check("disk", "ok", f"Direct I/O, room for {room_bytes(folder) / GIB:.1f} GiB.")
