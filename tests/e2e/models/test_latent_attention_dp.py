"""Models with rows of an index, and with a draft layer, under data parallel attention.

Groups of ranks serve requests of their own, each with a store of its own; experts and MLPs lie in
shares on all ranks. DeepSeek V3.2 and GLM-5 are served so. `test_attention_dp.py` has what does not
depend on what a page holds.

By default a model with an index has groups of one rank, each on a node of its own; the long form
has one node, a draft layer, and groups of two ranks, on one node or on two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.drafts.nextn import NEXTN, PLAIN, rows_of, write_nextn_model
from testkit.hybrids.index_model import TOP_K
from testkit.requests import flush_device
from tests.e2e.drafts.test_latent_drafts import layout_of
from tests.e2e.drafts.test_speculation import guesses
from tests.e2e.hier_server import (
    GIB,
    by_tier,
    check_agreed,
    connected,
    real_prompts,
    settled,
    tokens_and_logprobs,
)
from tests.e2e.reuse.test_attention_dp import (
    ENVIRONMENT,
    NUM_NODES,
    Rig,
    ask,
    busy,
    hit_on,
    nodes_of,
    num_ranks,
    polls,
)
from tests.e2e.updates.weight_answers import ROUNDING, distance, request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
GROUPS = (0, 1)
PROMPTS = list(real_prompts([150, 330], seed=3))
PAGES = sum(len(prompt) // PAGE for prompt in PROMPTS)
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--max-running-requests", "8", "--max-total-tokens", "4096", "--enable-hier-kv"]
BASE += ["--hier-kv-prefetch-policy", "wait_complete", "--hier-kv-write-policy", "write_through"]
BASE += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]
# How ranks are arranged, the model, and whether its draft layer guesses.
CASES = {
    "index-a-rank-a-node": ("a-rank-a-node", "deepseek", False),
    "index-two-ranks": ("two-ranks", "deepseek", False),
    "draft-two-ranks": ("two-ranks", PLAIN, True),
    "index-and-draft-two-by-two": ("two-by-two", "glm", True),
    "draft-a-group-a-node": ("a-group-a-node", PLAIN, True),
    "index-and-draft-a-group-on-two-nodes": ("a-group-on-two-nodes", "glm", True),
}


def server_of(case: str, folder: Path, *args: str) -> Rig:
    """A server that is not started yet, with DRAM for 100 pages a rank."""
    way, kind, has_draft = CASES[case]
    ranks_of_node = num_ranks(way) // NUM_NODES.get(way, 1)
    host_gib = 100.5 * ranks_of_node * layout_of(kind).slot_bytes / GIB
    every = [*BASE, "--hier-kv-host-size", f"{host_gib:.9f}", *(NEXTN if has_draft else ()), *args]
    nodes = nodes_of(way, every, folder, env=ENVIRONMENT, model=folder / "model")
    return Rig(way, nodes, folder, folder / "none")


def write_model(case: str, folder: Path) -> None:
    write_nextn_model(folder / "model", CASES[case][1])


def device_hits(rig: Rig, group: int) -> list[dict[str, Any]]:
    """Answers of a group behind its device's pages, which come from DRAM.

    Behind a restored prefix other tokens may be verified together than behind a computed one, which
    rounds differently.
    """
    for prompt in PROMPTS:
        ask(rig.server, prompt, routed_dp_rank=group)
    settled(rig.server)
    flush_device(rig.server)
    for prompt in PROMPTS:
        ask(rig.server, prompt, routed_dp_rank=group)
    hits = [ask(rig.server, prompt, routed_dp_rank=group) for prompt in PROMPTS]
    settled(rig.server)
    assert sum(by_tier(hit)["device"] for hit in hits) >= (PAGES - len(PROMPTS)) * PAGE
    flush_device(rig.server)
    return hits


def check_restored(
    rig: Rig, group: int, hits: list[dict[str, Any]], tier: str
) -> list[dict[str, Any]]:
    """All that a device hit reuses comes from a tier, and answers are the same to the bit."""
    found = [ask(rig.server, prompt, routed_dp_rank=group) for prompt in PROMPTS]
    for answer, hit in zip(found, hits, strict=True):
        assert answer["meta_info"]["dp_rank"] == group
        assert by_tier(answer)[tier] == by_tier(hit)["device"], tier
        assert tokens_and_logprobs(answer) == tokens_and_logprobs(hit)
        if "spec_num_proposed_drafts" in hit["meta_info"]:
            assert guesses(answer) == guesses(hit)
    return found


@pytest.mark.sampled("index-a-rank-a-node")
@pytest.mark.parametrize("case", CASES)
def test_what_a_group_restores_answers_as_a_device_hit(case: str, tmp_path: Path) -> None:
    """Of the same group: where its rows lie in a product may round otherwise."""
    write_model(case, tmp_path)
    assert min(map(len, PROMPTS)) > TOP_K
    rig = server_of(case, tmp_path)
    group, other = rig.looked_at, 1 - rig.looked_at
    with rig.nodes:
        hits = {each: device_hits(rig, each) for each in GROUPS}
        for each in GROUPS:
            check_restored(rig, each, hits[each], "host")
        settled(rig.server)
        check_sizes(rig, *CASES[case][1:])
        check_beside_others(rig, group)
        check_agreed(rig.nodes.log(), num_ranks(rig.way))
    (tmp_path / "store").mkdir()
    remote = ["--hier-kv-remote-url", f"file://{tmp_path / 'store'}?size=1GB"]
    rig = server_of(case, tmp_path, *remote)  # after a kill -9
    with rig.nodes:
        connected(rig.server)
        for each in GROUPS:
            check_restored(rig, each, hits[each], "disk")
        settled(rig.server)
        flush_device(rig.server)
        rig.server.post("/hicache/storage-backend/clear")
        for prompt in PROMPTS:  # computed and put by one group, and fetched by the other one
            ask(rig.server, prompt, routed_dp_rank=group)
        await_sent(rig, group)
        flush_device(rig.server)
        check_restored(rig, other, hits[other], "remote")
        check_agreed(rig.nodes.log(), num_ranks(rig.way))


def check_beside_others(rig: Rig, group: int) -> None:
    """Beside a group that runs, rows of both are in the same products: equal up to rounding."""
    wanted = [hit_on(rig, group, prompt) for prompt in PROMPTS]
    settled(rig.server)
    flush_device(rig.server)
    with busy(rig, 1 - group):
        for prompt, one in zip(PROMPTS, wanted, strict=True):
            found, reply = request(rig.server, prompt, routed_dp_rank=group)
            assert by_tier(reply)["host"] > 0
            assert distance(found, one) < ROUNDING


def await_sent(rig: Rig, group: int) -> None:
    """Waits until all pages of a group, of which each rank puts its share, are in the store."""
    for _ in polls("the pages did not reach the store"):
        ranks = rig.states()[group]
        if sum(rank["host"].get("remote_written_pages", 0) for rank in ranks) >= PAGES:
            return


def check_sizes(rig: Rig, kind: str, has_draft: bool) -> None:
    """A page takes a twentieth more than its rows at most, on each rank."""
    rows = [layer[: None if has_draft else -1] for layer in rows_of(kind)]
    needed = PAGE * sum(map(sum, rows))
    for rank in (rank for group in rig.states() for rank in group):
        assert rank["kv_bytes_per_page"] == needed
        assert needed <= rank["slot_bytes"] <= 1.05 * needed
