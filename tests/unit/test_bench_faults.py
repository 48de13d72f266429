"""How faults get into a server's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults.inject import CONTROL_VARIABLE, Control, environment, import_path
from runtime_cpu import launch
from runtime_cpu.forked import Nursery


def test_a_server_with_faults_is_forked_where_all_can_import_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, control = tmp_path / "plugin", Control(tmp_path / "control.json")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    alone = environment(plugin, control)
    assert not Nursery(launch.environment(), tmp_path / "log").can_start(
        [], {**launch.environment(), **alone}
    )
    assert alone["PYTHONPATH"] == import_path(plugin)
    monkeypatch.setenv("PYTHONPATH", import_path(plugin))
    among_others = environment(plugin, control)
    assert among_others == {CONTROL_VARIABLE: str(control.path)}
    assert Nursery(launch.environment(), tmp_path / "log").can_start(
        [], {**launch.environment(), **among_others}
    )
