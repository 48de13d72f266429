"""Data parallel attention on the real server: ranks with requests of their own run in step.

Two ranks, and two groups of two. A rank restores what it evicted while the other one is idle, and
while it is busy; a rank whose disk hardly moves holds up nobody else's requests; weights that lie
on other ranks are in every rank's namespace. The tests of a rig are in an order: the last ends its
server.

By default groups of two ranks restore, wait and agree, and groups of one are busy and get other
weights; the long form has all of it for both, and for ranks on several nodes: there a node has a
group of one rank or of two, or a group lies on two nodes, and the last node's stores are late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from testkit import rank_probe
from testkit.rank_requests import JITTER_MS
from testkit.requests import flush_device, let_go
from testkit.server import Server
from testkit.slow import ENV_JITTER, ENV_SPEED_FILE
from tests.e2e import hier_server
from tests.e2e.hier_server import (
    PAGE,
    SLOT_BYTES,
    by_tier,
    check_agreed,
    connected,
    hier_args,
    ranks_of,
    real_prompts,
    settled,
    states,
    tokens_and_logprobs,
)
from tests.e2e.nodes import Nodes
from tests.e2e.updates.weight_answers import NOISE, ROUNDING, Answer, distance, hit, request
from tests.e2e.updates.weight_models import Weights, qwen3, strange

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = (0, 1)
HOST_PAGES = 14  # of each group; a page has twice the heads of the bundled model's
NUM_TOKENS = 3  # of an answer: ranks in step on two cores take long for each
PROMPTS = list(real_prompts([150, 280, 210], seed=3))
FILLERS = list(real_prompts([1000, 950], seed=4))  # more pages than DRAM has
POOL = ["--max-total-tokens", "4096", "--page-size", str(PAGE)]
# One of them by the deprecated names; without the plugin it is the other one (`start`).
WAYS = {
    "two-ranks": ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
    "two-by-two": ["--tp-size", "4", "--attn-dp-size", "2"],
    "a-rank-a-node": ["--tp-size", "2", "--attn-dp-size", "2"],
    "a-group-a-node": ["--tp-size", "4", "--attn-dp-size", "2"],
    "a-group-on-two-nodes": ["--tp-size", "4", "--attn-dp-size", "2"],
}
NUM_NODES = {"a-rank-a-node": 2, "a-group-a-node": 2, "a-group-on-two-nodes": 4}  # else 1
LATE = {ENV_JITTER: str(JITTER_MS)}
ENVIRONMENT = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
}
WAIT_S = 300.0


class Rig(NamedTuple):
    """A server and what it runs on.

    Attributes:
        way: how its ranks are arranged.
        nodes: it.
        folder: of its disk, event logs and models.
        speed: file with the speed of its disks.
    """

    way: str
    nodes: Nodes
    folder: Path
    speed: Path

    @property
    def server(self) -> Server:
        """The node that takes requests."""
        return self.nodes.head

    @property
    def group_size(self) -> int:
        """Ranks that share a request's attention."""
        return num_ranks(self.way) // len(RANKS)

    @property
    def looked_at(self) -> int:
        """The rank that is restored beside the other one: not the same in all arrangements."""
        return self.group_size - 1

    def states(self) -> list[list[dict[str, Any]]]:
        """The plugin's state of each rank, by group and rank in it."""
        return [ranks_of(group) for group in states(self.server)]

    def store_away(self, rank: int) -> None:
        """Leaves the pages of `PROMPTS` on a rank's disk alone.

        What is not on disk yet stays in DRAM, and what comes then finds no room.
        """
        settled(self.server)
        for filler in FILLERS:
            ask(self.server, filler, routed_dp_rank=rank)
            settled(self.server)
        flush_device(self.server)


def num_ranks(way: str) -> int:
    """Of both groups."""
    return int(WAYS[way][1])


def nodes_of(way: str, args: list[str], folder: Path, **others: Any) -> Nodes:
    """A server with its ranks arranged in a way; of several nodes the last one's stores are late.

    Args:
        way: of `WAYS`.
        args: of all nodes, without those for ranks and the disk's folder.
        folder: of its logs and disks.
        others: of `Nodes`.
    """
    num = NUM_NODES.get(way, 1)
    late = LATE if num > 1 else {}
    return Nodes(args, folder, ranks=WAYS[way], num=num, late=late, **others)


def polls(message: str) -> Iterator[None]:
    """Turns of a wait for a state."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.1)
    raise AssertionError(message)


def ask(server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """`hier_server.ask`, for a short answer."""
    return hier_server.ask(server, prompt, NUM_TOKENS, **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture(scope="module", params=sorted(WAYS))
def rig(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    way, folder = request.param, tmp_path_factory.mktemp(request.param)
    speed = folder / "disk-mb-s"
    host_pages = 4 * HOST_PAGES // NUM_NODES.get(way, 1)
    args = [*hier_args(folder, host_pages=host_pages, disk_gb=0, policy="wait_complete"), *POOL]
    args += ["--hier-kv-disk-size", "2", "--hier-kv-disk-segment-size", "0.03", "--enable-metrics"]
    probe = rank_probe.environment(folder / "probe")
    env = {**ENVIRONMENT, **probe, ENV_SPEED_FILE: str(speed)}
    with nodes_of(way, args, folder, env=env, model=model) as nodes:
        yield Rig(way, nodes, folder, speed)


def on_device(rig: Rig, rank: int, prompt: list[int]) -> dict[str, Any]:
    """The answer to a prompt whose pages are all on the device."""
    ask(rig.server, prompt, routed_dp_rank=rank)
    answer = ask(rig.server, prompt, routed_dp_rank=rank)
    assert answer["meta_info"]["dp_rank"] == rank
    assert by_tier(answer)["device"] == len(prompt) // PAGE * PAGE
    return answer


@contextmanager
def busy(rig: Rig, rank: int) -> Iterator[None]:
    """Another rank prefills and decodes all the time, three requests at once."""
    stop = threading.Event()
    prompts = list(real_prompts([90, 150, 260], seed=9))
    counts = [0] * len(prompts)

    def run(number: int) -> None:
        while not stop.is_set():
            ask(rig.server, prompts[number], routed_dp_rank=rank)
            counts[number] += 1

    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(run, number) for number in range(len(prompts))]
        try:
            for _ in polls("the other rank served nothing"):
                if all(counts):
                    break
            before = sum(counts)
            yield
            for _ in polls("the other rank stood still"):
                if sum(counts) > before:
                    break
        finally:
            stop.set()
    for one in running:
        one.result()


@pytest.mark.sampled("two-by-two")
def test_what_is_restored_beside_an_idle_rank_answers_as_a_device_hit(rig: Rig) -> None:
    rank = rig.looked_at
    expected = [on_device(rig, rank, prompt) for prompt in PROMPTS]
    settled(rig.server)
    flush_device(rig.server)
    from_host = [ask(rig.server, prompt, routed_dp_rank=rank) for prompt in PROMPTS]
    rig.store_away(rank)
    from_disk = [ask(rig.server, prompt, routed_dp_rank=rank) for prompt in PROMPTS]
    for tier, answers in (("host", from_host), ("disk", from_disk)):
        for wanted, answer in zip(expected, answers, strict=True):
            assert by_tier(answer)[tier] == by_tier(wanted)["device"], tier
            assert tokens_and_logprobs(answer) == tokens_and_logprobs(wanted)


@pytest.mark.sampled("two-ranks")
def test_what_is_restored_beside_a_busy_rank_answers_as_a_device_hit(rig: Rig) -> None:
    """Rows of another rank are in the same matrix products, so it is compared up to rounding."""
    rank = rig.looked_at
    expected = [hit_on(rig, rank, prompt) for prompt in PROMPTS]
    rig.store_away(rank)
    with busy(rig, 1 - rank):
        for tier in ("disk", "device"):
            for prompt, wanted in zip(PROMPTS, expected, strict=True):
                found, reply = request(rig.server, prompt, routed_dp_rank=rank)
                assert by_tier(reply)[tier] == len(prompt) // PAGE * PAGE
                assert distance(found, wanted) < ROUNDING


def hit_on(rig: Rig, rank: int, prompt: list[int]) -> Answer:
    request(rig.server, prompt, routed_dp_rank=rank)
    return request(rig.server, prompt, routed_dp_rank=rank)[0]


@pytest.mark.sampled("two-by-two")
def test_a_rank_that_waits_for_its_disk_holds_up_no_other(rig: Rig) -> None:
    expected = [on_device(rig, 0, prompt) for prompt in PROMPTS]
    rig.store_away(0)
    beside = [on_device(rig, 1, prompt) for prompt in PROMPTS]
    reads = [rank["disk"]["records_read"] for rank in rig.states()[0]]
    rig.speed.write_text(f"{SLOT_BYTES / 1e6 / 1e4:.9f}")  # hours for a page
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, rig.server, PROMPTS[0], rid="waits", routed_dp_rank=0)
            for _ in polls("the request did not come to its queue"):
                if (
                    '"waits"'
                    in (rig.folder / f"events-dp0-tp0-of-{rig.group_size}.jsonl").read_text()
                ):
                    break
            for prompt, wanted in zip(PROMPTS, beside, strict=True):
                answer = ask(rig.server, prompt, routed_dp_rank=1)
                assert tokens_and_logprobs(answer) == tokens_and_logprobs(wanted)
            assert not waiting.done()
            assert [rank["disk"]["records_read"] for rank in rig.states()[0]] == reads
            rig.speed.unlink()
            answer = waiting.result(WAIT_S)
    finally:
        rig.speed.unlink(missing_ok=True)
    assert by_tier(answer)["disk"] == by_tier(expected[0])["device"]
    assert tokens_and_logprobs(answer) == tokens_and_logprobs(expected[0])


def second_half_of_each_mlp(weights: Weights) -> None:
    """Changes what the first rank, or the first group, has no weight of."""
    generator = torch.Generator().manual_seed(5)
    for name in sorted(name for name in weights if "down_proj" in name):
        down = weights[name]
        half = down.shape[1] // 2
        noise = torch.randn(down[:, half:].shape, generator=generator) * down.float().std()
        down[:, half:] = noise.to(down.dtype)


@pytest.fixture(scope="module")
def others(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Answer]]]:
    """Other models, and what a plain server of one rank answers with each."""
    folder, found = tmp_path_factory.mktemp("others"), {}
    with Server(POOL, model=model, log_path=folder / "plain.log", stop="kill") as plain:
        for name, change in (("strange", strange(1)), ("half", second_half_of_each_mlp)):
            other = qwen3(folder / name, change)
            update(plain, other)
            found[name] = other, [hit(plain, prompt) for prompt in PROMPTS]
    return found


def update(server: Server, model: Path) -> None:
    body = {"model_path": str(model), "flush_cache": True}
    let_go(server)
    assert server.post("/update_weights_from_disk", body)["success"]


@pytest.mark.sampled("two-ranks")
def test_no_rank_reuses_what_it_computed_with_other_weights(
    rig: Rig, model: Path, others: dict[str, tuple[Path, list[Answer]]]
) -> None:
    first = {(rank, n): hit_on(rig, rank, p) for rank in RANKS for n, p in enumerate(PROMPTS)}
    settled(rig.server)
    for other, wanted in others.values():
        assert max(distance(first[0, n], one) for n, one in enumerate(wanted)) > NOISE
        update(rig.server, other)
        for rank in RANKS:
            for prompt, one in zip(PROMPTS, wanted, strict=True):
                found, reply = request(rig.server, prompt, routed_dp_rank=rank)
                assert sum(by_tier(reply).values()) == 0
                assert distance(found, one) < ROUNDING
    update(rig.server, model)
    for (rank, n), one in first.items():
        found, reply = request(rig.server, PROMPTS[n], routed_dp_rank=rank)
        tiers = by_tier(reply)
        assert tiers["host"] + tiers["disk"] == len(PROMPTS[n]) // PAGE * PAGE
        assert distance(found, one) < ROUNDING


@pytest.mark.sampled("two-ranks")
def test_weights_that_change_under_a_busy_rank(
    rig: Rig, model: Path, others: dict[str, tuple[Path, list[Answer]]]
) -> None:
    """SGLang flushes no rank that has requests: such a one keeps nothing until it is flushed."""
    other, wanted = others["strange"]
    with busy(rig, 1):
        rig.server.post(
            "/update_weights_from_disk", {"model_path": str(other), "flush_cache": False}
        )
    for rank in RANKS:
        for prompt in PROMPTS:
            ask(rig.server, prompt, routed_dp_rank=rank)
    settled(rig.server)
    flush_device(rig.server)
    for rank in RANKS:
        for prompt, one in zip(PROMPTS, wanted, strict=True):
            found, _ = request(rig.server, prompt, routed_dp_rank=rank)
            assert distance(found, one) < ROUNDING
    update(rig.server, model)


@pytest.mark.sampled("two-by-two")
def test_each_rank_has_a_store_of_its_own_and_tells_of_it(rig: Rig) -> None:
    for rank in RANKS:
        on_device(rig, rank, PROMPTS[0])
        settled(rig.server)
        flush_device(rig.server)
        ask(rig.server, PROMPTS[0], routed_dp_rank=rank)
    metrics = "".join(node.get("/metrics") for node in rig.nodes.nodes)
    for group, ranks in enumerate(rig.states()):
        assert len(ranks) == rig.group_size
        for number, state in enumerate(ranks):
            assert (state["dp_rank"], state["tp_rank"]) == (group, number)
            assert HOST_PAGES - 1 <= state["host"]["host_capacity_pages"] <= HOST_PAGES
            assert state["host"]["loaded_pages"] > 0
            name = f"dp{group}-tp{number}-of-{rig.group_size}"
            assert list(rig.folder.glob(f"disk*/{name}/*/seg-*.hkv"))
            labels = [f'dp_rank="{group}"', f'tp_rank="{number}"']
            lines = [line for line in metrics.splitlines() if all(one in line for one in labels)]
            assert any("hier_kv_pages_total" in line for line in lines), labels


@pytest.mark.sampled("two-*")
def test_ranks_agree_within_their_group_alone(rig: Rig) -> None:
    probes = rank_probe.fresh_counts(rig.folder / "probe")
    assert len(probes) == 2 * rig.group_size
    for probe in probes:
        assert probe["steps"] > 20  # how many is chance: idle ones count, too
        # A group of one agrees on nothing; else once a step, and again where it is flushed.
        assert min(probe["per_step"]) == rig.group_size - 1, probe
        assert (max(probe["per_step"]) == 0) == (rig.group_size == 1), probe
    check_agreed(rig.nodes.log(), 2 * rig.group_size)


@pytest.mark.sampled("two-*")
def test_a_rank_that_is_killed_ends_the_server(rig: Rig) -> None:
    tree = rig.nodes.schedulers()
    assert len(tree) == 2 * rig.group_size
    tree[-1].kill()
    for _ in polls("the server goes on without a rank"):
        if not any(node.alive() for node in rig.nodes.nodes):
            break
    _, left = psutil.wait_procs(tree, timeout=WAIT_S)
    assert not left


def test_what_one_rank_stores_in_a_remote_store_another_one_reuses(
    model: Path, tmp_path: Path
) -> None:
    args = [*hier_args(tmp_path, disk_gb=0), *POOL]
    (tmp_path / "store").mkdir()
    args += ["--hier-kv-remote-url", f"file://{tmp_path / 'store'}?size=1GB"]
    args += ["--hier-kv-prefetch-policy", "wait_complete"]
    way = "two-ranks"
    with nodes_of(way, args, tmp_path, env=ENVIRONMENT, model=model, has_disk=False) as nodes:
        rig, server = Rig(way, nodes, tmp_path, tmp_path / "none"), connected(nodes.head)
        expected = [on_device(rig, 0, prompt) for prompt in PROMPTS]
        num_pages = sum(len(prompt) // PAGE for prompt in PROMPTS)
        for _ in polls("the pages did not reach the store"):
            if rig.states()[0][0]["host"].get("remote_written_pages", 0) >= num_pages:
                break
        flush_device(server)
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            answer = ask(server, prompt, routed_dp_rank=1)
            assert by_tier(answer)["remote"] == len(prompt) // PAGE * PAGE
            assert tokens_and_logprobs(answer) == tokens_and_logprobs(wanted)
