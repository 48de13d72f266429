"""The case `ranks`: two tensor parallel ranks, and two data parallel ones, against plain SGLang.

The page store of each rank is late by up to 50 ms at every operation, each rank by its own chance,
and SGLang's rank consensus checker ends the server when ranks decide differently. Several requests
at a time fall into other batches in every run, whose rounding differs in plain SGLang too: so our
run may differ from plain runs as much as these do from each other. One at a time every answer must
be plain SGLang's, bit for bit, where all pages came back: the server computes what is late.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from bench.core.case import CaseFailedError, Options, Report
from bench.core.output import Table
from sglang_ext.settings.config import GIB
from testkit import rank_probe
from testkit.rank_requests import (
    ENVIRONMENT,
    JITTER_MS,
    PAGE,
    WAYS,
    Answer,
    Served,
    answer_of,
    ask,
    bit_differences,
    make_requests,
    send_all,
    token_differences,
)
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from testkit.workload import load_texts, load_tokenizer

_NUM_PLAIN_RUNS = 3
_NUM_REQUESTS = {False: 300, True: 60}
_EXACT_LENGTHS = (100, 128, 192, 230, 256, 333, 384, 450, 512, 600)
_POOL_TOKENS, _PLAIN_POOL_TOKENS = 4096, 65536
# Of a page of tinylm on a server of one rank; the pages of two tensor parallel ranks are half.
_SLOT_BYTES = 266_240
_HOST_PAGES = 64
_START_S = 300.0


def run(options: Options) -> Report:
    """Runs both ways.

    Raises:
        CaseFailedError: an answer was not plain SGLang's, or ranks diverged.
    """
    report = Report(results={})
    table = Table(
        "two ranks, their stores late by 0 to 50 ms",
        ("way", "requests", "aborted", "reused", "differ", "plain differ", "exact", "steps",
         "reductions a step"),
    )  # fmt: skip
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            options.progress.stage(f"{way}: plain SGLang and two ranks")
            found = run_way(way, Path(folder), num_requests=_NUM_REQUESTS[options.quick])
        report.results[way] = found
        report.n[way] = found["requests"]
        table.rows.append((
            way, found["requests"], found["aborted"], sum(found["reused_tokens"].values()),
            mean(found["token_differences"]), mean(found["plain_token_differences"]),
            f"{found['exact']} of {found['exact_asked']}", found["steps"],
            str(found["reductions_per_step"]),
        ))  # fmt: skip
        _check(way, found)
    report.tables.append(table)
    return report


def run_way(way: str, folder: Path, *, num_requests: int, seed: int = 0) -> dict[str, Any]:
    """One way: plain runs, our run, and both one request at a time."""
    requests = make_requests(num_requests, seed)
    exact_prompts = _exact_prompts(seed)
    args = [*WAYS[way], "--page-size", str(PAGE)]
    plain_args = [*args, "--max-total-tokens", str(_PLAIN_POOL_TOKENS)]
    with _server(plain_args, folder / "plain.log", ENVIRONMENT) as server:
        plain = []
        for number in range(_NUM_PLAIN_RUNS):
            plain.append(send_all(server, requests, f"plain{number}"))
            flush_device(server)
        expected = [_twice(server, prompt) for prompt in exact_prompts]
    env = {**ENVIRONMENT, **rank_probe.environment(folder / "probe"), ENV_JITTER: str(JITTER_MS)}
    with _server([*args, *_hier_args(folder)], folder / "hier.log", env) as server:
        started_s = time.monotonic()
        ours = send_all(server, requests, "ours")
        wall_s = time.monotonic() - started_s
        exact = _ask_exact(server, exact_prompts)
        states = server.get("/server_info")["internal_states"]
        probes = rank_probe.fresh_counts(folder / "probe")
        log = server.log()
    return {
        "requests": len(requests),
        "aborted": sum(request.abort_after_s is not None for request in requests),
        "wall_s": round(wall_s, 1),
        "reused_tokens": _sum_tiers(ours),
        "token_differences": [token_differences(ours, one) for one in plain],
        "plain_token_differences": [token_differences(a, b) for a, b in combinations(plain, 2)],
        "bit_differences": [bit_differences(ours, one) for one in plain],
        "plain_bit_differences": [bit_differences(a, b) for a, b in combinations(plain, 2)],
        "exact_asked": sum(answer is not None for answers in exact.values() for answer in answers),
        "exact": sum(
            got == wanted
            for answers in exact.values()
            for got, wanted in zip(answers, expected, strict=True)
        ),
        "steps": sum(probe["steps"] for probe in probes),
        "reductions_per_step": [probe["per_step"] for probe in probes],
        "ranks": [rank for state in states for rank in _ranks_of(state["hier_kv"])],
        "divergences": log.count("Found rank divergence"),
    }


def _check(way: str, found: Mapping[str, Any]) -> None:
    wanted = mean(found["plain_token_differences"])
    got = mean(found["token_differences"])
    if got > wanted + 3 * max(1.0, wanted) ** 0.5:
        raise CaseFailedError(f"{way}: {got} answers differ from plain SGLang's, theirs {wanted}")
    if not found["exact_asked"]:
        raise CaseFailedError(f"{way}: of no prompt all pages came back, one at a time")
    if found["exact"] != found["exact_asked"]:
        raise CaseFailedError(
            f"{way}: {found['exact']} of {found['exact_asked']} answers are equal"
        )
    if found["divergences"]:
        raise CaseFailedError(f"{way}: SGLang's checker found that ranks decided differently")


def _server(args: Sequence[str], log: Path, env: Mapping[str, str]) -> Server:
    return Server(args, log_path=log, env=env, stop="kill", start_timeout_s=_START_S)


def _hier_args(folder: Path) -> list[str]:
    return [
        *("--max-total-tokens", str(_POOL_TOKENS), "--enable-hier-kv"),
        *("--hier-kv-host-size", f"{(_HOST_PAGES + 0.5) * _SLOT_BYTES / GIB:.9f}"),
        *("--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "2"),
        *("--hier-kv-disk-segment-size", "0.03"),
    ]


def _exact_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(1000 + seed)
    texts = load_texts(load_tokenizer())
    prompts = []
    for length in _EXACT_LENGTHS:
        text = rng.choice(texts)
        start = rng.randrange(len(text) - length)
        prompts.append(text[start : start + length])
    return prompts


def _twice(server: Server, prompt: list[int]) -> Answer:
    """The answer to a repeat: a device hit. With two data parallel ranks, of either of them."""
    for _ in range(2):
        ask(server, prompt)
    return answer_of(ask(server, prompt))


def _ask_exact(server: Server, prompts: list[list[int]]) -> dict[str, list[Answer | None]]:
    """Answers to prompts whose pages lie in DRAM, and then on disk too.

    None where not all of them came back: the server computes what a late store would bring later,
    and of other shapes products round otherwise.
    """
    answers: dict[str, list[Answer | None]] = {"host": [], "disk": []}
    for prompt in prompts:
        ask(server, prompt)
        ask(server, prompt)  # the other data parallel rank has it too
        flush_device(server)
        answers["host"].append(_reused_answer(server, prompt))
    flush_device(server)
    answers["disk"] = [_reused_answer(server, prompt) for prompt in prompts]
    return answers


def _reused_answer(server: Server, prompt: list[int]) -> Answer | None:
    """The answer to a prompt of which all whole pages were reused; else None."""
    answer = ask(server, prompt)
    reusable = (len(prompt) - 1) // PAGE * PAGE
    return answer_of(answer) if answer["meta_info"]["cached_tokens"] == reusable else None


def _sum_tiers(served: Sequence[Served]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in served:
        for tier, tokens in one.by_tier.items():
            total[tier] = total.get(tier, 0) + tokens
    return total


def _ranks_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = state.get("tp_ranks", [state])
    keys = ("tp_rank", "dp_rank", "agreements", "host")
    return [{key: rank[key] for key in keys if key in rank} for rank in ranks]
