"""The policy bench: small runs of the real simulator, its checks, its flags, and `--trace`."""

from __future__ import annotations

import io
import json
import lzma
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.core.case import CaseFailedError, Options
from bench.core.output import Progress
from bench.core.trace_flags import TraceFlags
from bench.policies import case as policies
from bench.policies.checks import check_all
from bench.policies.jobs import POLICIES, Job, Result, parts_of, simulate, simulate_all
from bench.policies.overlap import Prefill, measure_ratios, measure_read_buffer
from bench.policies.sections import gap_closed, headline
from bench.policies.speed import decisions_per_s
from bench.policies.workloads.agents import (
    SYSTEM_TOKENS,
    agent_tasks,
    document_questions,
    footprint_tokens,
    long_document,
)
from bench.policies.workloads.bundled import BUNDLED
from bench.policies.workloads.models import LLAMA_13B, LLAMA_65B
from bench.policies.workloads.setups import as_turns, chat, chat_system, sessions_at_load
from bench.policies.workloads.sharegpt import sharegpt_like
from tests.long_form import either

QUIET = Progress(io.StringIO())
# Requests of the trace that is somebody's own.
NUM_OWN = either(12, 30)
NUM_CHATS = either(15, 30)


@pytest.fixture(scope="module")
def chat_job() -> Job:
    return Job(
        "chat",
        partial(chat, LLAMA_13B, NUM_CHATS, 20.0),
        chat_system(LLAMA_13B, NUM_CHATS * 8 / 30, NUM_CHATS * 20 / 30),
        (*POLICIES, "recompute"),
    )


@pytest.fixture(scope="module")
def chat_result(chat_job: Job) -> Result:
    return simulate(chat_job)


def test_a_small_chat_fulfils_the_laws_and_orders_the_policies(
    chat_job: Job, chat_result: Result
) -> None:
    check_all([chat_job], {"chat": chat_result})
    rates = {name: value["hit_rate"] for name, value in headline(chat_result.figures).items()}
    assert 0 < rates["lru"] <= rates["waiting"] <= rates["belady"] <= 1
    assert 0 < rates["lookahead"] <= rates["belady"]
    assert set(rates) == set(POLICIES)
    source = sharegpt_like(4, count=NUM_CHATS)
    assert chat_result.figures["lru"]["num_turns"] == source.num_turns.sum()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("computed_tokens", 1, "reused and computed tokens"),
        ("turn_hit_rate", 0.999, "turn hit rate and its cap"),
        ("num_turns", 3, "turns"),
        ("reusable_tokens", 10**9, "should ascend"),
        ("hit_rate", 1.2, "the optimum"),
    ],
)
def test_wrong_outcomes_are_not_reported(
    chat_job: Job, chat_result: Result, key: str, value: float, said: str
) -> None:
    figures = {name: dict(each) for name, each in chat_result.figures.items()}
    figures["lru"][key] = value
    with pytest.raises(CaseFailedError, match=said):
        check_all([chat_job], {"chat": replace(chat_result, figures=figures)})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("host_tokens", -5, "by tier"),
        ("prefill_gpu_s", 0.0, "prefill seconds"),
        ("ttft_p50_s", 1e9, "TTFT"),
    ],
)
def test_wrong_outcomes_of_a_server_are_not_reported(
    chat_job: Job, chat_result: Result, key: str, value: float, said: str
) -> None:
    figures = {name: dict(each) for name, each in chat_result.figures.items()}
    figures["off"][key] = value
    with pytest.raises(CaseFailedError, match=said):
        check_all([chat_job], {"chat": replace(chat_result, figures=figures)})


def test_a_disk_that_is_written_too_often_is_not_reported(
    chat_job: Job, chat_result: Result
) -> None:
    host_pages = chat_job.system.host_pages
    assert host_pages > 0

    def check(again: int, moved: int) -> None:
        figures = {name: dict(each) for name, each in chat_result.figures.items()}
        figures["off"]["counters"] = {
            "written_pages": 1000 + again, "written_again_pages": again,
            "disk_records_moved": moved,
        }  # fmt: skip
        check_all([chat_job], {"chat": replace(chat_result, figures=figures)})

    check(host_pages, 0)  # those that may be before any is written
    check(host_pages + 300, 0)
    check(0, 300)
    for again, moved in ((host_pages + 301, 0), (0, 301), (host_pages + 200, 101)):
        with pytest.raises(CaseFailedError, match="for each new one, at steady state"):
            check(again, moved)


def test_jobs_give_the_same_in_other_processes() -> None:
    jobs = [
        Job(str(seed), partial(agent_tasks, seed, 6, 0.5), chat_system(LLAMA_13B, 5, 60), policies)
        for seed, policies in ((1, ("off",)), (2, ("off", "belady", "lookahead", "recompute")))
    ]
    here = simulate_all(jobs, QUIET, processes=0)
    there = simulate_all(jobs, QUIET, processes=2)
    assert list(there) == ["1", "2"]
    for name in there:
        assert there[name] == here[name]
        assert list(there[name].figures) == list(here[name].figures)


def test_simulations_are_apart_and_the_longest_come_first() -> None:
    chats, disk = partial(chat, LLAMA_13B, 4, 20.0), chat_system(LLAMA_13B, 5, 60)
    jobs = [
        Job("dram", chats, chat_system(LLAMA_13B, 5, 0), ("lookahead",)),
        Job("few", chats, disk, ("recompute", "lru", "lookahead", "belady", "off")),
        Job("many", partial(chat, LLAMA_13B, 40, 20.0), disk, ("off",)),
    ]
    assert [(part.name, part.policies) for part in parts_of(jobs)] == [
        ("many", ("off",)),
        ("few", ("lookahead", "lru", "belady")),  # a replay needs the order
        ("few", ("off",)),
        ("dram", ("lookahead",)),
        ("few", ("recompute",)),
    ]


def test_gap_closed() -> None:
    figures = {name: {"hit_rate": rate} for name, rate in
               (("lru", 0.2), ("belady", 0.6), ("lookahead", 0.5))}  # fmt: skip
    assert gap_closed(figures) == pytest.approx(0.75)
    assert gap_closed({**figures, "belady": {"hit_rate": 0.203}}) is None


def test_agents_and_documents_are_what_their_module_says() -> None:
    tasks = agent_tasks(1, 800, 2.0)
    steps = [len(each.turns) for each in tasks]
    assert sum(steps) / len(steps) == pytest.approx(20, rel=0.1)
    assert max(steps) <= 60
    assert {each.prefix_id for each in tasks} == {0, 1, 2, 3}
    assert {each.prefix_tokens for each in tasks} == {SYSTEM_TOKENS}
    assert tasks[-1].start_s == pytest.approx(400, rel=0.15)
    waits = sorted(turn.think_s for each in tasks for turn in each.turns)
    assert sum(waits) / len(waits) == pytest.approx(0.85 * 2 + 0.1 * 30 + 0.05 * 120, rel=0.1)

    sessions = document_questions(1, 2000, 1.0)
    counts = sorted(
        (sum(each.prefix_id == number for each in sessions) for number in range(20)), reverse=True
    )
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.6)
    assert all(4096 <= each.prefix_tokens <= 28 * 1024 for each in sessions)
    shapes = {(turn.new_tokens, turn.output_tokens) for each in sessions for turn in each.turns}
    assert shapes == {(256, 64)}
    assert {len(each.turns) for each in sessions} == {6}

    one = long_document(5000)
    assert footprint_tokens(one * 3) == 5000 + 3 * 6 * 320


def test_sessions_are_spread_to_a_load() -> None:
    spans = [sessions_at_load(document_questions, 60, load)[-1].start_s for load in (0.5, 1.0, 2.0)]
    assert spans[0] == pytest.approx(2 * spans[1])
    assert spans[1] == pytest.approx(2 * spans[2])


def test_turns_fit_the_window_and_think_after_their_answer() -> None:
    source = sharegpt_like(4, count=200)
    sessions = as_turns(source, LLAMA_65B.context_tokens)
    assert [len(each.turns) for each in sessions] == source.num_turns.tolist()
    turns = [turn for each in sessions for turn in each.turns]
    assert max(max(turn.new_tokens, turn.output_tokens) for turn in turns) == 1024
    assert [turn.think_s for turn in turns[:-1]] == source.think_s[1:].tolist()


def test_loads_are_hidden_by_a_buffer_of_the_formulas_size() -> None:
    one = Prefill(load_s=2.0, compute_s=1.0, layers=40)
    assert one.in_sequence_s() == 3.0
    assert one.overlapped_s(0) == pytest.approx(2.0 + 1.0 / 40)
    assert one.buffer_layers() == 21
    assert one.overlapped_s(21) == pytest.approx(1.0)
    assert one.overlapped_s(19) > 1.0
    assert Prefill(0.5, 1.0, 40).overlapped_s(1) == pytest.approx(1.0)


def test_the_papers_read_buffer_is_met() -> None:
    values, _ = measure_read_buffer()
    for each in values["points"]:
        if each["paper_saved"] is not None:
            assert each["saved"] == pytest.approx(each["paper_saved"], abs=0.05)
    ratios, _ = measure_ratios()
    assert ratios[-1]["recompute_ms"] / ratios[-1]["buffered_ms"] == pytest.approx(10)


@pytest.fixture(scope="module")
def trace_slice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    with lzma.open(BUNDLED, "rt") as file:
        path.write_text("".join(next(file) for _ in range(NUM_OWN)))
    return path


def test_a_trace_of_ones_own_reports_the_same_keys(
    trace_slice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real one over little: a million pages would take as long as all the rest.
    quick = partial(decisions_per_s, num_waiting=10, num_pages=64 * 20, steps=3)
    monkeypatch.setattr(policies, "decisions_per_s", quick)
    # In this process, which has imported it all; another test has other processes simulate.
    monkeypatch.setattr(policies, "simulate_all", partial(simulate_all, processes=0))
    flags = TraceFlags(trace_slice, host_gb=40, disk_gb=100, prefill_tokens_per_s=20_000)
    report = policies.run(Options(quick=True, progress=QUIET, out_dir=tmp_path, trace=flags))
    for policy in POLICIES:
        keys = {"hit_rate", "turn_hit_rate", "turn_hit_cap"}
        assert keys == set(report.results[policy]) - {"host_share"}
        assert 0 <= report.results[policy]["hit_rate"] <= 1
    speed = report.samples["decision_speed"]
    assert (speed["n"], speed["num_waiting"], speed["num_pages"]) == (3, 10, 64 * 20)
    assert report.results["decisions_per_s"] == speed["decisions_per_s"]
    assert set(report.results["by_load"]) == {"own times", "load 0.7", "load 3"}
    assert report.n["own times"] == NUM_OWN
    loads = report.results["by_load"]
    assert loads["load 3"]["offered_load"] == pytest.approx(3.0)
    assert loads["load 0.7"]["offered_load"] == pytest.approx(0.7)
    json.dumps(report.results)
    json.dumps(report.samples)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["policies", "--host-gb", "4"], "--host-gb describes the machine of a trace"),
        (["tiers", "--trace", "x"], "--trace is for the case policies, came tiers"),
        (["policies", "--trace", "x", "--disk-gb", "-1"], "--disk-gb must be >= 0, came -1"),
        (["policies", "--trace", "x", "--kv-bytes-per-token", "0"], "must be > 0, came 0"),
        (["policies", "--trace", "x", "--prefill-tokens-per-s", "nan"], "must be > 0, came nan"),
    ],
)
def test_bad_flags_end_in_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_bad_trace_ends_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_ALLOW_DIRTY", "1")
    monkeypatch.setattr("bench.core.case.OUT_DIR", tmp_path)
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    assert command.main(["policies", "--trace", str(path)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("bench: ")
    assert "line 1: expected a JSON object with timestamp" in last
