"""The policy bench's workloads: their statistics, the published trace, refusals of bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.policies.order import ORDERS, RequestOrder, known_ahead, replay_order
from bench.policies.workloads.bundled import BUNDLED
from bench.policies.workloads.loads import num_blocks, reusable_tokens, stretched
from bench.policies.workloads.models import CHAT_MODELS, LLAMA_13B, LLAMA_65B
from bench.policies.workloads.session_lines import session_lines
from bench.policies.workloads.sharegpt import MAX_TOKENS, MAX_TURNS, sharegpt_like
from sglang_ext.simulator.trace import Line, TraceError, read_trace
from sglang_ext.simulator.types import Conversation, Turn


@pytest.mark.parametrize("seed", [0, 4])
def test_conversations_have_the_stated_statistics(seed: int) -> None:
    source = sharegpt_like(seed)
    turns, tokens = source.num_turns, source.num_tokens
    assert len(turns) == 9_000
    assert np.isclose(turns.mean(), 5.75, atol=0.01)
    assert np.isclose((turns > 1).mean(), 0.73, atol=0.001)
    assert np.isclose((tokens > 2048).mean(), 0.47, atol=0.005)
    assert np.isclose((tokens > 4096).mean(), 0.30, atol=0.005)
    assert turns.max() <= MAX_TURNS
    assert tokens.max() <= MAX_TOKENS
    assert np.isclose(np.diff(source.start_s).mean(), 1.0, atol=0.04)
    later = np.ones(len(source.think_s), bool)
    later[source.first[:-1]] = False
    assert np.isclose(source.think_s[later].mean(), 60, rtol=0.03)
    assert not source.think_s[~later].any()
    assert min(source.question_tokens.min(), source.answer_tokens.min()) >= 8
    assert np.corrcoef(turns, np.log(tokens))[0, 1] > 0.4


def test_conversations_follow_their_seed() -> None:
    first, again, other = (sharegpt_like(seed, count=50) for seed in (1, 1, 2))
    assert np.array_equal(first.answer_tokens, again.answer_tokens)
    assert not np.array_equal(first.num_tokens, other.num_tokens)
    assert len(sharegpt_like(1, count=7).num_turns) == 7


def test_arrivals_and_returns_are_memoryless() -> None:
    source = sharegpt_like(3, per_s=4.0, think_s=10.0)
    gaps = np.diff(source.start_s)
    thinks = source.think_s[source.think_s > 0]
    for values, mean in ((gaps, 0.25), (thinks, 10.0)):
        assert np.isclose(values.mean(), mean, rtol=0.05)
        assert np.isclose(values.std() / values.mean(), 1.0, atol=0.05)


def test_models_have_the_papers_sizes() -> None:
    megabytes = [round(model.kv_bytes_per_token / 2**20, 2) for model in CHAT_MODELS]
    assert megabytes == [0.78, 2.5, 0.31, 0.12]
    assert np.isclose(2048 / LLAMA_65B.prefill_tokens_per_s, 0.360)
    assert LLAMA_65B.hbm_kv_bytes == 190e9
    # 4.2: storage is 16.4 % and 9.0 % of the cost.
    for model in CHAT_MODELS:
        assert model.paper is not None
        share = 1 - model.cost_dollars(3600, 0, 0) / model.cost_dollars(3600, 128, 10_000)
        assert np.isclose(share, model.paper.storage_share_of_cost, atol=0.002)
    # 4.2: the cost saved is what the GPU time saved and that storage give, to rounding.
    paper = LLAMA_13B.paper
    assert paper is not None
    saved = 1 - 1 / paper.gpu_time_speedup / (1 - paper.storage_share_of_cost)
    assert np.isclose(saved, paper.cost_saved, atol=0.01)


@pytest.fixture(scope="module")
def trace() -> list[Line]:
    return read_trace(BUNDLED)


def test_the_bundled_trace_is_the_published_one(trace: list[Line]) -> None:
    inputs = np.array([line.input_tokens for line in trace])
    assert len(trace) == 12_031
    assert np.isclose(inputs.mean(), 12_035, atol=1)
    assert np.isclose(trace[-1].arrival_s / 60, 59, atol=0.1)
    blocks = sum(len(line.hash_ids) for line in trace)
    assert np.isclose(1 - num_blocks(trace) / blocks, 0.366, atol=0.001)


def _hit_tokens(lines: list[Line], capacity: int, order: str) -> int:
    paths = [line.hash_ids for line in lines]
    hits = replay_order(RequestOrder(paths, paths, known_ahead(len(paths), 1)), capacity, order)
    return sum(min(num * 512, line.input_tokens) for num, line in zip(hits, lines, strict=True))


@pytest.mark.long
def test_replays_by_order_agree_with_a_run_by_others(trace: list[Line]) -> None:
    """5 % of the footprint: LRU 20.0 and Belady 37.4 % of all prompt tokens."""
    prompt = sum(line.input_tokens for line in trace)
    capacity = round(0.05 * num_blocks(trace))
    assert round(100 * _hit_tokens(trace, capacity, "lru") / prompt, 1) == 20.0
    assert round(100 * _hit_tokens(trace, capacity, "belady") / prompt, 1) == 37.4


@pytest.mark.parametrize("order", ORDERS)
def test_replays_with_room_for_all_reuse_all(trace: list[Line], order: str) -> None:
    some = trace[:300]
    assert reusable_tokens(some) == _hit_tokens(some, 10**9, order) > 0
    assert _hit_tokens(some, 0, order) == 0


def test_belady_is_what_trying_all_choices_finds() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        ids = random.integers(0, 5, 9).tolist()
        lines = [Line(float(at), 512, 1, np.array([each])) for at, each in enumerate(ids)]
        assert _hit_tokens(lines, 2, "belady") == 512 * _best_hits(ids, frozenset(), 2)


def _best_hits(ids: list[int], kept: frozenset[int], room: int) -> int:
    if not ids:
        return 0
    hit = ids[0] in kept
    pool = kept | {ids[0]}
    drops = [pool] if len(pool) <= room else [pool - {each} for each in pool]
    return hit + max(_best_hits(ids[1:], rest, room) for rest in drops)


def test_a_stretched_trace_keeps_its_requests(trace: list[Line]) -> None:
    slower = stretched(trace[:50], 2.0)
    assert [line.arrival_s for line in slower] == [2 * line.arrival_s for line in trace[:50]]
    assert [line.input_tokens for line in slower] == [line.input_tokens for line in trace[:50]]


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("not json\n", "line 1: expected a JSON object"),
        ("[1, 2]\n", "line 1: expected a JSON object with timestamp"),
        (json.dumps({"timestamp": 0}) + "\n", "came no input_length, output_length, hash_ids"),
        (json.dumps({**GOOD, "timestamp": "x"}) + "\n", "must be numbers from 0 to"),
        (json.dumps({**GOOD, "output_length": -1}) + "\n", "must be numbers from 0 to"),
        (json.dumps({**GOOD, "hash_ids": [0, "a"]}) + "\n", "a list of integers"),
        (json.dumps({**GOOD, "hash_ids": [0]}) + "\n", "that is 2 and at least one; came 1"),
        (json.dumps({**GOOD, "input_length": 0, "hash_ids": []}) + "\n", "at least one; came 0"),
        (json.dumps({**GOOD, "hash_ids": [1, 1]}) + "\n", "two different prefixes"),
        (
            f"{json.dumps({**GOOD, 'timestamp': 5})}\n{json.dumps(GOOD)}\n",
            "line 2: timestamps must not decrease",
        ),
    ],
)
def test_bad_traces_are_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=said) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "bad.jsonl.xz", "bad.jsonl"])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str) -> None:
    if name != "missing.jsonl":
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / name)


def test_blank_lines_and_slices(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows: list[dict[str, Any]] = [{**GOOD, "timestamp": 1000 * at} for at in range(4)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert [line.arrival_s for line in read_trace(path)] == [0.0, 1.0, 2.0, 3.0]
    assert len(read_trace(path, limit=2)) == 2


def test_sessions_are_lines_of_which_equal_numbers_mean_equal_prefixes() -> None:
    turns = (Turn(600, 100, 1.0), Turn(100, 100, 1.0))
    sessions = [Conversation(start, turns, prefix, 1024) for start, prefix in ((0.0, 3), (1.0, 3))]
    first, other, again, _ = session_lines(sessions)
    assert [line.input_tokens for line in (first, other, again)] == [1624, 1624, 1824]
    assert [len(line.hash_ids) for line in (first, other, again)] == [4, 4, 4]
    shared = [np.intersect1d(first.hash_ids, line.hash_ids) for line in (other, again)]
    assert shared[0].tolist() == first.hash_ids[:2].tolist()  # the prefix
    assert shared[1].tolist() == first.hash_ids[:3].tolist()  # all but the last, partial block
    assert len(session_lines(sessions, limit=3)) == 3
