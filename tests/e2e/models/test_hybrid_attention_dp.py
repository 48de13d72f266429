"""Hybrids in groups of ranks with trees, pools and stores of their own.

With data parallel attention, and, which is the same to each of them, as whole schedulers.

A group's answers behind what it restored are compared with those behind SGLang's own device hits
bit for bit, beside a group that runs idle batches: from DRAM, and, with groups of one rank, from
the disk that a server left when it was killed. What another group has stored is a hit where both
have one remote store, and else none. Window layers have K and V of another shape than full ones
(MiMo V2) or of the same (Mellum, by groups of two ranks), or layers have a state.

Of the long form, with groups on nodes of their own and on two nodes, too: by default
`tests/e2e/drafts/test_draft_attention_dp.py` has states come back to a group, with a draft layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.hybrids.oss_model import HEAD_DIM, KV_HEADS, NUM_FULL_LAYERS, write_oss_model
from testkit.hybrids.shaped_models import SHAPED_MODELS, write_shaped_model
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.hybrids.window_model import PATTERN, write_window_model
from testkit.rank_requests import JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    GIB,
    ask,
    check_agreed,
    connected,
    every_rank,
    ranks_of,
    real_prompts,
    settled,
    states,
)
from tests.e2e.models.hybrid_answers import cached, check_hits, values
from tests.e2e.nodes import Nodes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE, HEADER_BYTES = 64, 4096
LENGTHS = [130, 333, 700]
HOST_PAGES = 250  # of each rank
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "512", "--max-running-requests", "8"]
BASE += ["--max-total-tokens", "4096"]
ENVIRONMENT = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}
TWO_RANKS = ["--tp-size", "2", "--attn-dp-size", "2"]
WHOLE = ["--dp-size", "2"]
TWO_BY_TWO = ["--tp-size", "4", "--attn-dp-size", "2"]


@dataclass(frozen=True)
class Kind:
    """A model and how its ranks are arranged.

    Attributes:
        write: writes it into a new folder.
        page_bytes: K and V of a page, on each rank.
        num_ranks: of both groups.
        tolerance: how far rounding takes a log-probability.
        args: of its servers.
        env: of its servers.
        restarts: another server is started on the disk that the first left.
        codec: of disk or store; empty: none.
        num_nodes: that the ranks are spread over; of several the last one's stores are late.
    """

    write: Callable[[Path], Path]
    page_bytes: int
    num_ranks: int
    tolerance: float
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    restarts: bool = True
    codec: str = ""
    num_nodes: int = 1


_STATES = STATE_MODELS["qwen3_next"]
_KDA = STATE_MODELS["kimi_k3"]
_SHAPES = SHAPED_MODELS["mimo"]
KINDS = {
    "two shapes": Kind(
        partial(write_shaped_model, name="mimo"), _SHAPES.full_values * PAGE * 4, 2, 5e-4,
        [*TWO_RANKS, "--dtype", "float32", "--trust-remote-code"],
    ),
    "groups of two ranks": Kind(
        # On a CPU SGLang makes its two heads of K and V four, one for each of all ranks.
        write_window_model, PATTERN.count(0) * 2 * PAGE * 2 * 32 * 2, 4, 0.2, TWO_BY_TWO,
        restarts=False,
    ),
    "states beside latent rows": Kind(
        partial(write_state_model, name="kimi_k3"), _KDA.page_bytes, 2, 5e-4,
        [*TWO_RANKS, "--dtype", _KDA.dtype_name, "--max-mamba-cache-size", "60", *_KDA.server_args],
        {"SGLANG_MAMBA_CONV_DTYPE": _KDA.dtype_name},
    ),
    "windows of whole schedulers": Kind(
        write_oss_model, NUM_FULL_LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 2, 2, 0.2, WHOLE,
    ),
    "states of whole schedulers": Kind(
        partial(write_state_model, name="qwen3_next"), _STATES.page_bytes, 2, 5e-4,
        [*WHOLE, "--dtype", _STATES.dtype_name, "--max-mamba-cache-size", "60"],
        {"SGLANG_MAMBA_CONV_DTYPE": _STATES.dtype_name},
    ),
    "coded states": Kind(
        partial(write_state_model, name="qwen3_next"), _STATES.page_bytes, 2, 5e-4,
        [*TWO_RANKS, "--dtype", _STATES.dtype_name, "--max-mamba-cache-size", "60"],
        {"SGLANG_MAMBA_CONV_DTYPE": _STATES.dtype_name}, codec="lossless",
    ),
    "states": Kind(
        partial(write_state_model, name="qwen3_next"), _STATES.page_bytes, 2, 5e-4,
        [*TWO_RANKS, "--dtype", _STATES.dtype_name, "--max-mamba-cache-size", "60"],
        {"SGLANG_MAMBA_CONV_DTYPE": _STATES.dtype_name},
    ),
}  # fmt: skip
KINDS |= {
    "states on two nodes": replace(KINDS["states"], num_nodes=2),
    "groups on two nodes each": replace(KINDS["groups of two ranks"], num_nodes=4, restarts=True),
}


def server_of(kind: Kind, model: Path, folder: Path, *below: str) -> Nodes:
    """A server of two groups, with DRAM and what is below it: a disk, unless that is named."""
    slot_bytes = kind.page_bytes + HEADER_BYTES
    ranks_of_node = kind.num_ranks // kind.num_nodes
    host_gib = ranks_of_node * (HOST_PAGES + 0.5) * slot_bytes / GIB
    args = [*BASE, *kind.args, "--enable-hier-kv", "--hier-kv-prefetch-timeout-ms", "60000"]
    args += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-host-size", f"{host_gib:.9f}"]
    args += below or ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]
    if kind.codec:
        args += ["--hier-kv-codec", f"{'remote' if below else 'disk'}={kind.codec}"]
    return Nodes(
        args,
        folder,
        env={**ENVIRONMENT, **kind.env},
        late={ENV_JITTER: str(JITTER_MS)} if kind.num_nodes > 1 else {},
        model=model,
        ranks=(),
        num=kind.num_nodes,
        has_disk=not below,
    )


def answers(server: Server, prompts: list[list[int]], group: int) -> list[Any]:
    return [ask(server, prompt, 3, routed_dp_rank=group) for prompt in prompts]


def check_close(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    """Answers differ by rounding alone; by another KV they would differ by 1 and more."""
    for (tokens, ours), (expected, theirs) in zip(values(found), values(wanted), strict=True):
        pairs = zip(tokens, expected, strict=True)
        num_same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(tokens))
        distances = [abs(a - b) for a, b in zip(ours[:num_same], theirs[:num_same], strict=True)]
        assert max(distances) < tolerance, distances


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_what_a_group_restores_answers_as_its_device_hit(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = kind.write(tmp_path / "model")
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(kind, model, tmp_path) as nodes:
        server = nodes.head
        first, repeat = answers(server, prompts, 1), answers(server, prompts, 1)
        assert cached(first) == [0] * len(prompts)
        settled(server)
        flush_device(server)
        check_hits(answers(server, prompts, 1), repeat, "host", above=10 * PAGE)
        # The other group stores what it computes itself. Its rows lie elsewhere in the products.
        computed, on_other = answers(server, prompts, 0), answers(server, prompts, 0)
        assert cached(computed) == [0] * len(prompts)
        check_close(computed, first, kind.tolerance)
        settled(server)
        saved = [
            [rank["host"]["saved_pages"] for rank in group]
            for group in map(ranks_of, states(server))
        ]
        assert all(len(set(group)) == 1 for group in saved), saved
        check_agreed(nodes.log(), kind.num_ranks)
    if not kind.restarts:
        return
    with server_of(kind, model, tmp_path) as nodes:  # after a kill -9
        for group, wanted in enumerate((on_other, repeat)):
            check_hits(answers(nodes.head, prompts, group), wanted, "disk", above=10 * PAGE)
        check_agreed(nodes.log(), kind.num_ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_what_a_group_puts_into_a_store_it_and_another_one_restore(
    name: str, tmp_path: Path
) -> None:
    """Each rank finds its own part by its place in its group, whichever group put it there."""
    kind = KINDS[name]
    model = kind.write(tmp_path / "model")
    prompts = list(real_prompts(LENGTHS, seed=3))
    (tmp_path / "store").mkdir()
    store = ["--hier-kv-remote-url", f"file://{tmp_path / 'store'}?size=1GB"]
    with server_of(kind, model, tmp_path, *store) as nodes:
        server = connected(nodes.head)
        first, repeat = answers(server, prompts, 1), answers(server, prompts, 1)
        assert cached(first) == [0] * len(prompts)
        settled(server)
        server.post("/hicache/storage-backend/clear")  # of all but the store
        flush_device(server)
        check_hits(answers(server, prompts, 1), repeat, "remote", above=10 * PAGE)
        # The other group never computed any of it: what follows is behind the first one's KV.
        restored = answers(server, prompts, 0)
        check_hits(restored, answers(server, prompts, 0), "remote", above=10 * PAGE)
        check_close(restored, repeat, kind.tolerance)
        for rank in every_rank(server):
            host = rank["host"]
            assert host.get("load_failures", 0) == host.get("save_failures", 0) == 0
        check_agreed(nodes.log(), kind.num_ranks)
