"""Real servers of what `fuzz_flags` accepts: none may start and fail at its first requests.

    python -m tests.faults.fuzz.fuzz_requests --servers 20 --seed 1

Each server has random weights and answers a prompt twice, the second time from DRAM. Ends:

    served     both answers came, and the second one reused what the first had saved
    sglang     it fails without the plugin, too
    FAILED     anything else
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from testkit.requests import by_tier, flush_device, settle
from testkit.server import Server, ServerError
from tests.faults.flag_models import ARGUMENTS, MODELS, model_folder
from tests.faults.flag_modes import placed
from tests.faults.fuzz.fuzz_flags import run

_PLUGIN = ["--enable-hier-kv", "--hier-kv-host-size", "0.1", "--hier-kv-disk-size", "0.1"]
_PLUGIN += ["--hier-kv-disk-segment-size", "0.01", "--hier-kv-disk-dir"]
_BASE = [
    "--load-format",
    "dummy",
    "--max-total-tokens",
    "4096",
    "--attention-backend",
    "cpu_extend",
]
_PROMPT = list(range(100, 400))
# What a test's server says itself, what takes more processes than a small machine runs, and what
# listens for others.
_LEFT_OUT = (
    *("--host", "--port", "--nnodes", "--node-rank", "--tp-size", "--pp-size", "--dp-size"),
    *("--attn-dp-size", "--ep-size", "--moe-dp-size", "--tokenizer-worker-num"),
    *("--detokenizer-worker-num", "--disaggregation-mode", "--nccl-port", "--grpc-mode"),
)
_START_S = 600.0


def serve(case: dict[str, Any], folder: Path, plugin: list[str]) -> str:
    """Starts a server and asks it; what went wrong, or nothing."""
    name = case["model"]
    model = folder / name
    if not model.exists():
        model_folder(model, MODELS[name])
    args = [*_BASE, *ARGUMENTS.get(name, ()), *placed(case["arguments"], folder), *plugin]
    log = folder / "server.log"
    try:
        with Server(
            args, model=model, log_path=log, stop="kill", start_timeout_s=_START_S
        ) as server:
            _ask(server)
            if not plugin:
                return ""
            settle(server)
            flush_device(server)
            reused = by_tier(_ask(server)["meta_info"])
            return "" if reused.get("host") else f"nothing came from DRAM: {reused}"
    except (ServerError, OSError, AssertionError) as error:
        return f"{error}"[-2000:]


def _ask(server: Server) -> dict[str, Any]:
    sampling = {"max_new_tokens": 3, "ignore_eos": True}
    return server.generate(input_ids=_PROMPT, sampling_params=sampling)


def main() -> int:
    """Runs the servers; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    cases = [
        case
        for case in run(4 * given.servers, given.seed)
        if case["end"] == "accepted" and not set(case["arguments"]) & set(_LEFT_OUT)
    ]
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases[: given.servers]:
            plugin = [*_PLUGIN, f"{folder}/disk-{ends.total()}"]
            words, end = serve(case, Path(folder), plugin), "served"
            if words:
                end = "sglang" if serve(case, Path(folder), []) else "FAILED"
            ends[end] += 1
            print(end, case["model"], *case["arguments"], words if end == "FAILED" else "")
    print(dict(ends))
    return int(ends["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
