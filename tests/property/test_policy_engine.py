"""The simulator over random workloads and machines: nothing is stuck, nothing is counted twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies.jobs import POLICIES as ALL
from bench.policies.jobs import Job, simulate
from sglang_ext.simulator.engine import POLICIES, Conversation, System, TraceRequest, Turn, run
from sglang_ext.simulator.requests import Store
from tests.long_form import count

_turns = st.tuples(
    st.builds(Turn, st.integers(1, 40), st.integers(1, 30), st.floats(0.0, 20.0)),
).map(lambda each: each[0])
_conversations = st.lists(
    st.builds(
        Conversation,
        st.floats(0.0, 20.0),
        st.lists(_turns, min_size=1, max_size=6).map(tuple),
        st.integers(-1, 1),
        st.just(24),
    ),
    min_size=1,
    max_size=8,
)
_systems = st.builds(
    System,
    page_tokens=st.just(8),
    kv_bytes_per_token=st.just(1e6),
    dram_bytes=st.sampled_from([5e7, 3e8]),
    disk_bytes=st.sampled_from([0.0, 3e8, 1e10]),
    prefill_tokens_per_s=st.sampled_from([20.0, 500.0]),
    decode_tokens_per_s=st.just(30.0),
    disk_gb_s=st.sampled_from([0.01, 5.0]),
    disk_write_gb_s=st.sampled_from([0.02, 5.0]),
    batch=st.integers(1, 4),
    context_window=st.sampled_from([96, 160, 400]),
    truncation=st.booleans(),
)


@settings(max_examples=count(10, 600), deadline=None)
@given(_conversations, _systems, st.sampled_from(sorted(POLICIES)))
def test_every_turn_is_answered_and_accounted(
    conversations: list[Conversation], system: System, policy: str
) -> None:
    num = sum(len(each.turns) for each in conversations)
    outcome = run(conversations, system, policy)
    assert outcome.num_turns == num
    assert outcome.reused_tokens <= outcome.reusable_tokens <= outcome.prompt_tokens
    assert outcome.host_tokens + outcome.disk_tokens == outcome.reused_tokens
    assert outcome.reused_tokens + outcome.computed_tokens == outcome.prompt_tokens
    assert outcome.gpu_s <= outcome.makespan_s * (1 + 1e-9)
    assert (outcome.ttft_s > 0).all()
    if policy == "recompute":
        assert outcome.reused_tokens == 0


@settings(max_examples=count(4, 200), deadline=None)
@given(_conversations, _systems, st.sampled_from(["lookahead", "off"]))
def test_the_stores_books_balance_whenever_pages_came(
    conversations: list[Conversation], system: System, policy: str
) -> None:
    save = Store.save_answer

    def save_and_check(self: Store, request: Any) -> None:
        save(self, request)
        assert self.server is not None
        self.server.store.check()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "save_answer", save_and_check)
        outcome = run(conversations, system, policy)
    assert outcome.counters["waiting_requests"] == 0 if policy == "lookahead" else True
    assert outcome.counters["planned_pages"] == 0


def test_an_unbounded_store_gives_everything_and_belady_is_no_worse_than_lru() -> None:
    rng = np.random.default_rng(1)
    documents = rng.zipf(1.3, 400) % 60
    trace = [
        TraceRequest(i * 0.5, np.arange(d * 10, d * 10 + 8), 8 * 16, 8)
        for i, d in enumerate(documents.tolist())
    ]
    small = System(16, 1e6, 100 * 16e6, 60 * 16e6, 1000.0, 50.0)
    large = System(16, 1e6, 1e11, 1e11, 1000.0, 50.0)
    for policy in ("lookahead", "off"):
        assert run(trace, large, policy).hit_rate == pytest.approx(1.0)
    done = simulate(Job("zipf", lambda: trace, small, (*ALL, "recompute")))
    rates = {policy: each["hit_rate"] for policy, each in done.figures.items()}
    assert rates["recompute"] == 0.0
    assert max(rates["lru"], rates["fifo"]) < rates["belady"]
    assert rates["lookahead"] <= rates["belady"] + 1e-9


def test_a_kept_tail_is_reused_only_with_position_free_kv() -> None:
    turns = tuple(Turn(40, 30, 1.0) for _ in range(8))
    base: dict[str, Any] = {
        "page_tokens": 10, "kv_bytes_per_token": 1e6, "dram_bytes": 1e11,
        "disk_bytes": 0, "prefill_tokens_per_s": 1e3, "decode_tokens_per_s": 1e2,
        "context_window": 250,
    }  # fmt: skip
    chats = [Conversation(0.0, turns)]
    kept = run(chats, System(**base, truncation=True), "lookahead")
    cut = run(chats, System(**base, truncation=False), "lookahead")
    assert kept.hit_rate == 1.0
    assert cut.reusable_tokens == kept.reusable_tokens
    assert cut.hit_rate < 0.9
