"""Pipeline stages on the real server: two, and two of two tensor parallel ranks on two nodes.

Page stores are late, each by its own chance, and the two stages have other numbers of layers, so
that the same DRAM holds more pages of one. What is restored is compared bit for bit with plain
SGLang's own device hits with the same flags. SGLang's rank consensus checker is on: it ends the
server when ranks decide differently.

By default stages of two ranks each; the long form has stages of one, too.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.rank_requests import (
    ENVIRONMENT,
    JITTER_MS,
    Answer,
    Served,
    answer_of,
    make_requests,
    send_in_halves,
)
from testkit.server import Server, ServerError
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    NUM_TOKENS,
    PAGE,
    ask,
    by_tier,
    check_agreed,
    host_gb,
    real_prompts,
)
from tests.e2e.nodes import Nodes
from tests.e2e.ranks.untied_model import write_untied_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.sampled("tp-pp")]

NUM_REQUESTS, HOST_PAGES = {"pp": 40, "tp-pp": 25}, 60
LENGTHS = (128, 200, 384)
PATIENCE_S = 300.0
RANKS = {"pp": ["--pp-size", "2"], "tp-pp": ["--tp-size", "2", "--pp-size", "2"]}
# A chunk of a prompt is on its way through the stages when the next one is begun.
BASE = ["--page-size", str(PAGE), "--max-total-tokens", "1280", "--chunked-prefill-size", "128"]
ENV = {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1", "SGLANG_PP_LAYER_PARTITION": "5,3"}


@dataclass(frozen=True)
class Setup:
    """A model on disk, and the ranks of its servers."""

    way: str
    model: Path
    folder: Path

    @contextmanager
    def plain(self) -> Iterator[Server]:
        args = [*BASE, *RANKS[self.way]]
        log = self.folder / "plain.log"
        with Server(
            args, model=self.model, log_path=log, env=ENV, stop="kill", start_timeout_s=PATIENCE_S
        ) as server:
            yield server

    @contextmanager
    def hier(self) -> Iterator[list[Server]]:
        """The nodes of a server; requests go to the first one."""
        env = {**ENV, ENV_JITTER: str(JITTER_MS)}
        args = [*BASE, "--enable-hier-kv", "--enable-metrics", "--hier-kv-host-size"]
        args += [host_gb(HOST_PAGES), "--hier-kv-disk-size", "1"]
        args += ["--hier-kv-disk-segment-size", "0.03", "--hier-kv-prefetch-policy"]
        args += ["wait_complete", "--hier-kv-event-log", str(self.folder / "events.jsonl")]
        if self.way == "tp-pp":
            ranks = RANKS[self.way]
            with Nodes(args, self.folder, env=env, ranks=ranks, model=self.model) as nodes:
                yield nodes.nodes
            return
        args += [*RANKS[self.way], "--hier-kv-disk-dir", str(self.folder / "disk0")]
        log = self.folder / "node0.log"
        with Server(
            args, model=self.model, log_path=log, env=env, stop="kill", start_timeout_s=PATIENCE_S
        ) as server:
            yield [server]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def pages(self, event: str) -> dict[str, list[str]]:
        """Pages that something happened to on each rank, in this order."""
        found: dict[str, list[str]] = {}
        for path in self.folder.glob("events-*.jsonl"):
            rank = found.setdefault(path.stem.removeprefix("events-"), [])
            for line in path.read_text().splitlines(keepends=True):
                if f'"e": "{event}"' in line and line.endswith("\n"):  # as a whole
                    rank += json.loads(line)["pages"]
        return found

    def is_written(self) -> bool:
        """Whether each rank has on disk what it has saved, and has saved something."""
        saved, written = self.pages("saved"), self.pages("written")
        return all(saved.values()) and all(
            set(pages) <= set(written[rank]) for rank, pages in saved.items()
        )


@dataclass(frozen=True)
class Run:
    """What plain SGLang answered, and a server of two stages until one rank was killed."""

    setup: Setup
    prompts: list[list[int]]
    computed: list[Answer]
    on_device: list[dict[str, Any]]
    mixed: list[Served]
    from_host: list[dict[str, Any]]
    while_stopped: dict[str, Any]
    loaded: dict[str, list[str]]
    capacities: dict[str, float]
    log: str


@pytest.fixture(scope="module", params=list(RANKS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    setup = Setup(request.param, write_untied_model(folder / "model"), folder)
    prompts = list(real_prompts(LENGTHS, seed=3))
    with setup.plain() as server:
        computed = [answer_of(ask(server, prompt)) for prompt in prompts]
        on_device = [ask(server, prompt) for prompt in prompts]
    with setup.hier() as nodes:
        server = nodes[0]
        mixed = send_in_halves(
            server, make_requests(NUM_REQUESTS[setup.way], seed=1), "mixed", NUM_TOKENS
        )
        _flush(server)
        _await(setup.is_written, "pages are not written")  # or the next might find no room
        for prompt in prompts:
            ask(server, prompt)
        _flush(server)  # waits for the saves of each rank
        from_host = [ask(server, prompt) for prompt in prompts]
        while_stopped = _while_a_rank_stands_still(nodes, prompts[-1])
        _await(lambda: _are_equal(setup.pages("loaded")), "ranks load other pages")
        loaded = setup.pages("loaded")
        capacities = _capacities(nodes)
        _await(setup.is_written, "pages are not written")
        _kill_a_rank(nodes)
    return Run(
        setup, prompts, computed, on_device, mixed, from_host, while_stopped, loaded, capacities,
        setup.log(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def restarted(run: Run) -> list[dict[str, Any]]:
    """Answers of a server on what the one before left on disk when it was killed."""
    with run.setup.hier() as nodes:
        return [ask(nodes[0], prompt) for prompt in run.prompts]


def test_every_request_is_answered_and_prefixes_are_reused(run: Run) -> None:
    reused: dict[str, int] = {}
    for one in run.mixed:
        for tier, tokens in one.by_tier.items():
            reused[tier] = reused.get(tier, 0) + tokens
    print(reused, run.capacities)
    assert sum(one.answer is not None for one in run.mixed) > 0.7 * len(run.mixed)
    assert sum(reused.values()) > 20 * len(run.mixed), reused
    assert reused["host"] + reused["disk"] > 0, reused  # how much depends on how late saves are
    num_ranks = len(run.loaded)
    assert num_ranks == {"pp": 2, "tp-pp": 4}[run.setup.way]
    check_agreed(run.log, 2 * num_ranks)  # a plain server's, too


def test_what_stages_loaded_answers_as_what_the_device_held(run: Run) -> None:
    for on_device, from_host in zip(run.on_device, run.from_host, strict=True):
        tiers = by_tier(from_host)
        assert on_device["meta_info"]["cached_tokens"] == tiers["host"] + tiers["disk"] > 0
        assert answer_of(on_device) == answer_of(from_host)
    num_pages = sum(by_tier(one)["host"] for one in run.from_host) // PAGE
    assert num_pages > 0
    assert all(len(pages) >= num_pages for pages in run.loaded.values())


def test_a_rank_that_stands_still_holds_up_an_answer_and_changes_none(run: Run) -> None:
    assert answer_of(run.while_stopped) == answer_of(run.on_device[-1])


def test_each_rank_keeps_the_layers_of_its_stage(run: Run) -> None:
    """Of five layers fewer pages have room than of three."""
    first = [pages for rank, pages in run.capacities.items() if rank.startswith("0")]
    second = [pages for rank, pages in run.capacities.items() if rank.startswith("1")]
    assert max(first) < min(second)
    folders = sorted(path.name for path in run.setup.folder.glob("disk*/dp0-*"))
    num_heads = {"pp": 1, "tp-pp": 2}[run.setup.way]
    assert folders == sorted(
        f"dp0-tp{tp}-of-{num_heads}-pp{stage}-of-2" for stage in range(2) for tp in range(num_heads)
    )
    namespaces = {path.parent.name for path in run.setup.folder.glob("disk*/dp0-*/*/seg-*.hkv")}
    assert len(namespaces) == len(folders)


def test_what_is_on_disk_after_a_rank_was_killed_answers_as_what_the_device_held(
    run: Run, restarted: list[dict[str, Any]]
) -> None:
    for on_device, from_disk in zip(run.on_device, restarted, strict=True):
        assert on_device["meta_info"]["cached_tokens"] == by_tier(from_disk)["disk"] > 0
        assert answer_of(on_device) == answer_of(from_disk)


def test_what_one_rank_alone_has_lost_is_computed(
    run: Run, restarted: list[dict[str, Any]]
) -> None:
    if run.setup.way == "tp-pp":
        pytest.skip("as with one rank a stage")
    shutil.rmtree(run.setup.folder / "disk0" / "dp0-tp0-of-1-pp1-of-2")
    with run.setup.hier() as nodes:
        found = [ask(nodes[0], prompt) for prompt in run.prompts]
    assert [one["meta_info"]["cached_tokens"] for one in found] == [0] * len(found)
    assert [answer_of(one) for one in found] == run.computed
    assert "Found rank divergence" not in run.setup.log()


def _flush(server: Server) -> None:
    """Flushes the device, once the batch of the last answer has left all stages.

    SGLang refuses it before that, and an answer is sent a step or two earlier.
    """
    server.post(f"/flush_cache?timeout={PATIENCE_S}")


def _while_a_rank_stands_still(nodes: list[Server], prompt: list[int]) -> dict[str, Any]:
    """The answer to a request that came while a rank of the second stage was stopped."""
    _flush(nodes[0])
    rank, answers = _second_stage(nodes)[-1], []
    rank.send_signal(signal.SIGSTOP)
    asking = threading.Thread(target=lambda: answers.append(ask(nodes[0], prompt)))
    asking.start()
    asking.join(0.5)  # long enough for the first stage to come to it, or to be stopped before
    rank.send_signal(signal.SIGCONT)
    asking.join(PATIENCE_S)
    return answers[0]


def _kill_a_rank(nodes: list[Server]) -> None:
    """Kills one of the second stage under requests: the server ends, and answers none of them."""
    prompts = list(real_prompts([380] * 4, seed=7))
    ended: list[bool] = []

    def send(prompt: list[int]) -> None:
        try:
            sampling = {"max_new_tokens": 512, "ignore_eos": True}
            nodes[0].generate(input_ids=prompt, sampling_params=sampling)
            ended.append(True)
        except (ServerError, OSError):
            ended.append(False)

    threads = [threading.Thread(target=send, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    _second_stage(nodes)[-1].kill()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ended == [False] * len(prompts)
    _await(lambda: not any(node.alive() for node in nodes), "nodes outlive a rank")


def _second_stage(nodes: list[Server]) -> list[psutil.Process]:
    """Its schedulers."""
    tree = [process for node in nodes for process in node.tree()]
    found = [one for one in tree if "sglang::scheduler_PP1" in " ".join(one.cmdline())]
    assert found
    return found


def _are_equal(pages: dict[str, list[str]]) -> bool:
    """Whether all ranks did the same in the same order."""
    first, *others = pages.values()
    return len(first) > 0 and all(other == first for other in others)


def _capacities(nodes: list[Server]) -> dict[str, float]:
    """Pages that DRAM has room for, by stage and rank."""
    found: dict[str, float] = {}
    for node in nodes:
        for metric in text_string_to_metric_families(node.get("/metrics")):
            for sample in metric.samples:
                labels = sample.labels
                if labels.get("of") == "host_capacity_pages":
                    found[f"{labels['pp_rank']}-{labels['tp_rank']}"] = sample.value
    return found


def _await(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.1)
