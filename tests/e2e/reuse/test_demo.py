"""The demo in small: chats and documents from SGLang's frontend, on a server with its defaults.

By these a server computes what it would read later than that, and how much that is, is a question
of the machine: of what is not reused, each answer says whether that was why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.demo.chats import Served, drive, make_material
from bench.demo.trace import write_trace
from sglang_ext.simulator.sizing import Size, predict
from sglang_ext.simulator.trace import read_trace
from sglang_ext.simulator.traffic import of_trace
from testkit.server import Server
from testkit.workload import load_tokenizer
from tests.e2e.hier_server import PAGE, hier_args, host_gb

pytestmark = pytest.mark.e2e

POOL_TOKENS = 4096


def test_what_comes_back_is_computed_again_only_where_that_is_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    material = make_material(num_chats=8, num_turns=3, num_documents=3, num_questions=3)
    tokens = material.distinct_tokens(load_tokenizer())
    args = [*hier_args(tmp_path, host_pages=tokens // PAGE // 2, policy="cost")]
    args += ["--page-size", str(PAGE), "--max-total-tokens", str(POOL_TOKENS)]
    args += ["--attention-backend", "cpu_extend"]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")  # the frontend would ask a proxy
        served = drive(server.url, material, lambda done: None)
    assert len(served) == material.num_requests
    reusable = sum(one.reusable for one in served)
    assert reusable > 4 * POOL_TOKENS
    reused = sum(one.reused for one in served)
    chosen = sum(map(computed_by_choice, served))
    print(f"reused {reused} of {reusable} tokens, computed {chosen} by choice")
    assert reused + chosen >= 0.9 * reusable, [(one.reusable, one.by_tier) for one in served]
    # DRAM has half of what comes round: whether anything comes before it has left it is chance.
    assert chosen + sum(one.by_tier.get("disk", 0) for one in served) > 0
    size_foretells(served, tmp_path, tokens // PAGE // 2)


def computed_by_choice(one: Served) -> int:
    """Tokens that were stored, and computed as that was expected to be done sooner."""
    return min(one.missed.get("too_slow", 0), one.reusable - one.reused)


def size_foretells(served: Sequence[Served], folder: Path, host_pages: int) -> None:
    """`hier-kv size` says of the same chats how much would hit, within 5 points.

    Its disk is fast enough here for nothing to be computed by choice.
    """
    write_trace(served, folder / "trace.jsonl")
    traffic = of_trace(read_trace(folder / "trace.jsonl", block_tokens=PAGE), PAGE, 4096, 50.0)
    [found] = predict(traffic, 4096, [Size(float(host_gb(host_pages)), 2.0)], disk_gb_s=3.0)
    prompt = sum(one.prompt_tokens for one in served)
    stored = sum(one.cached + computed_by_choice(one) for one in served) / prompt
    # The server also reuses pages that are partly answers.
    assert abs(found.hit_rate - stored) < 0.05, (found.hit_rate, stored)
