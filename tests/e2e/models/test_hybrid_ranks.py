"""Hybrids on two tensor parallel ranks, their page stores late, each by its own chance.

What is restored is compared with plain SGLang's own device hits on two ranks bit for bit, and where
one rank has lost what the other has, with what transformers computes for the same tokens. SGLang's
rank consensus checker is on: it ends the server when ranks decide differently.

By default windows come back on one node, and states beside latent rows where each rank is on a node
of its own; the long form has each kind both ways, what one rank alone has lost, and many requests
at once.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.hybrids.window_model import write_window_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    GIB,
    by_tier,
    check_agreed,
    real_prompts,
    settled,
    state,
)
from tests.e2e.models.hybrid_answers import (
    Computed,
    answers,
    answers_at_once,
    branching_prompts,
    cached,
    check_hits,
    values,
)
from tests.e2e.nodes import Nodes
from tests.long_form import either

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.newest_release,
    pytest.mark.sampled("windows", "states-beside-latent-rows-on-nodes"),
]

PAGE, HEADER_BYTES = 64, 4096
LENGTHS = [40, 333, 702, 1000]
NUM_AT_ONCE = either(10, 16)
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
RANKS = ["--tp-size", "2"]


@dataclass(frozen=True)
class Kind:
    """A model.

    Attributes:
        write: writes it into a new folder.
        open: the same weights without SGLang.
        page_bytes: K and V of a page on one of two ranks.
        tolerance: how far rounding takes a log-probability; another KV takes it to 1 and more.
        args: of its servers.
        env: of its servers.
        lengths: of prompts, besides those of every kind. Behind one of whole pages SGLang has no
            state for the same prompt again, and keeps one then.
        num_nodes: that its ranks with the plugin are spread over.
    """

    write: Callable[[Path], Path]
    open: Callable[[Path], Any]
    page_bytes: int
    tolerance: float
    args: list[str]
    env: dict[str, str]
    lengths: list[int]
    num_nodes: int = 1


def _open_windows(folder: Path) -> Any:
    from transformers import MellumForCausalLM

    return MellumForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _with_states(name: str, page_bytes: int) -> Kind:
    model = STATE_MODELS[name]
    return Kind(
        partial(write_state_model, name=name), model.open, page_bytes, 5e-4,
        ["--dtype", model.dtype_name, "--max-mamba-cache-size", "60", *model.server_args],
        {"SGLANG_MAMBA_CONV_DTYPE": model.dtype_name}, [130, 1290],
    )  # fmt: skip


KINDS = {
    "windows": Kind(write_window_model, _open_windows, 16_384, 0.2, [], {}, [128, 1280]),
    "states": _with_states("qwen3_next", STATE_MODELS["qwen3_next"].page_bytes // 2),
    # Each rank has the latent row of every token, and its share of the states.
    "states-beside-latent-rows": _with_states(
        "kimi_linear", STATE_MODELS["kimi_linear"].page_bytes
    ),
    "states-of-kimi-k3": _with_states("kimi_k3", STATE_MODELS["kimi_k3"].page_bytes),
}
KINDS |= {f"{name}-on-nodes": replace(kind, num_nodes=2) for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Setup:
    """A model on disk, and where its servers keep pages."""

    kind: Kind
    model: Path
    folder: Path

    def plain(self) -> Server:
        """A server without the plugin, on one node."""
        args, env = self._common(8192)
        log = self.folder / "plain.log"
        return Server(
            [*args, *RANKS],
            model=self.model,
            log_path=log,
            env=env,
            stop="kill",
            start_timeout_s=300,
        )

    def nodes(self, *more: str, host_pages: int, pool: int = 8192) -> Nodes:
        """A server with DRAM for that many pages a rank, and a disk."""
        args, env = self._common(pool)
        num_ranks = 2 // self.kind.num_nodes  # of a node, whose the sizes are
        num_bytes = num_ranks * (host_pages + 0.5) * (self.kind.page_bytes + HEADER_BYTES)
        args += ["--enable-hier-kv", "--hier-kv-prefetch-timeout-ms", "60000"]
        args += ["--hier-kv-host-size", f"{num_bytes / GIB:.9f}"]
        args += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01", *more]
        env[ENV_JITTER] = str(JITTER_MS)
        return Nodes(
            args, self.folder, env=env, ranks=RANKS, model=self.model, num=self.kind.num_nodes
        )

    def _common(self, pool: int) -> tuple[list[str], dict[str, str]]:
        """Arguments and variables of both."""
        args = [*BASE, *self.kind.args, "--max-total-tokens", str(pool)]
        return args, {**ENVIRONMENT, **self.kind.env}

    @property
    def second_rank(self) -> Path:
        """The folder of one of the ranks."""
        return self.folder / f"disk{self.kind.num_nodes - 1}" / "dp0-tp1-of-2"


@dataclass(frozen=True)
class Served:
    """What plain SGLang answered, and a server with much room before and after a flush."""

    setup: Setup
    prompts: list[list[int]]
    first: list[Any]
    repeat: list[Any]
    computed: list[Any]
    restored: list[Any]
    counted: dict[str, Any]


@pytest.fixture(scope="module", params=list(KINDS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    setup = Setup(kind, kind.write(folder / "model"), folder)
    prompts = list(real_prompts([*LENGTHS, *kind.lengths], seed=3))
    with setup.plain() as server:
        first, repeat = answers(server, prompts), answers(server, prompts)
    with setup.nodes("--hier-kv-codec", "lossless", host_pages=400) as nodes:
        server = nodes.head
        computed = answers(server, prompts)
        settled(server)
        flush_device(server)
        restored = answers(server, prompts)
        counted = settled(server)
        check_agreed(nodes.log(), 2)
    return Served(setup, prompts, first, repeat, computed, restored, counted)


@pytest.fixture(scope="module")
def restarted(served: Served) -> Iterator[Nodes]:
    """On the disk that the one before left when it was killed."""
    with served.setup.nodes(pool=3072, host_pages=90) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def computed(served: Served) -> Computed:
    """By transformers."""
    opened = served.setup.kind.open(served.setup.model)
    return Computed(lambda tokens: opened(tokens).logits[0])


def test_a_hit_from_dram_is_what_the_device_would_have_given(served: Served) -> None:
    assert values(served.computed) == values(served.first)
    check_hits(served.restored, served.repeat, "host", above=40 * PAGE)
    ranks = served.counted["tp_ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["host"]["loaded_pages"] > 0
        assert rank["host"]["host_capacity_pages"] == 400
    assert len({rank["host"]["saved_pages"] for rank in ranks}) == 1


def test_a_hit_from_disk_after_a_restart_is_what_the_device_would_have_given(
    served: Served, restarted: Nodes
) -> None:
    check_hits(answers(restarted.head, served.prompts), served.repeat, "disk", above=40 * PAGE)
    check_agreed(restarted.log(), 2)


@pytest.mark.long
def test_with_many_at_once_and_too_little_room_every_answer_is_right(
    served: Served, restarted: Nodes, computed: Computed
) -> None:
    rng = random.Random(9)
    prompts = branching_prompts(rng, 4, NUM_AT_ONCE)
    prompts += prompts

    server = restarted.head
    found = answers_at_once(server, prompts, rng, 40)
    # How much of it was reused is a matter of who came first; what was left behind is not.
    settled(server)
    flush_device(server)
    again = answers(server, prompts[:NUM_AT_ONCE], 3)
    furthest = computed.furthest([*prompts, *prompts[:NUM_AT_ONCE]], [*found, *again])
    assert furthest < served.setup.kind.tolerance
    from_tiers = sum(by_tier(a).get("host", 0) + by_tier(a).get("disk", 0) for a in again)
    counted = state(server)
    print(f"{from_tiers} tokens from the tiers; {counted['host']}")
    assert from_tiers > 10 * PAGE, (from_tiers, counted)
    for rank in counted["tp_ranks"]:
        assert rank["host"].get("load_failures", 0) == rank["host"].get("save_failures", 0) == 0
    check_agreed(restarted.log(), 2)


@pytest.mark.long
def test_what_one_rank_alone_has_lost_is_computed(
    served: Served, restarted: Nodes, computed: Computed
) -> None:
    """Some records of one rank are damaged; then its folder is gone."""
    settled(restarted.head)
    restarted.kill()
    setup = served.setup
    for segment in sorted(setup.second_rank.rglob("seg-*.hkv")):
        content = bytearray(segment.read_bytes())
        for at in range(len(content) // 8, len(content), 300_000):
            content[at] ^= 0xFF
        segment.write_bytes(content)
    with setup.nodes("--hier-kv-codec", "lossless", host_pages=400) as nodes:
        found = answers(nodes.head, served.prompts)
        damaged = state(nodes.head)["tp_ranks"]
        check_agreed(nodes.log(), 2)
    print(cached(found), [rank["host"] for rank in damaged])
    assert all(a <= b for a, b in zip(cached(found), cached(served.repeat), strict=True))
    assert sum(cached(found)) < sum(cached(served.repeat))
    assert computed.furthest(served.prompts, found) < setup.kind.tolerance
    shutil.rmtree(setup.second_rank)
    with setup.nodes("--hier-kv-codec", "lossless", host_pages=400) as nodes:
        found = answers(nodes.head, served.prompts)
    assert cached(found) == [0] * len(found)
    assert values(found) == values(served.first)
