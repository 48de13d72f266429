"""Pipeline stages of latent rows, with states, four of them, with a store, and with coded pages.

Page stores are late, each by its own chance. What is restored is compared bit for bit with plain
SGLang's own device hits with the same flags, and so is what is computed where one stage alone has
lost its pages. SGLang's rank consensus checker is on.

By default latent rows with a remote store, four stages, and states; the long form has all `WAYS`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.drafts.nextn import PLAIN, rows_of, write_nextn_model
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS, answer_of
from testkit.requests import by_tier
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, PAGE, SLOT_BYTES, ask, real_prompts
from tests.e2e.models.hybrid_answers import branching_prompts
from tests.e2e.ranks.untied_model import write_untied_model
from tests.e2e.remote.test_remote import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.sampled("latent-remote", "four", "states"),
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
        page_bytes: of all stages, without a header.
        tier: below DRAM: `disk`, or `remote` in its place.
        args: of its servers with the plugin.
        attention: SGLang's backend.
        model_args: of its servers with the plugin and without.
        env: of these.
        lengths: of prompts. Behind one of whole pages SGLang has no state for the same prompt.
    """

    write: Callable[[Path], Path]
    layers: tuple[int, ...]
    page_bytes: int
    tier: str = "disk"
    args: list[str] = field(default_factory=list)
    attention: str = "torch_native"
    model_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.layers)


_LATENT = Way(
    partial(write_nextn_model, kind=PLAIN), (4, 2), LATENT * PAGE,
    attention="cpu_extend",
)  # fmt: skip


def _with_states(name: str, layers: tuple[int, ...], **others: Any) -> Way:
    """Each stage has layers with a state and with attention."""
    model = STATE_MODELS[name]
    return Way(
        partial(write_state_model, name=name), layers, model.page_bytes,
        attention="cpu_extend", env={"SGLANG_MAMBA_CONV_DTYPE": model.dtype_name},
        model_args=("--dtype", model.dtype_name, "--max-mamba-cache-size", "60"),
        lengths=LENGTHS[1:], **others,
    )  # fmt: skip


_MHA = Way(write_untied_model, (5, 3), SLOT_BYTES - HEADER_BYTES)
WAYS = {
    "latent": _LATENT,
    "coded": replace(_MHA, args=["--hier-kv-codec", "lossless"]),
    "four": Way(write_untied_model, (3, 2, 2, 1), SLOT_BYTES - HEADER_BYTES),
    "remote": replace(_MHA, tier="remote"),
    "latent-remote": replace(_LATENT, tier="remote"),
    # Stages with other numbers of states, whose states take other numbers of parts.
    "states": _with_states("nemotron_h", (5, 5)),
    "states-coded": _with_states("nemotron_h", (5, 5), args=["--hier-kv-codec", "lossless"]),
    "states-remote": _with_states("nemotron_h", (5, 5), tier="remote"),
}


@dataclass(frozen=True)
class Setup:
    """A model on disk, and where its servers keep pages."""

    way: Way
    model: Path
    folder: Path

    def server(self, *, host_pages: int = 0, pool: int = 4096) -> Server:
        """A server with DRAM for so many pages of the largest stage; a plain one for none."""
        way = self.way
        args = [*BASE, "--pp-size", str(way.num_stages), "--attention-backend", way.attention]
        args += ["--max-total-tokens", str(pool), *way.model_args]
        layers = ",".join(map(str, way.layers))
        cores = "|".join(str(stage % 2) for stage in range(way.num_stages))
        env = {**ENVIRONMENT, **way.env, "SGLANG_PP_LAYER_PARTITION": layers}
        env["SGLANG_CPU_OMP_THREADS_BIND"] = cores
        if host_pages:
            largest = way.page_bytes * max(way.layers) // sum(way.layers) + HEADER_BYTES
            host_gib = way.num_stages * (host_pages + 0.5) * largest / GIB
            args += ["--enable-hier-kv", "--enable-metrics"]
            args += ["--hier-kv-host-size", f"{host_gib:.9f}"]
            args += ["--hier-kv-prefetch-policy", "wait_complete"]
            args += ["--hier-kv-write-policy", "write_through"]
            args += [*way.args, *self._tier()]
            env[ENV_JITTER] = str(JITTER_MS)
        log = self.folder / "server.log"
        return Server(
            args, model=self.model, log_path=log, env=env, stop="kill", start_timeout_s=PATIENCE_S
        )

    def _tier(self) -> list[str]:
        if self.way.tier == "disk":
            disk = ["--hier-kv-disk-dir", str(self.folder / "disk"), "--hier-kv-disk-size", "1"]
            return [*disk, "--hier-kv-disk-segment-size", "0.01"]
        self.shared.mkdir(exist_ok=True)
        return ["--hier-kv-remote-url", f"file://{self.shared}?size=1GB"]

    @property
    def shared(self) -> Path:
        """The folder of the remote store."""
        return self.folder / "shared"


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
    with setup.server() as server:
        computed = [ask(server, prompt) for prompt in prompts]
        on_device = [ask(server, prompt) for prompt in prompts]
    with setup.server(host_pages=200) as server:
        eventually(partial(is_connected, server, way))
        for prompt in prompts:
            ask(server, prompt)
        flush(server)  # waits for the saves of each rank
        from_host = [ask(server, prompt) for prompt in prompts]
        eventually(partial(is_kept, server, way))
    return Run(setup, prompts, computed, on_device, from_host)


@pytest.fixture(scope="module")
def restarted(run: Run) -> Iterator[Server]:
    """With little room, on what the one before left when it was killed."""
    with run.setup.server(host_pages=30, pool=1536) as server:
        eventually(partial(is_connected, server, run.setup.way))
        yield server


def test_a_hit_from_dram_is_what_the_device_would_have_given(run: Run) -> None:
    check_hits(run, run.from_host, "host")


def test_a_hit_from_below_after_a_kill_is_what_the_device_would_have_given(
    run: Run, restarted: Server
) -> None:
    way = run.setup.way
    check_hits(run, [ask(restarted, prompt) for prompt in run.prompts], way.tier)
    if "--hier-kv-codec" in way.args:
        eventually(lambda: len(values_of(restarted, "disk_codec_pages_decoded")) == way.num_stages)


@pytest.mark.sampled("latent-remote")
def test_with_many_at_once_and_too_little_room_stages_agree(run: Run, restarted: Server) -> None:
    """What they have kept of it all answers as a device hit of the same length."""
    rng = random.Random(4)
    prompts = branching_prompts(rng, 3, 12)
    prompts = [prompt[:900] for prompt in prompts + prompts]
    with ThreadPoolExecutor(6) as pool:
        mixed = list(pool.map(partial(ask, restarted), prompts))
    assert all(len(answer["output_ids"]) for answer in mixed)
    flush(restarted)
    again = [ask(restarted, prompt) for prompt in run.prompts]
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


@pytest.mark.sampled("latent-remote")
def test_what_one_stage_alone_has_lost_is_computed(run: Run, restarted: Server) -> None:
    restarted.kill()
    setup = run.setup
    if setup.way.tier == "disk":
        last = setup.way.num_stages - 1
        shutil.rmtree(setup.folder / "disk" / f"dp0-tp0-of-1-pp{last}-of-{last + 1}")
    else:
        lose_a_stage(setup.shared, setup.way.num_stages)
    with setup.server(host_pages=200) as server:
        eventually(partial(is_connected, server, setup.way))
        found = [ask(server, prompt) for prompt in run.prompts]
        assert "Found rank divergence" not in server.log()
    assert [one["meta_info"]["cached_tokens"] for one in found] == [0] * len(found)
    assert [answer_of(one) for one in found] == [answer_of(one) for one in run.computed]


def lose_a_stage(shared: Path, num_stages: int) -> None:
    """Removes what one of the stages has put into a store: each has a namespace of its own."""
    namespaces = sorted(shared.glob("hkv-*/*"))
    assert len(namespaces) == num_stages, namespaces
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


def values_of(server: Server, value: str) -> list[float]:
    """A value of the plugin's, of each stage that has published it."""
    found: dict[str, float] = {}
    for metric in text_string_to_metric_families(server.get("/metrics")):
        for sample in metric.samples:
            if value in (sample.labels.get("of"), sample.labels.get("event")):
                found[sample.labels["pp_rank"]] = sample.value
    return list(found.values())


def is_connected(server: Server, way: Way) -> bool:
    """Whether each stage has found the remote store, if it has one."""
    if way.tier == "disk":
        return True
    return values_of(server, "remote_breaker_state") == [0.0] * way.num_stages


def is_kept(server: Server, way: Way) -> bool:
    """Whether each stage has below DRAM what it has saved."""
    saved = values_of(server, "saved_pages")
    written = values_of(server, "remote_written_pages" if way.tier == "remote" else "written_pages")
    return len(saved) == way.num_stages and saved == written and min(saved) > 0
