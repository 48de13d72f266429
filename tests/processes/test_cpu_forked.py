"""Which servers may be forked from a process that has imported SGLang in another environment."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from bench.faults.inject import Control, environment
from runtime_cpu import launch
from runtime_cpu.forked import Nursery, children
from runtime_cpu.zygote import Children, Zygote
from testkit.server import ROOT
from testkit.slow import ENV_JITTER, ENV_SPEED_FILE, on_path
from tests.scripts import run_script


def is_forked(tmp_path: Path, variables: dict[str, str], *args: str) -> bool:
    base = launch.environment()
    nursery = Nursery(on_path(base), tmp_path / "log", tmp_path)
    return nursery.can_start(args, on_path({**base, **variables}))


def with_folder(folder: Path) -> dict[str, str]:
    path = launch.environment()["PYTHONPATH"]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path}"}


def test_a_server_with_a_plugin_more_is_forked(tmp_path: Path) -> None:
    assert is_forked(tmp_path, environment(tmp_path / "plugin", Control(tmp_path / "control")))


def test_a_folder_with_a_module_that_is_nowhere_else_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "no_other_module_is_called_so.py").touch()
    assert is_forked(tmp_path, with_folder(tmp_path))


@pytest.mark.parametrize("name", ["torch", "sitecustomize.py", "sglang.py"])
def test_what_an_import_at_start_would_have_found_needs_a_start(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "path"
    (folder / name).mkdir(parents=True)
    assert not is_forked(tmp_path, with_folder(folder))


def test_what_decides_about_imports_or_was_not_tried_needs_a_start(tmp_path: Path) -> None:
    assert is_forked(tmp_path, {"SGLANG_HIER_KV_TEST": "1"}, "--tp-size", "2")
    assert is_forked(tmp_path, {ENV_SPEED_FILE: "speed", ENV_JITTER: "50"})
    assert is_forked(tmp_path, {}, "--dp-size", "2")
    assert is_forked(tmp_path, {}, "--tp-size", "2", "--nnodes", "2")
    assert not is_forked(tmp_path, {"TRITON_INTERPRET": "1"})
    assert not is_forked(tmp_path, {"PYTHONPATH": str(tmp_path)})  # lacks the stand-ins
    assert is_forked(tmp_path, {"SGLANG_PP_LAYER_PARTITION": "5,3"}, "--pp-size", "2")


def test_what_the_import_of_a_model_sets_changes_nothing(tmp_path: Path) -> None:
    """A test that writes a model would make all starts behind it slow."""
    code = (
        "import os; before = dict(os.environ)\n"
        "from testkit.published_model import class_of_transformers\n"
        "for name in ('Glm4vForConditionalGeneration', 'Mistral3ForConditionalGeneration',"
        " 'Qwen3NextForCausalLM', 'DeepseekV3ForCausalLM'): class_of_transformers(name)\n"
        "print([each for each in os.environ.items() if each not in before.items()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    added = dict(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert is_forked(tmp_path, added), added


SCRIPT = """
import sys
print(sys.stdin.read(), sys.argv[1:], __name__, "torch" in sys.modules)
print("said", file=sys.stderr)
how = sys.argv[1]
if how == "raises":
    raise ValueError("of the script")
sys.exit({"ends": None, "three": 3}.get(how, how))
"""


@pytest.mark.parametrize("how", ["ends", "three", "a sentence", "raises"])
def test_a_script_in_a_copy_reads_writes_and_ends_as_with_python(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    own, copied = (run_script(script, how, stdin="given", fork=fork) for fork in (False, True))
    assert own.stdout == f"given ['{how}'] __main__ False\n"
    assert copied.stdout == own.stdout.replace("False", "True")
    assert copied.returncode == own.returncode == {"ends": 0, "three": 3}.get(how, 1)
    lines = own.stderr.splitlines()
    assert copied.stderr.splitlines()[0] == lines[0] == "said"
    assert copied.stderr.splitlines()[-1] == lines[-1]


ONE: Children = [[]]
TWO: Children = [[], []]
DATA, ATTENTION = ["--dp-size", "2"], ["--dp-size", "2", "--enable-dp-attention"]


@pytest.mark.parametrize(
    ("args", "expected", "traced"),
    [
        ([], [[], []], [ONE, [], []]),
        (["--tp-size", "2"], [[], [], []], [ONE, ONE, [], []]),
        (["--tp-size", "4", "--nnodes", "2"], [[], [], []], [ONE, ONE, [], []]),
        (["--pp-size", "2"], [[], [], []], [ONE, ONE, [], []]),
        (["--pp-size", "2", "--tp-size", "2"], [[]] * 5, [*[ONE] * 4, [], []]),
        (DATA, [TWO, []], [[[], ONE, ONE], [], []]),
        (["--tp-size", "2", *DATA], [[[]] * 4, []], [[[], *[ONE] * 4], [], []]),
        (["--tp-size", "4", *ATTENTION], [[]] * 6, [*[ONE] * 5, [], []]),
        (["--tp-size", "4", "--attn-dp-size", "2"], [[]] * 6, [*[ONE] * 5, [], []]),
    ],
)
def test_processes_are_known_by_who_starts_them(
    args: list[str], expected: Children, traced: Children
) -> None:
    senders = {"SGLANG_TRACE_ASYNC": "1"}
    assert children(args, {}) == children(args, senders) == expected
    assert children([*args, "--enable-trace"], {}) == expected
    assert children([*args, "--enable-trace"], senders) == traced


class Counted(Nursery):
    """Holds the socket of each zygote that it would have started."""

    started: ClassVar[list[socket.socket]] = []

    def _start_zygote(self, listener: socket.socket) -> None:
        self.started.append(listener.dup())


def test_processes_share_a_zygote_and_start_another_where_it_was_killed(tmp_path: Path) -> None:
    def connected(nursery: Nursery) -> int:
        nursery._connected()
        return len(Counted.started)

    paths = {"a": "", "b": str(ROOT)}
    one, two = (
        Counted({"A": "1", "PYTEST_X": each, "PYTHONPATH": path}, tmp_path / "log", tmp_path)
        for each, path in paths.items()
    )
    assert connected(one) == connected(two) == connected(one) == 1
    assert connected(Counted({"A": "2"}, tmp_path / "log", tmp_path)) == 2, "imports may differ"
    Counted.started[0].close()
    assert connected(one) == connected(two) == 3


def test_a_zygote_ends_with_its_last_client_unless_another_one_has_come(tmp_path: Path) -> None:
    nursery = Counted({}, tmp_path / "log", tmp_path)
    first = nursery._connected()
    zygote = Zygote(Counted.started[-1])
    zygote._clients.add(zygote._listener.accept()[0])
    second = Counted({}, tmp_path / "log", tmp_path)._connected()
    first.close()
    assert zygote._answer(zygote._clients.copy().pop()) is None
    assert not zygote._clients
    assert not zygote._may_end()
    second.close()
    assert zygote.serve() is None
    assert connects_anew(nursery)


def connects_anew(nursery: Counted) -> bool:
    before = len(Counted.started)
    nursery._control = None
    nursery._connected()
    return len(Counted.started) == before + 1
