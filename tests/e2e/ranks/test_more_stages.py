"""Pipeline stages of latent rows, with states, four of them, with a store, and with coded pages.

And stages of two tensor parallel ranks each, and hybrids with a stage on each of two nodes
(`test_stages.py` has models of K and V there). Page stores are late, each by its own chance. What
is restored is compared bit for bit with plain SGLang's own device hits on one node, and so is what
is computed where one rank alone has lost its pages. Where the disk of one rank is slow all compute,
and where that rank is killed, or its node, the server ends. SGLang's rank consensus checker is on.

By default latent rows with a remote store, and states beside latent rows on two nodes; the long
form has all `WAYS`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.drafts.nextn import PLAIN, rows_of, write_nextn_model
from testkit.hybrids.oss_model import HEAD_DIM, KV_HEADS, NUM_FULL_LAYERS, write_oss_model
from testkit.hybrids.state_model import DEEP_QWEN, STATE_MODELS, StateModel, write_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS, answer_of
from testkit.requests import by_tier
from testkit.server import Server, ServerError
from testkit.slow import ENV_JITTER, ENV_SPEED_FILE
from tests.e2e.hier_server import GIB, PAGE, SLOT_BYTES, ask, real_prompts
from tests.e2e.models.hybrid_answers import branching_prompts
from tests.e2e.nodes import Nodes
from tests.e2e.ranks.untied_model import write_untied_model
from tests.e2e.remote.test_remote import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.newest_release("*states*", "*windows*"),
    pytest.mark.sampled("latent-remote", "latent-states-on-nodes"),
]

HEADER_BYTES = 4096
PATIENCE_S = 300.0
LENGTHS = (128, 200, 384, 700)
BASE = ["--page-size", str(PAGE), "--max-total-tokens", "4096", "--chunked-prefill-size", "128"]
LATENT = sum(rows_of(PLAIN)[0][:-1])  # bytes of a token, of all layers but the draft


@dataclass(frozen=True)
class Way:
    """A model in stages.

    Attributes:
        write: writes it into a new folder.
        layers: of each stage.
        page_bytes: of all ranks of all stages that hold something else, without headers.
        tp_size: ranks of a stage.
        has_shares: each rank of a stage has some of the heads; otherwise each has all of a page.
        tier: below DRAM: `disk`, or `remote` in its place.
        args: of its servers with the plugin.
        attention: SGLang's backend.
        model_args: of its servers with the plugin and without.
        env: of these.
        lengths: of prompts. Behind one of whole pages SGLang has no state for the same prompt.
        num_nodes: that its ranks with the plugin are spread over.
    """

    write: Callable[[Path], Path]
    layers: tuple[int, ...]
    page_bytes: int
    tp_size: int = 1
    has_shares: bool = True
    tier: str = "disk"
    args: list[str] = field(default_factory=list)
    attention: str = "torch_native"
    model_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    num_nodes: int = 1

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.layers)

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.tp_size * self.num_stages

    @property
    def slot_bytes(self) -> int:
        """Of a page of a rank of the largest stage."""
        shares = self.tp_size if self.has_shares else 1
        return self.page_bytes * max(self.layers) // sum(self.layers) // shares + HEADER_BYTES


_LATENT = Way(
    partial(write_nextn_model, kind=PLAIN), (4, 2), LATENT * PAGE,
    has_shares=False, attention="cpu_extend",
)  # fmt: skip


def _with_states(model: StateModel, layers: tuple[int, ...], **others: Any) -> Way:
    """Each stage has layers with a state and with attention."""
    return Way(
        partial(write_model, kind=model), layers, model.page_bytes,
        attention="cpu_extend", env={"SGLANG_MAMBA_CONV_DTYPE": model.dtype_name},
        model_args=("--dtype", model.dtype_name, "--max-mamba-cache-size", "60"),
        **{"lengths": LENGTHS[1:], **others},
    )  # fmt: skip


# Where states lie so close that of whole pages one is kept for the same prompt at its return.
_CLOSE_LENGTHS = (200, 390, 700)


def _latent_with_states(**others: Any) -> Way:
    """With latent rows."""
    model = STATE_MODELS["kimi_linear"]
    return _with_states(model, (5, 3), has_shares=False, lengths=_CLOSE_LENGTHS, **others)


def _more_states(**others: Any) -> Way:
    """With the gated delta rule."""
    return _with_states(DEEP_QWEN, (4, 4), lengths=_CLOSE_LENGTHS, **others)


_NEMOTRON = STATE_MODELS["nemotron_h"]
_WINDOWS = Way(
    write_oss_model, (4, 4), NUM_FULL_LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 2,
    attention="cpu_extend",
)  # fmt: skip
_MHA = Way(write_untied_model, (5, 3), SLOT_BYTES - HEADER_BYTES)
WAYS = {
    "latent": _LATENT,
    "coded": replace(_MHA, args=["--hier-kv-codec", "lossless"]),
    "four": Way(write_untied_model, (3, 2, 2, 1), SLOT_BYTES - HEADER_BYTES),
    "remote": replace(_MHA, tier="remote"),
    "latent-remote": replace(_LATENT, tier="remote"),
    # Stages with other numbers of states, whose states take other numbers of parts.
    "states": _with_states(_NEMOTRON, (5, 5)),
    "states-coded": _with_states(_NEMOTRON, (5, 5), args=["--hier-kv-codec", "lossless"]),
    "states-remote": _with_states(_NEMOTRON, (5, 5), tier="remote"),
    "ranks": replace(_MHA, tp_size=2),
    "latent-ranks-remote": replace(_LATENT, tp_size=2, tier="remote"),
    "states-ranks": _with_states(_NEMOTRON, (5, 5), tp_size=2),
    "latent-states": _latent_with_states(),
    "latent-states-coded": _latent_with_states(args=["--hier-kv-codec", "lossless"]),
    "latent-states-ranks-remote": _latent_with_states(tp_size=2, tier="remote"),
    "more-states": _more_states(),
    "more-states-ranks-remote": _more_states(tp_size=2, tier="remote"),
    "windows": _WINDOWS,
    "windows-coded": replace(_WINDOWS, args=["--hier-kv-codec", "lossless"]),
    "windows-ranks-remote": replace(_WINDOWS, tp_size=2, tier="remote"),
    "states-ranks-remote": _with_states(_NEMOTRON, (5, 5), tp_size=2, tier="remote"),
    "states-ranks-remote-on-nodes": _with_states(
        _NEMOTRON, (5, 5), tp_size=2, tier="remote", num_nodes=2
    ),
    "latent-states-on-nodes": _latent_with_states(num_nodes=2),
    "more-states-on-nodes": _more_states(num_nodes=2),
    "windows-on-nodes": replace(_WINDOWS, num_nodes=2),
    # A node has one of the two ranks of a stage.
    "windows-ranks-on-four-nodes": replace(_WINDOWS, tp_size=2, num_nodes=4),
}


@dataclass(frozen=True)
class Setup:
    """A model on disk, and where its servers keep pages."""

    way: Way
    model: Path
    folder: Path

    def plain(self) -> Server:
        """A server without the plugin, on one node."""
        args, ranks, env = self._common(4096)
        log = self.folder / "plain.log"
        return Server(
            [*args, *ranks], model=self.model, log_path=log, env=env, stop="kill",
            start_timeout_s=PATIENCE_S,
        )  # fmt: skip

    def nodes(
        self,
        *more: str,
        host_pages: int,
        pool: int = 4096,
        env: dict[str, str] | None = None,
    ) -> Nodes:
        """The nodes of a server.

        Args:
            more: arguments behind the others.
            host_pages: of the largest stage, that each of its ranks has DRAM for.
            pool: tokens on the device.
            env: variables beside the others.
        """
        way = self.way
        args, ranks, others = self._common(pool)
        num_ranks = way.num_ranks // way.num_nodes  # of a node, whose the sizes are
        host_gib = num_ranks * (host_pages + 0.5) * way.slot_bytes / GIB
        args += ["--enable-hier-kv", "--enable-metrics"]
        args += ["--hier-kv-host-size", f"{host_gib:.9f}"]
        args += ["--hier-kv-prefetch-policy", "wait_complete"]
        args += ["--hier-kv-write-policy", "write_through"]
        args += [*way.args, *self._tier(), *more]
        env = {**others, ENV_JITTER: str(JITTER_MS), **(env or {})}
        return Nodes(
            args, self.folder, env=env, ranks=ranks, model=self.model, num=way.num_nodes,
            has_disk=way.tier == "disk",
        )  # fmt: skip

    def _common(self, pool: int) -> tuple[list[str], list[str], dict[str, str]]:
        """Arguments, those of ranks, and variables of both."""
        way = self.way
        args = [*BASE, "--attention-backend", way.attention]
        args += ["--max-total-tokens", str(pool), *way.model_args]
        ranks = ["--tp-size", str(way.tp_size), "--pp-size", str(way.num_stages)]
        env = {**ENVIRONMENT, **way.env}
        env["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, way.layers))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(n % 2) for n in range(way.num_ranks))
        return args, ranks, env

    def _tier(self) -> list[str]:
        if self.way.tier == "disk":
            return ["--hier-kv-disk-size", "1", "--hier-kv-disk-segment-size", "0.01"]
        self.shared.mkdir(exist_ok=True)
        return ["--hier-kv-remote-url", f"file://{self.shared}?size=1GB"]

    @property
    def last_disk(self) -> Path:
        """The folder of the last stage's last rank."""
        return self.folder / f"disk{self.way.num_nodes - 1}" / self.last_rank

    @property
    def shared(self) -> Path:
        """The folder of the remote store."""
        return self.folder / "shared"

    @property
    def last_rank(self) -> str:
        """Name of the last stage's last rank, as that of its folder on disk."""
        tp, stages = self.way.tp_size, self.way.num_stages
        return f"dp0-tp{tp - 1}-of-{tp}-pp{stages - 1}-of-{stages}"


@dataclass(frozen=True)
class Run:
    """What plain SGLang answered, and servers before and after a kill -9."""

    setup: Setup
    prompts: list[list[int]]
    computed: list[Any]
    on_device: list[Any]
    from_host: list[Any]


@pytest.fixture(scope="module", params=list(WAYS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    way, folder = WAYS[request.param], tmp_path_factory.mktemp(request.param)
    setup = Setup(way, way.write(folder / "model"), folder)
    prompts = list(real_prompts(way.lengths, seed=3))
    with setup.plain() as server:
        computed = [ask(server, prompt) for prompt in prompts]
        on_device = [ask(server, prompt) for prompt in prompts]
    with setup.nodes(host_pages=200) as nodes:
        server = nodes.head
        eventually(partial(is_connected, nodes, way))
        for prompt in prompts:
            ask(server, prompt)
        flush(server)  # waits for the saves of each rank
        from_host = [ask(server, prompt) for prompt in prompts]
        eventually(partial(is_kept, nodes, way))
    return Run(setup, prompts, computed, on_device, from_host)


@pytest.fixture(scope="module")
def restarted(run: Run) -> Iterator[Nodes]:
    """With little room, on what the one before left when it was killed."""
    with run.setup.nodes(host_pages=30, pool=1536) as nodes:
        eventually(partial(is_connected, nodes, run.setup.way))
        yield nodes


def test_a_hit_from_dram_is_what_the_device_would_have_given(run: Run) -> None:
    check_hits(run, run.from_host, "host")


def test_a_hit_from_below_after_a_kill_is_what_the_device_would_have_given(
    run: Run, restarted: Nodes
) -> None:
    way = run.setup.way
    check_hits(run, [ask(restarted.head, prompt) for prompt in run.prompts], way.tier)
    if "--hier-kv-codec" in way.args:
        eventually(lambda: len(values_of(restarted, "disk_codec_pages_decoded")) == way.num_ranks)


@pytest.mark.sampled("latent-remote")
def test_with_many_at_once_and_too_little_room_stages_agree(run: Run, restarted: Nodes) -> None:
    """What they have kept of it all answers as a device hit of the same length."""
    rng = random.Random(4)
    prompts = branching_prompts(rng, 3, 12)
    prompts = [prompt[:900] for prompt in prompts + prompts]
    with ThreadPoolExecutor(6) as pool:
        mixed = list(pool.map(partial(ask, restarted.head), prompts))
    assert all(len(answer["output_ids"]) for answer in mixed)
    flush(restarted.head)
    again = [ask(restarted.head, prompt) for prompt in run.prompts]
    for on_device, one in zip(run.on_device, again, strict=True):
        is_same = on_device["meta_info"]["cached_tokens"] == one["meta_info"]["cached_tokens"]
        assert not is_same or answer_of(on_device) == answer_of(one)
    reused: dict[str, int] = {}
    for answer in [*mixed, *again]:
        for tier, tokens in by_tier(answer["meta_info"]).items():
            reused[tier] = reused.get(tier, 0) + tokens
    print(reused)
    assert reused["host"] + reused[run.setup.way.tier] > 10 * PAGE, reused
    assert "Found rank divergence" not in restarted.log()


@pytest.mark.sampled("latent-states-on-nodes")
def test_where_one_rank_is_slow_all_compute_and_where_it_is_killed_the_server_ends(
    run: Run, restarted: Nodes, tmp_path: Path
) -> None:
    """It is killed while it reads for a request that all ranks hold; what is on disk stays good."""
    setup = run.setup
    if setup.way.tier == "remote":
        pytest.skip("its disk is what is slow")
    restarted.kill()
    speeds = tmp_path / "speeds"
    speeds.mkdir()
    log = tmp_path / "events.jsonl"
    more = ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "1000"]
    more += ["--hier-kv-event-log", str(log)]
    env = {ENV_SPEED_FILE: str(speeds)}
    with setup.nodes(*more, host_pages=200, env=env) as nodes:
        server = nodes.head
        (speeds / setup.last_rank).write_text("0.0001")  # now that it has read what records it has
        late = ask(server, run.prompts[-1])
        assert late["meta_info"]["cached_tokens"] == 0
        assert answer_of(late) == answer_of(run.computed[-1])
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server, run.prompts[-2], 512)
            eventually(lambda: num_entered(log, setup.last_rank) == 2)
            kill_last_rank(nodes, setup.way)
            with pytest.raises((ServerError, OSError)):
                answer.result(PATIENCE_S)
        eventually(lambda: not any(node.alive() for node in nodes.nodes))
        assert "Found rank divergence" not in nodes.log()
    with setup.nodes(host_pages=200) as nodes:
        check_hits(run, [ask(nodes.head, prompt) for prompt in run.prompts], "disk")


def num_entered(log: Path, rank: str) -> int:
    """How many requests for pages on disk have entered a rank's queue."""
    lines = log.with_name(f"events-{rank}.jsonl").read_text().splitlines()
    return sum('"e": "enqueued"' in line and '"on_disk": []' not in line for line in lines)


def kill_last_rank(nodes: Nodes, way: Way) -> None:
    """Of the last stage; with several nodes all of its node."""
    if way.num_nodes > 1:
        nodes.other.kill()
        return
    names = [f"PP{way.num_stages - 1}"]
    names += [f"TP{way.tp_size - 1}"] * (way.tp_size > 1)
    (rank,) = (
        process
        for process in nodes.schedulers()
        if all(name in " ".join(process.cmdline()) for name in names)
    )
    rank.kill()


@pytest.mark.sampled("latent-remote")
def test_what_one_rank_alone_has_lost_is_computed(run: Run, restarted: Nodes) -> None:
    restarted.kill()
    setup = run.setup
    if setup.way.tier == "disk":
        shutil.rmtree(setup.last_disk)
    else:
        lose_a_rank(setup.shared, setup.way.num_ranks)
    with setup.nodes(host_pages=200) as nodes:
        eventually(partial(is_connected, nodes, setup.way))
        found = [ask(nodes.head, prompt) for prompt in run.prompts]
        assert "Found rank divergence" not in nodes.log()
    assert [one["meta_info"]["cached_tokens"] for one in found] == [0] * len(found)
    assert [answer_of(one) for one in found] == [answer_of(one) for one in run.computed]


def lose_a_rank(shared: Path, num_ranks: int) -> None:
    """Removes what one of the ranks has put into a store: each has a namespace of its own."""
    namespaces = sorted(shared.glob("hkv-*/*"))
    assert len(namespaces) == num_ranks, namespaces
    shutil.rmtree(namespaces[0])


def check_hits(run: Run, found: Sequence[Any], tier: str) -> None:
    for on_device, one in zip(run.on_device, found, strict=True):
        assert on_device["meta_info"]["cached_tokens"] > 0
        tiers = by_tier(one["meta_info"])
        assert on_device["meta_info"]["cached_tokens"] == one["meta_info"]["cached_tokens"], tiers
        assert tiers.get(tier, 0) > 0, tiers
        assert answer_of(on_device) == answer_of(one)
    from_tier = sum(by_tier(one["meta_info"]).get(tier, 0) for one in found)
    assert from_tier > 0.9 * sum(one["meta_info"]["cached_tokens"] for one in found)


def flush(server: Server) -> None:
    """As SGLang does once the batch of the last answer has left all stages."""
    server.post(f"/flush_cache?timeout={PATIENCE_S}")


def values_of(nodes: Nodes, value: str) -> list[float]:
    """A value of the plugin's, of each rank that has published it at its node."""
    found: dict[tuple[str, str], float] = {}
    told = [text_string_to_metric_families(node.get("/metrics")) for node in nodes.nodes]
    for metric in chain(*told):
        for sample in metric.samples:
            if value in (sample.labels.get("of"), sample.labels.get("event")):
                found[sample.labels["pp_rank"], sample.labels["tp_rank"]] = sample.value
    return list(found.values())


def is_connected(nodes: Nodes, way: Way) -> bool:
    """Whether each rank has found the remote store, if it has one."""
    if way.tier == "disk":
        return True
    return values_of(nodes, "remote_breaker_state") == [0.0] * way.num_ranks


def is_kept(nodes: Nodes, way: Way) -> bool:
    """Whether each rank has below DRAM what it has saved.

    What it publishes once a second may be older than its last saves. Loads came behind these.
    """
    loaded, saved = values_of(nodes, "loaded_pages"), values_of(nodes, "saved_pages")
    written = values_of(nodes, "remote_written_pages" if way.tier == "remote" else "written_pages")
    return len(loaded) == way.num_ranks and min(loaded) > 0 and saved == written
