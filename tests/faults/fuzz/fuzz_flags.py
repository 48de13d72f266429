"""Combinations of SGLang's arguments: none may be accepted and fail behind the weights.

    python -m tests.faults.fuzz.fuzz_flags --cases 1000 --seed 1

Each case is a model, a few arguments drawn from all that SGLang has, and the plugin. A process is
forked for it that does what a server does, without weights: SGLang parses the arguments, decides
what they leave open and reads the model's configuration; where nobody refused, SGLang's own code
builds request pool, KV pool, allocator and radix tree of that configuration, and the plugin's
second check looks at what came out. A case ends as one of:

    refused    by the plugin, with one sentence, before anything was built
    sglang     fails without the plugin, too
    accepted   and what was built is what can be stored
    FAILED     anything else
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime_cpu import launch
from testkit.server import ROOT
from tests.faults.flag_models import ARGUMENTS, MODELS, SERVED, model_folder
from tests.faults.flag_modes import draw_mode, placed

_HERE = "tests.faults.fuzz.fuzz_flags"
_PLUGIN = ["--enable-hier-kv", "--hier-kv-host-size", "0.05"]
_BASE = ["--load-format", "dummy", "--max-total-tokens", "4096", "--dtype", "bfloat16"]
_CPU = ["--device", "cpu", "--attention-backend", "cpu_extend", "--sampling-backend", "pytorch"]
# A value for what argparse knows to be text or a number and nothing more.
_NUMBERS = ("0", "1", "2", "4", "64")
# These read files, bind ports or end the process, which says nothing of KV.
_LEFT_OUT = {"help", "version", "config", "model_path", "enable_hier_kv", "device"}
_MOST_ARGUMENTS = 4
_TIMEOUT_S = 300


Judge = Callable[[list[str]], tuple[str, str]]


def run(num_cases: int, seed: int) -> list[dict[str, Any]]:
    """Runs cases in a process that has SGLang's CPU engine on; their models, arguments, ends."""
    done = subprocess.run(
        [sys.executable, "-m", _HERE, "--cases", str(num_cases), "--seed", str(seed), "--inside"],
        cwd=ROOT,
        env=launch.environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    cases: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return cases


def _cases(num_cases: int, seed: int) -> list[dict[str, Any]]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = [values for action in parser._actions if (values := _values(action))]
    load_plugins()
    random_ = random.Random(seed)
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model_folder(Path(folder) / name, MODELS[name])
        # What every case imports is imported once, before the first fork.
        _import_all(str(Path(folder) / "llama"))
        for _ in range(num_cases):
            name = random_.choice(list(MODELS) + 2 * list(SERVED))
            drawn = random_.sample(choices, random_.randint(1, _MOST_ARGUMENTS))
            added = [part for values in drawn for part in random_.choice(values)]
            argv = ["--model-path", str(Path(folder) / name), *_BASE, *_CPU]
            added += draw_mode(random_, name)
            argv += [*ARGUMENTS.get(name, ()), *placed(added, Path(folder))]
            end, words = _in_a_process(_end_of, argv)
            if end == "FAILED" and _in_a_process(_end_without, argv)[0] == "FAILED":
                end = "sglang"
            out.append({"model": name, "arguments": added, "end": end, "words": words})
    return out


def _values(action: argparse.Action) -> list[list[str]]:
    """What may be put on a command line for one argument."""
    if action.dest in _LEFT_OUT or not action.option_strings:
        return []
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [[flag]]
    if action.choices is not None:
        return [[flag, str(value)] for value in action.choices]
    if action.type is int or isinstance(action.default, int):
        return [[flag, value] for value in _NUMBERS]
    return []


def _in_a_process(judge: Judge, argv: list[str]) -> tuple[str, str]:
    """How a case ends; in a fork, as SGLang's settings are one of a process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, judge, argv), daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(_TIMEOUT_S):
            found: tuple[str, str] = receiver.recv()
            return found
        return "FAILED", "it did not end"
    except EOFError:
        return "FAILED", "the process ended"
    finally:
        child.kill()
        child.join()
        receiver.close()


def _send(sender: Any, judge: Judge, argv: list[str]) -> None:
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        found = judge(argv)
    sender.send(found)


def _import_all(model: str) -> None:
    """Imports what every case needs, so that a fork has it."""
    from tests.faults.flag_build import import_all

    import_all()
    _resolve(["--model-path", model, *_BASE, *_CPU, *_PLUGIN])


def _end_of(argv: list[str]) -> tuple[str, str]:
    from tests.faults.flag_build import build

    try:
        server_args = _resolve([*argv, *_PLUGIN])
    except SystemExit as end:
        text = str(end.code)
        is_sentence = text.startswith("sglang-hier-kv: ") and "\n" not in text
        return ("refused" if is_sentence and text.endswith(".") else "FAILED"), text
    except Exception:
        return "FAILED", traceback.format_exc()
    try:
        return "accepted", build(server_args)
    except Exception:
        return "FAILED", "accepted, and then: " + traceback.format_exc()


def _end_without(argv: list[str]) -> tuple[str, str]:
    """How it ends without the plugin."""
    from tests.faults.flag_build import build_without

    try:
        build_without(_resolve(argv))
    except (Exception, SystemExit):
        return "FAILED", ""
    return "accepted", ""


def _resolve(argv: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    return server_args


def main() -> int:
    """Runs the cases; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print("\n" + json.dumps(_cases(given.cases, given.seed)))
        return 0
    cases = run(given.cases, given.seed)
    for case in cases:
        if case["end"] == "FAILED":
            print(case["model"], *case["arguments"], "\n", case["words"])
    print(dict(Counter(case["end"] for case in cases)))
    return int(any(case["end"] == "FAILED" for case in cases))


if __name__ == "__main__":
    sys.exit(main())
