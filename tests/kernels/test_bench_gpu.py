"""The GPU bench where there is none: it says so, and its own checks run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.core.case import ALLOW_DIRTY, ROOT, CaseFailedError, Options
from bench.core.output import Progress
from bench.gpu import codec_kernels, kernels, kit, kit_run, servers, wheels
from bench.gpu.case import SELFTEST, device_or_none, measure_copies
from bench.gpu.case import run as run_case
from bench.gpu.engine import BARE, LATENT_BYTES, TINY, Engine
from bench.gpu.kernels import check_kernels
from sglang_ext.device.ports import cuda
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.host import HostPort
from testkit.server import ServerError
from testkit.simulated.cuda import Cuda, HappenedEvent

# A machine with a device need not have SGLang.
_WITHOUT_SGLANG = (
    "import sys; sys.modules['sglang'] = None; from bench.gpu.kit_run import main; sys.exit(main())"
)


def options() -> Options:
    return Options(quick=True, progress=Progress())


def test_without_a_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SELFTEST, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CaseFailedError, match="needs a CUDA device, and torch sees none"):
        run_case(options())


def test_the_same_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SELFTEST, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = device_or_none()
    assert device is not None
    report = measure_copies(options(), device)
    assert report.results["device"] == "cpu, self-test"
    assert report.results["load_of_link"] > 0
    assert report.results["in_place_of_load"] > 0
    assert report.results["layers_of_link"] > 0
    assert report.results["latents_of_link"] > 0
    assert report.results["save_gb_s"] > 0


def test_other_bits_are_no_figures() -> None:
    engine = Engine(torch.device("cpu"), TINY)
    try:
        engine.check()
        real = engine.save

        def save() -> float:
            seconds = real()
            at = engine.layout.k_offsets[1]
            engine.arena.slots[engine.num_pages, at] ^= 1
            return seconds

        engine.save = save  # type: ignore[method-assign]
        with pytest.raises(CaseFailedError, match="is not what the pool held"):
            engine.check()
    finally:
        engine.close()


def test_bare_copies_are_measured_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 streams a device and takes none back; the kit makes 64 such copies."""
    stand_in = Cuda(num_streams=32, event=HappenedEvent)
    monkeypatch.setattr(cuda, "pinned", lambda count: torch.empty(count, dtype=torch.int64))
    monkeypatch.setattr(
        "bench.gpu.engine.open_port", lambda device, pinned: CudaPort(device, stand_in)
    )
    made = Engine(torch.device("cpu"), TINY)
    try:
        for number in range(64):
            assert made.bare_copies(back=number % 2 == 1, how=BARE[number % 4]) > 0
    finally:
        made.close()


@pytest.mark.parametrize("how", BARE)
def test_bare_copies_move_what_loads_move_in_as_many_copies(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(torch.device("cpu"), TINY)
    copies: list[int] = []  # bytes of each
    real = HostPort.bring

    def bring(self: HostPort, out: Any, slots: Any, pages: Any, span: slice) -> None:
        copies.extend([span.stop - span.start] * len(pages))
        real(self, out, slots, pages, span)

    monkeypatch.setattr(HostPort, "bring", bring)
    try:
        engine.bare_copies(back=False, how=how)
    finally:
        engine.close()
    slots, pages = engine.num_pages * engine.layout.slot_bytes, engine.num_pages
    layers = [engine.copier.layer_bytes[0]] * (TINY.layers * pages)
    assert max(copies) <= LATENT_BYTES or how in ("whole", "pages")
    assert {
        "whole": copies == [slots],
        "pages": copies == [engine.layout.slot_bytes] * pages,
        "layers": copies == layers,
        "latents": sum(copies) == sum(layers),
    }[how]


def test_kernels_at_odd_shapes() -> None:
    assert check_kernels(torch.device("cpu")) == 36


def test_sglangs_wheel_without_what_a_dense_model_does_not_need(tmp_path: Path) -> None:
    kept = ["sglang/srt/utils.py", "sglang/srt/rust_extensions/__init__.py", "sglang-1/RECORD"]
    wheel = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in (*kept, "sglang/srt/rust_extensions/_server.so", "sglang/test/big.py"):
            whole.writestr(name, name * 100)
    wheels.cut(wheel)
    with zipfile.ZipFile(wheel) as left:
        assert left.namelist() == kept
        assert left.read(kept[0]).decode() == kept[0] * 100
    assert sorted(path.name for path in tmp_path.iterdir()) == [wheel.name]


def test_zstandards_wheel_without_what_cpython_does_not_load(tmp_path: Path) -> None:
    kept = ["zstandard/backend_c.cpython-312-x86_64-linux-gnu.so", "zstandard/backend_cffi.py"]
    wheel = tmp_path / "zstandard-1-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in (*kept, "zstandard/_cffi.cpython-312-x86_64-linux-gnu.so"):
            whole.writestr(name, name)
    wheels.cut(wheel)
    with zipfile.ZipFile(wheel) as left:
        assert left.namelist() == kept


def test_stand_ins_do_not_hide_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    real = {name: importlib.util.find_spec(name) is not None for name in ("IPython", "sgl_kernel")}
    kit_run.put_stand_ins(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[1:])
    kit_run.put_stand_ins(tmp_path)  # again, by a run that does not look there
    assert {name: not (tmp_path / name).exists() for name in real} == real


def test_stand_ins_compute_what_the_kernels_do() -> None:
    spec = importlib.util.spec_from_file_location(
        "stand_in", kit_run.STAND_INS / "sgl_kernel" / "__init__.py"
    )
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((5, 64), (5, 64), (64,)))
    total = (x.float() + residual.float()).bfloat16()
    for fused, plain, by in (
        (kernels.fused_add_rmsnorm, kernels.rmsnorm, weight.float()),
        (kernels.gemma_fused_add_rmsnorm, kernels.gemma_rmsnorm, weight.float() + 1),
    ):
        want = torch.nn.functional.rms_norm(x.float(), (64,), by, 1e-5).bfloat16()
        assert torch.equal(plain(x, weight, 1e-5), want)
        added, kept = x.clone(), residual.clone()
        fused(added, kept, weight, 1e-5)
        assert torch.equal(kept, total)
        summed = torch.nn.functional.rms_norm(x.float() + residual.float(), (64,), by, 1e-5)
        assert torch.equal(added, summed.bfloat16())
    out = torch.empty((5, 32), dtype=torch.bfloat16)
    want = torch.nn.functional.silu(x[:, :32].float()) * x[:, 32:].float()
    assert kernels.silu_and_mul(x, out) is out
    assert torch.equal(out, want.bfloat16())
    with pytest.raises(NotImplementedError, match="moe_sum is not in the kit"):
        kernels.moe_sum(x)


@pytest.fixture
def kit_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a kit lies; torch sees no device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(SELFTEST, "1")
    monkeypatch.setattr(kit_run, "NEEDED", ("numpy", "torch"))
    monkeypatch.setattr(kit_run, "NEEDED_BY_SERVERS", ())
    (tmp_path / "COMMIT").write_text("a" * 40 + "\n")
    return tmp_path


def found(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return loaded


def test_all_that_is_missing_is_said_first_and_written(
    kit_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = kit_folder / "broken_one.py"
    broken.write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(kit_folder))
    monkeypatch.setattr(kit_run, "NEEDED", ("numpy", "broken_one"))
    monkeypatch.setattr(kit_run, "NEEDED_BY_SERVERS", ("no_such_server",))
    assert kit_run.main([]) == 2
    said = capsys.readouterr().out
    assert "missing: broken_one (OSError: libcudart.so.13" in said
    assert "missing for servers: no_such_server (ModuleNotFoundError" in said
    assert [line.split(" ")[0] for line in found(kit_folder)["missing"]] == [
        "broken_one",
        "no_such_server",
    ]
    monkeypatch.setattr(kit_run, "NEEDED", ("numpy",))
    monkeypatch.delenv(SELFTEST)
    assert kit_run.main([]) == 2
    assert found(kit_folder)["missing"][0].startswith("a CUDA device, torch sees none")


def test_parts_are_added_to_what_others_found(
    kit_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: Any) -> dict[str, Any]:
        run.result["servers"] = {"so_far": {"plain": 1}}
        raise RuntimeError("a server ended")

    monkeypatch.setattr(kit_run, "NEEDED_BY_SERVERS", ("no_such_server",))
    monkeypatch.setitem(kit_run._OF_PART, "copies", lambda run: {"results": 2})
    assert kit_run.main(["--parts", "copies"]) == 0
    assert kit_run.main(["--parts", "servers"]) == 1
    lines = capsys.readouterr().out.splitlines()
    said = [at for at, line in enumerate(lines) if line.startswith("no servers: no_such_server")]
    assert said
    assert said[0] < lines.index("== servers")
    monkeypatch.setitem(kit_run._OF_PART, "servers", fails)
    assert kit_run.main(["--parts", "servers"]) == 1
    both = found(kit_folder)
    assert both["copies"] == {"results": 2, "gpu": "none, self-test"}
    assert both["servers"]["so_far"] == {"plain": 1}
    assert both["servers"]["failed"] == "RuntimeError: a server ended"

    (kit_folder / "COMMIT").write_text("b" * 40)  # another kit: nothing of it is this one's
    assert kit_run.main(["--parts", "copies"]) == 0
    assert "servers" not in found(kit_folder)
    assert json.loads((kit_folder / "gpu-aaaaaaaaa.json").read_text()) == both
    (kit_folder / "gpu.json").write_text('{"commit": "bb')
    assert kit_run.main(["--parts", "copies"]) == 0
    assert found(kit_folder)["copies"]["results"] == 2


# Python runs it at the start of each process that finds it.
_IN_KERNELS = """
import os, signal, sys, time
if "kernels" in sys.orig_argv and "--checked" in sys.orig_argv:
    {}
"""


@pytest.mark.parametrize(
    ("ends", "limit_s", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 600.0, "its process ended with -11"),
        ("time.sleep(3600)", 1.0, "it took over 1 s"),
        ("raise SystemExit(1)", 600.0, "its process ended with 1"),
    ],
)
def test_a_part_that_crashes_or_hangs_ends_no_other(
    ends: str, limit_s: float, said: str, kit_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kit_folder / "sitecustomize.py").write_text(_IN_KERNELS.format(ends))
    monkeypatch.setenv("PYTHONPATH", f"{kit_folder}:{ROOT}")
    monkeypatch.setitem(kit_run._LONGEST_S, "kernels", limit_s)
    monkeypatch.setattr(kit_run, "cannot_serve", lambda lacking: "no sglang")
    out = kit_folder / "out"
    out.mkdir()
    kit_run._write(out, {"commit": "a" * 40, "kernels": {"failed": "in an earlier run"}})
    assert kit_run.main(["--quick", "--out", str(out)]) == 1
    left = found(out)
    assert left["kernels"] == {"failed": said}
    assert left["copies"]["results"]["load_gb_s"] > 0
    assert left["copies"]["gpu"] == "none, self-test"
    assert left["servers"] == {"failed": "missing for servers: no sglang"}
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json"]


def test_what_a_killed_part_found_so_far_stays(
    kit_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_killed(part: str, flags: Any, left_s: float) -> str:
        if part == "copies":
            kit_run._write(flags.out, {"commit": "a" * 40, "copies": {"failed": "other bits"}})
            return "its process ended with 1"
        so_far = {"servers": {"so_far": {"plain": 1}}}
        kit_run._write(flags.out, {**found(kit_folder), **so_far})
        return "its process ended with -9"

    monkeypatch.setattr(kit_run, "cannot_serve", lambda lacking: "")
    monkeypatch.setattr(kit_run, "_in_a_process", is_killed)
    assert kit_run.main(["--parts", "copies", "servers"]) == 1
    assert found(kit_folder)["copies"] == {"failed": "other bits"}
    assert found(kit_folder)["servers"] == {
        "failed": "its process ended with -9",
        "so_far": {"plain": 1},
    }


def test_a_process_checks_its_share_of_the_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for at in range(5):
        kernels.main(at, 5)
    assert sum(map(int, capsys.readouterr().out.split())) == 36

    def ends(out: str, err: str, code: int) -> Any:
        return SimpleNamespace(communicate=lambda: (out, err), returncode=code)

    ended = iter([ends("8\n", "", 0), ends("", "a page\nCaseFailedError: other bits\n", 1)])
    monkeypatch.setattr(kernels, "_start", lambda command: next(ended))
    with pytest.raises(CaseFailedError, match="other bits"):
        kernels.check_in_processes(2)


def test_a_kernel_that_does_not_compile_is_left_out_in_a_line() -> None:
    lines = codec_kernels.check(("rans", "no_such_kernel"))
    assert lines["rans"].startswith("2 cases, all bits as stated")
    assert lines["no_such_kernel"].startswith("left out with triton 3.")
    assert lines["no_such_kernel"].endswith("KeyError: 'no_such_kernel'")
    assert "\n" not in lines["no_such_kernel"]


def test_hicache_is_left_out_where_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def server(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(startup_s=1.0)

    asker = SimpleNamespace(run=lambda: servers.Seen(ttft_ms={"device": [2.0]}))
    monkeypatch.setattr(servers, "_server", server)
    monkeypatch.setattr(servers, "_Asker", lambda *_: asker)
    kept: list[list[str]] = []
    seen = servers.measure(
        "cuda", servers.TINY, Progress(), lambda found: kept.append(list(found)), time.monotonic()
    )
    assert kept == [["plain"], ["plain", "hier_kv"]]
    assert "hicache has no figures: no time was left for it" in seen["plain"].notes


@pytest.mark.parametrize("failing", ["hicache", "hier_kv"])
def test_without_hicache_the_others_have_figures(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a device is had once: what was measured before is kept."""

    @contextmanager
    def server(device: str, side: str, *_: Any) -> Iterator[Any]:
        if side == failing:
            raise ServerError("the server ended with 1 at start")
        yield SimpleNamespace(startup_s=1.0)

    times: dict[str, list[float]] = {"device": [2.0], "host": [3.0]}
    asker = SimpleNamespace(run=lambda: servers.Seen(ttft_ms=times, gaps_ms=times))
    monkeypatch.setattr(servers, "_server", server)
    monkeypatch.setattr(servers, "_Asker", lambda *_: asker)
    if failing == "hier_kv":
        with pytest.raises(ServerError):
            servers.measure("cuda", servers.TINY, Progress())
        return
    seen = servers.measure("cuda", servers.TINY, Progress())
    assert set(seen) == {"plain", "hier_kv"}
    assert "hicache has no figures: the server ended with 1 at start" in seen["plain"].notes


@pytest.mark.long
def test_the_kit_runs_without_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    assert kit.pack(tmp_path / "kit.tar.gz", with_wheels=False) < kit.MOST_BYTES
    with tarfile.open(tmp_path / "kit.tar.gz") as packed:
        packed.extractall(tmp_path, filter="tar")
    here = tmp_path / "gpu-kit"
    assert (here / "run.sh").stat().st_mode & 0o100
    assert len((here / "COMMIT").read_text().strip()) == 40
    if torch.cuda.is_available():
        pytest.skip("the kit would measure here")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_SGLANG],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "missing: a CUDA device" in done.stdout
    assert "torch 2" in done.stdout
    assert json.loads((here / "gpu.json").read_text())["missing"]
