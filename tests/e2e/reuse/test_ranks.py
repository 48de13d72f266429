"""Two ranks of either kind on the real server, their page stores late, each by its own chance.

SGLang's rank consensus checker is on: it ends the server when ranks decide differently. `python -m
bench ranks` does the same with 300 requests, beside plain SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit import rank_probe
from testkit.rank_requests import (
    ENVIRONMENT,
    JITTER_MS,
    WAYS,
    Served,
    answer_of,
    ask,
    make_requests,
    send_in_halves,
)
from testkit.remote.otlp import Span, TraceCollector
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    PAGE,
    by_tier,
    check_agreed,
    hier_args,
    real_prompts,
    settled,
    states,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 50
HOST_PAGES = 40
LENGTHS = (128, 200, 300, 384)


class Run(NamedTuple):
    """One server of two ranks, after its requests."""

    way: str
    folder: Path
    served: list[Served]
    device: list[dict[str, Any]]
    host: list[dict[str, Any]]
    steered: list[Any]
    states: list[dict[str, Any]]
    metrics: str
    probes: list[dict[str, Any]]
    num_flushes: int
    log: str
    traces: list[list[Span]]


@pytest.fixture(scope="module", params=sorted(WAYS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    way, folder = request.param, tmp_path_factory.mktemp(request.param)
    args = [*hier_args(folder, host_pages=HOST_PAGES), *WAYS[way], "--page-size", str(PAGE)]
    args += ["--max-total-tokens", "3072", "--enable-metrics"]
    env = {**ENVIRONMENT, **rank_probe.environment(folder / "probe"), ENV_JITTER: str(JITTER_MS)}
    log, collector = folder / "server.log", TraceCollector()
    args += collector.args()
    env |= collector.environment(by_another_process=way == "dp")
    server = Server(args, log_path=log, env=env, stop="kill", start_timeout_s=300.0)
    with collector, server:
        served = send_in_halves(server, make_requests(NUM_REQUESTS, seed=1), "mixed")
        settled(server)  # or what comes next might find no room in DRAM
        device, host = [], []
        prompts = list(real_prompts(LENGTHS, seed=3))
        for number, prompt in enumerate(prompts):
            ask(server, prompt)
            ask(server, prompt)  # of two data parallel ranks the other one has it now, too
            device.append(ask(server, prompt))
            flush_device(server)
            host.append(ask(server, prompt, rid=f"host-{number}"))
            ask(server, prompt)  # of two data parallel ranks each loads it
            settled(server)
        wishes = {"prefetch": True, "pin_s": 600}
        steered = [
            server.post("/hier_kv/steer", {"input_ids": prompt, **wishes}) for prompt in prompts
        ]
        found = states(server)
        probes = rank_probe.fresh_counts(folder / "probe")
        metrics = server.get("/metrics")
        num_ranks = 2 if way == "tp" else 1
        traces = [collector.trace_of(f"host-{at}", num_ranks) for at in range(len(prompts))]
        yield Run(
            way, folder, served, device, host, steered, found, metrics, probes, len(prompts) + 1,
            server.log(), traces,
        )  # fmt: skip


def test_every_request_is_answered_and_prefixes_are_reused(run: Run) -> None:
    reused: dict[str, int] = {}
    for one in run.served:
        for tier, tokens in one.by_tier.items():
            reused[tier] = reused.get(tier, 0) + tokens
    assert sum(one.answer is not None for one in run.served) > 0.7 * NUM_REQUESTS
    assert sum(reused.values()) > 1000, reused
    # Half of the turns follow an empty device: how much comes is chance, as HOST_PAGES are few.
    assert reused["host"] + reused["disk"] > 0, reused
    check_agreed(run.log, 2)


def test_what_ranks_loaded_answers_as_what_they_computed(run: Run) -> None:
    for on_device, from_host in zip(run.device, run.host, strict=True):
        assert by_tier(on_device)["device"] == by_tier(from_host)["host"] > 0
        assert answer_of(on_device) == answer_of(from_host)


def test_each_rank_that_computes_a_request_has_its_part_in_the_trace(run: Run) -> None:
    """Also where spans are made and sent by a process beside each of SGLang's."""
    assert ("Async trace exporter started" in run.log) == (run.way == "dp")
    for answer, trace in zip(run.host, run.traces, strict=True):
        ranks = [span for span in trace if "hier_kv.reused.host_tokens" in span.attributes]
        assert len({span.attributes["pid"] for span in ranks}) == (2 if run.way == "tp" else 1)
        for rank in ranks:
            assert rank.attributes["hier_kv.reused.host_tokens"] == by_tier(answer)["host"]
        forwards = {span.span_id: span for span in trace if span.name == "prefill_forward"}
        loads = [span for span in trace if span.name == "hier_kv.load"]
        below = [forwards[span.parent_id].parent_id for span in loads]
        assert sorted(below) == sorted(span.span_id for span in ranks)
        assert {span.attributes["hier_kv.load.tokens"] for span in loads} == {
            by_tier(answer)["host"]
        }


def test_what_is_wanted_of_a_prompts_pages_reaches_every_rank(run: Run) -> None:
    """Nothing of it is agreed on: each rank does it with its own pages."""
    assert [len(one["schedulers"]) for one in run.steered] == [len(run.states)] * len(LENGTHS)
    for one in run.steered:
        assert all(done["prefetching"] for done in one["schedulers"])
        assert any(done["host"] for done in one["schedulers"])
    ranks = [rank for one in run.states for rank in one.get("tp_ranks", [one])]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["host"]["prefetches"] == len(LENGTHS)
        assert rank["host"]["pinned_pages"] == rank["host"]["pinned_now_pages"] > 0


def test_the_number_of_reductions_a_step_is_fixed(run: Run) -> None:
    assert len(run.probes) == 2
    for probe in run.probes:
        assert probe["steps"] > 20  # how many is chance: idle ones count, too
        if run.way == "dp":
            assert set(probe["per_step"]) == {0}, probe
        else:
            # A flush waits for all saves, and takes their results before SGLang drops the tree.
            assert set(probe["per_step"]) == {1, 2}, probe
            assert probe["per_step"][2] == run.num_flushes, probe


def test_each_rank_has_a_store_of_its_own_and_tells_of_it(run: Run) -> None:
    ranks = [rank for one in run.states for rank in one.get("tp_ranks", [one])]
    kinds = sorted((rank["tp_rank"], rank["dp_rank"]) for rank in ranks)
    names = {"tp": "dp0-tp{}-of-2", "dp": "dp{}-tp0-of-1"}[run.way]
    assert kinds == {"tp": [(0, 0), (1, 0)], "dp": [(0, 0), (0, 1)]}[run.way]
    # A page of a tensor parallel rank has half of the heads.
    capacity = {"tp": HOST_PAGES, "dp": HOST_PAGES // 2}[run.way]
    for number, rank in enumerate(ranks):
        assert capacity - 1 <= rank["host"]["host_capacity_pages"] <= capacity
        assert rank["host"]["loaded_pages"] > 0
        assert list((run.folder / "disk" / names.format(number)).glob("*/seg-*.hkv"))
        label = f'{run.way}_rank="{number}"'
        lines = [line for line in run.metrics.splitlines() if label in line]
        assert any("hier_kv_pages_total" in line for line in lines), label
