"""Parses many command lines in one process, as SGLang's main process does, plugins loaded.

Reads a JSON list of {"argv", "sglang", "resolve", "allow_untested", "env"} from stdin; `sglang` is
a folder to be looked at as if it were the SGLang that is installed, `env` are variables of this
case alone. Writes for each either {"exit", "stderr"} or {"args": SGLang's arguments, "hier_kv": the
plugin's settings}. With "resolve" SGLang decides what was left open, as it does before it starts
its processes. Importing SGLang takes seconds, so the tests run this once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ext.seam.contract import verdict
from sglang_ext.seam.contract.source import SGLangSource
from sglang_ext.settings.values import ALLOW_UNTESTED


def main() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = sorted({action.dest for action in parser._actions} - {"help"})
    load_plugins()
    true_installed = verdict.installed
    out = []
    for case in json.load(sys.stdin):
        place = case.get("sglang")
        verdict.installed = partial(SGLangSource, Path(place)) if place else true_installed
        os.environ[ALLOW_UNTESTED] = "1" if case.get("allow_untested") else ""
        resolve, env = bool(case.get("resolve")), case.get("env", {})
        os.environ.update(env)
        out.append(_parse(prepare_server_args, names, case["argv"], resolve))
        for name in env:
            del os.environ[name]
    print("\n" + json.dumps(out))


def _parse(prepare: Any, names: list[str], argv: list[str], resolve: bool) -> dict[str, Any]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stderr):
            args = prepare(argv)
            if resolve:
                args.resolve_once()
    except SystemExit as end:
        # The interpreter prints a text, and then ends with 1.
        text = end.code if isinstance(end.code, str) else ""
        return {"exit": 1 if text else end.code, "stderr": stderr.getvalue() + text}
    except Exception:
        return {"exit": "raised", "stderr": traceback.format_exc()}
    return {
        "args": {name: repr(getattr(args, name, None)) for name in names},
        "hier_kv": getattr(args, "_hier_kv", None),
    }


if __name__ == "__main__":
    main()
