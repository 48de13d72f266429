r"""SGLang's own benchmark, `sglang.bench_serving`, without the plugin and with it.

    python -m sglang.launch_server --model-path M --port 30001 --enable-cache-report
    python -m sglang.launch_server --model-path M --port 30000 --enable-hier-kv \
        --hier-kv-host-size 16 --hier-kv-disk-dir /kv --hier-kv-disk-size 100
    python examples/bench_serving.py --without http://127.0.0.1:30001 --url http://127.0.0.1:30000

Two workloads of its data set `generated-shared-prefix`: prompts of which each group begins with the
same text, and conversations of several turns; in both more than the device holds, or there is
nothing to see. Where there is a GPU for one server only, each is asked alone (`--without` or
`--url` left out). Printed is, for each, where the reused prompt tokens lay, and the time to the
first token. `storage` is disk and remote store together.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
import tempfile
import traceback
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARK = "sglang.benchmark.serving"
TIERS = ("device", "host", "storage")


def no_answer(url: str) -> str:
    """Why a server does not answer; empty where it does."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30.0):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code == 401 else str(error)  # the benchmark has the key
    except (OSError, ValueError) as error:
        return str(error)


def measure(url: str, workload: Sequence[str], common: Sequence[str]) -> dict[str, Any]:
    """Runs SGLang's benchmark once.

    Args:
        url: of the server.
        workload: its flags for what is asked.
        common: flags of all runs.

    Returns:
        What it wrote: medians in ms, and `cache_report` with tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.jsonl"
        words = ["--base-url", url, "--dataset-name", "generated-shared-prefix", "--cache-report"]
        words += ["--disable-tqdm", "--output-file", str(file), *workload, *common]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                run_benchmark(words)
            found: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
        except (Exception, SystemExit):
            why = f"{said.getvalue()}{traceback.format_exc()}"
            sys.exit(f"python -m {BENCHMARK} {' '.join(words)} failed:\n{why}")
        return found


def run_benchmark(words: Sequence[str]) -> None:
    """`python -m sglang.benchmark.serving WORDS`, in this process: its import takes seconds."""
    before, sys.argv = sys.argv, [BENCHMARK, *words]
    try:
        runpy.run_module(BENCHMARK, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def line(found: dict[str, Any]) -> str:
    """What a person reads of one run."""
    cache = found["cache_report"]
    tokens = ", ".join(f"{tier} {cache[f'{tier}_cached_tokens'] or 0}" for tier in TIERS)
    ttft = f"{found['median_ttft_ms']:.0f} ms to the first token (median)"
    return f"{cache['total_prompt_tokens']} prompt tokens, {tokens}; {ttft}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs both workloads against each server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server with the plugin")
    parser.add_argument("--without", metavar="URL", help="of one without")
    parser.add_argument("--groups", type=int, default=32, help="texts that are shared")
    parser.add_argument("--prompts", type=int, default=4, help="of each group")
    parser.add_argument("--shared-tokens", type=int, default=2048, help="of such a text")
    parser.add_argument("--question-tokens", type=int, default=128, help="of each question")
    parser.add_argument("--answer-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=8,
        help="prompts at a time; conversations are all at once",
    )
    parser.add_argument("--tokenizer", help="the model's, where its server's path is not here")
    args = parser.parse_args(argv)
    servers = {"without": args.without, "with": args.url}
    if not any(servers.values()):
        parser.error("give --url, --without, or both")
    for flag, url in (("--url", args.url), ("--without", args.without)):
        if url and (why := no_answer(url)):
            start = f"start one as the head of this file says, or give its {flag}"
            parser.exit(2, f"{parser.prog}: no server answers at {url} ({why}); {start}\n")
    common = ["--gsp-num-groups", args.groups, "--gsp-system-prompt-len", args.shared_tokens]
    common += ["--gsp-question-len", args.question_tokens, "--gsp-output-len", args.answer_tokens]
    common += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    shared = ["--backend", "sglang", "--gsp-prompts-per-group", args.prompts]
    shared += ["--max-concurrency", args.concurrency]
    # A conversation is a group of its own, so that what returns is what was said in it. All go on
    # at a time: one after the other, each would have the device to itself.
    turns = ["--backend", "sglang-oai-chat", "--gsp-prompts-per-group", 1]
    turns += ["--gsp-num-turns", args.turns, "--max-concurrency", args.groups]
    for what, workload in (("shared prefixes", shared), ("conversations", turns)):
        for name, url in servers.items():
            if url:
                found = measure(url, list(map(str, workload)), list(map(str, common)))
                print(f"{what}, {name}: {line(found)}", flush=True)


if __name__ == "__main__":
    main()
