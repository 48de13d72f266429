"""The GPU bench where there is none: it says so, and its own checks run on the CPU."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from bench.core.case import ALLOW_DIRTY, CaseFailedError, Options
from bench.core.output import Progress
from bench.gpu import kit
from bench.gpu.case import SELFTEST, run
from bench.gpu.engine import TINY, Engine
from bench.gpu.kernels import check_kernels

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
        run(options())


def test_the_same_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SELFTEST, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run(options())
    assert report.results["device"] == "cpu, self-test"
    assert report.results["load_of_link"] > 0
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


def test_kernels_at_odd_shapes() -> None:
    assert check_kernels(torch.device("cpu")) == 36


@pytest.mark.long
def test_the_kit_runs_without_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    assert kit.pack(tmp_path / "kit.tar.gz") < kit.MOST_BYTES
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
