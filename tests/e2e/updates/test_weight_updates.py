"""Weights that change while the server runs: nothing computed with the old ones is served after.

A plain server goes through the same calls. Its device hits under the new weights are the reference,
and its answers to the calls are what SGLang says of them.

By default not every way of an update meets each of what it may do; the long form has all, and one
more kind of server that shares a folder.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.requests import flush_device
from testkit.server import TINYLM, Server
from tests.e2e.updates import weight_models
from tests.e2e.updates.weight_ways import IPC_ENVIRONMENT, LORA, UNPINNED, WAYS, call, from_disk

pytestmark = pytest.mark.e2e

COMMON = ["--max-total-tokens", "16384", "--page-size", "64"]
NUM_NEW_TOKENS = 3
QUIET = [list(range(100 + 7 * n, 100 + 7 * n + 200 + 64 * n)) for n in range(3)]
BURST = [[(n * 997 + 13 * i) % 4000 + 90 for i in range(330)] for n in range(4)]
Answer = tuple[list[int], list[Any]]


@dataclass
class Reply:
    """One answer: what must be equal, and where its prefix came from."""

    answer: Answer
    cached: int
    below: int  # tokens from DRAM or disk


def hier_args(folder: Path, *more: str) -> list[str]:
    return [
        "--enable-hier-kv", "--hier-kv-host-size", "0.05", "--hier-kv-disk-dir", str(folder),
        "--hier-kv-disk-size", "0.5", "--hier-kv-event-log", str(folder) + ".events",
        "--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000", *more,
    ]  # fmt: skip


def ask(server: Server, prompt: list[int], **fields: Any) -> Reply:
    reply = server.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )
    meta = reply["meta_info"]
    details = (meta.get("cached_tokens_details") or {}).get("hier_kv") or {}
    below = details.get("host", 0) + details.get("disk", 0)
    answer = (reply["output_ids"], [entry[:2] for entry in meta["output_token_logprobs"]])
    return Reply(answer, meta["cached_tokens"], below)


def device_hits(server: Server, prompts: list[list[int]] = QUIET, **fields: Any) -> list[Answer]:
    """Answers to repeats, one at a time, of prompts that are on the device."""
    answers = []
    for prompt in prompts:
        ask(server, prompt, **fields)
        again = ask(server, prompt, **fields)
        assert again.cached >= len(prompt) // 64 * 64 - 64
        answers.append(again.answer)
    return answers


def tier_hits(server: Server, prompts: list[list[int]] = QUIET, **fields: Any) -> list[Answer]:
    """Answers from DRAM or disk: the device is flushed before each."""
    answers = []
    for prompt in prompts:
        flush_device(server)
        reply = ask(server, prompt, **fields)
        assert reply.below == reply.cached == (len(prompt) - 1) // 64 * 64, reply
        answers.append(reply.answer)
    return answers


def namespace_of(server: Server) -> str:
    """The namespace that the server opened last."""
    return server.log().rpartition("namespace ")[2].split()[0]


# ---- servers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[Server, Server]]:
    """The server with the plugin and a plain one, under the same weights at all times."""
    hier = Server(
        [*COMMON, *hier_args(folder / "tiers"), "--sleep-on-idle"],
        log_path=folder / "hier.log",
        env=IPC_ENVIRONMENT,
        stop="kill",
    )
    plain = Server(
        [*COMMON, "--sleep-on-idle"],
        log_path=folder / "plain.log",
        env=IPC_ENVIRONMENT,
        stop="kill",
    )
    try:
        hier.start()
        plain.start()
        yield hier.wait_ready(), plain.wait_ready()
    finally:
        hier.kill()
        plain.kill()


_seeds = itertools.count(1)


def new_model(folder: Path) -> Path:
    seed = next(_seeds)
    return weight_models.variant(folder / f"model-{seed}", weight_models.noisy(seed))


def back_to_first(servers: tuple[Server, Server]) -> None:
    """Both servers get the bundled model's weights, and an empty device."""
    for server in servers:
        assert all(ok for ok, _ in from_disk(server, TINYLM, True))


# ---- one model after another -------------------------------------------------------------------


# IPC is among the ways of `test_weight_traffic.py`.
@pytest.mark.sampled("disk", "release-resume")
@pytest.mark.parametrize("way", WAYS)
def test_a_flushing_update_serves_nothing_of_the_old_weights(
    way: str, servers: tuple[Server, Server], folder: Path
) -> None:
    hier, plain = servers
    back_to_first(servers)
    old = device_hits(plain)
    assert device_hits(hier) == old
    model = new_model(folder)

    # A burst right before: its saves are pending when the update comes.
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda prompt: ask(hier, prompt), BURST))
    answers = WAYS[way](hier, model, True)
    assert answers == WAYS[way](plain, model, True)
    assert all(ok for ok, _ in answers)

    for prompt in QUIET + BURST:
        first = ask(hier, prompt)
        assert first.cached == 0, "a page of the old weights was used"
    new = device_hits(plain, QUIET + BURST)
    assert new[: len(QUIET)] != old
    assert tier_hits(hier, QUIET) == new[: len(QUIET)]

    # Back again: the old pages are there, and right.
    answers = WAYS[way](hier, TINYLM, True)
    assert answers == WAYS[way](plain, TINYLM, True)
    assert tier_hits(hier) == old


@pytest.mark.sampled("disk", "distributed")
@pytest.mark.parametrize("way", ["disk", "tensor", "distributed", "ipc"])
def test_an_update_that_keeps_the_device_cache_turns_the_tiers_off_until_a_flush(
    way: str, servers: tuple[Server, Server], folder: Path
) -> None:
    hier, plain = servers
    back_to_first(servers)
    old = device_hits(plain)
    assert device_hits(hier) == old
    model = new_model(folder)
    answers = WAYS[way](hier, model, False)
    assert answers == WAYS[way](plain, model, False)
    assert all(ok for ok, _ in answers)
    grown = [prompt + list(range(500, 700)) for prompt in QUIET]
    for prompt in QUIET + grown:
        # The device still has the old KV: that is what the caller asked for. No tier adds to it,
        # and what is computed on top of it is not kept.
        assert ask(hier, prompt).below == 0
    flush_device(hier)
    flush_device(plain)
    for prompt in grown + QUIET:
        assert ask(hier, prompt).cached == 0 or prompt in QUIET
    hier.post("/hicache/storage-backend/clear")
    flush_device(hier)
    for prompt in QUIET:
        ask(hier, prompt)
    assert tier_hits(hier) == device_hits(plain)


@pytest.mark.sampled("in_place", "abort")
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_an_update_in_a_pause_answers_as_plain_sglang_does(
    mode: str, servers: tuple[Server, Server], folder: Path
) -> None:
    """Requests are in flight, paused; those begun under the old weights are never saved."""
    hier, plain = servers
    back_to_first(servers)
    model = new_model(folder)
    # Long prompts and outputs, so that some are running and some wait.
    prompts = [[(n * 131 + 7 * i) % 4000 + 90 for i in range(500)] for n in range(4)]
    outcome: dict[str, list[tuple[bool, int]]] = {}
    for name, server in (("hier", hier), ("plain", plain)):
        before = num_prefilled(server)
        with ThreadPoolExecutor(4) as pool:
            running = [
                pool.submit(
                    server.generate,
                    input_ids=prompt,
                    sampling_params={"max_new_tokens": 250, "ignore_eos": True},
                )
                for prompt in prompts
            ]
            # Each has begun: one that came behind the change would be one of the new weights alone.
            wait_until(lambda: num_prefilled(server) == before + len(prompts))  # noqa: B023
            outcome[name] = [call(server, "/pause_generation", {"mode": mode})]
            outcome[name] += from_disk(server, model, True)
            outcome[name].append(call(server, "/continue_generation"))
            replies = [request.result(300) for request in running]
        if mode == "abort":
            assert any(r["meta_info"]["finish_reason"]["type"] == "abort" for r in replies)
        else:
            assert all(r["meta_info"]["finish_reason"]["type"] == "length" for r in replies)
    assert outcome["hier"] == outcome["plain"]

    # Whole conversations of the requests that lived through the change: after a flush nothing of
    # them may come from a tier unless it is what the new weights compute.
    flush_device(hier)
    flush_device(plain)
    computed = [ask(plain, prompt) for prompt in prompts]
    hits = device_hits(plain, prompts)
    for prompt, anew, hit in zip(prompts, computed, hits, strict=True):
        first = ask(hier, prompt)
        if mode == "in_place":
            assert first.cached == 0, "KV computed across a change of weights was kept"
        flush_device(hier)
        again = ask(hier, prompt)
        for reply in (first, again):
            # What is computed anew is not always rounded as what goes on from a hit.
            assert reply.answer[0] == (hit if reply.cached else anew.answer)[0]


def test_a_call_that_fails_answers_as_plain_sglang_does_and_changes_nothing(
    servers: tuple[Server, Server],
) -> None:
    """IPC handles of another device, and tensors outside a session."""
    hier, plain = servers
    back_to_first(servers)
    device_hits(hier)
    body = {"zmq_handles": {"GPU-0": "ipc:///nowhere"}}
    answer = call(hier, "/update_weights_from_ipc", body)
    assert answer == call(plain, "/update_weights_from_ipc", body) == (False, 400)
    assert call(hier, "/update_weights_from_tensor", {"serialized_named_tensors": []}) == call(
        plain, "/update_weights_from_tensor", {"serialized_named_tensors": []}
    )  # no session is open
    assert tier_hits(hier) == device_hits(plain)


def test_a_session_that_stays_open_keeps_the_tiers_off(
    servers: tuple[Server, Server], folder: Path
) -> None:
    """Within a session a peer may write weights at any moment, and no call would say so."""
    hier, _ = servers
    back_to_first(servers)
    device_hits(hier)
    flush_device(hier)
    assert call(hier, "/begin_weight_update") == (True, 200)
    flush_device(hier)
    reply = ask(hier, QUIET[0])
    assert reply.cached == 0
    assert call(hier, "/end_weight_update") == (True, 200)
    # What was computed in between lies on the device, so the tiers wait for a flush.
    assert ask(hier, [*QUIET[0], *range(300)]).below == 0
    flush_device(hier)
    tier_hits(hier, QUIET[:1])


def test_one_value_of_one_tensor_is_another_namespace(
    servers: tuple[Server, Server], folder: Path
) -> None:
    hier, _ = servers
    back_to_first(servers)
    ask(hier, QUIET[0])
    first = namespace_of(hier)
    nearly = weight_models.variant(folder / "one-value", weight_models.one_value)
    assert from_disk(hier, nearly, True) == [(True, 200)]
    assert ask(hier, QUIET[0]).cached == 0
    assert namespace_of(hier) != first


# ---- one disk folder, one server after another ---------------------------------------------------


def num_prefilled(server: Server) -> int:
    """Requests whose prompts were begun so far, by SGLang's log; none of them is cut in chunks."""
    return sum(map(int, re.findall(r"Prefill batch, #new-seq: (\d+)", server.log())))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for a state of a server."""
    deadline_s = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def wait_written(server: Server, pages: int) -> None:
    """Waits until at least this many pages are on disk."""
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        state = server.get("/server_info")["internal_states"][0]["hier_kv"]
        if state["host"].get("written_pages", 0) >= pages and not state["host"].get(
            "spill_queue_pages", 0
        ):
            return
        time.sleep(0.05)
    raise AssertionError(f"fewer than {pages} pages were written: {state}")


@pytest.fixture(scope="module")
def shared_disk(folder: Path) -> tuple[Path, list[Answer]]:
    """A disk folder that a bfloat16 server with pages of 64 tokens has filled; its answers."""
    disk = folder / "shared"
    with Server([*COMMON, *hier_args(disk)], log_path=folder / "a.log", stop="kill") as server:
        answers = device_hits(server)
        wait_written(server, sum((len(prompt) - 1) // 64 for prompt in QUIET))
    return disk, answers


@pytest.mark.sampled("model", "float16", "page size")
@pytest.mark.slow
@pytest.mark.parametrize("other", ["model", "float16", "float32", "page size"])
def test_servers_of_other_kinds_share_a_folder_and_nothing_crosses(
    other: str, shared_disk: tuple[Path, list[Answer]], folder: Path
) -> None:
    disk, first_answers = shared_disk
    args, model = [*COMMON, *hier_args(disk)], TINYLM
    if other == "model":
        model = new_model(folder)
    elif other == "page size":
        args[args.index("64")] = "32"
    else:
        args += ["--dtype", other]
    log = folder / f"{other.replace(' ', '-')}.log"
    with Server(args, model=model, log_path=log, stop="kill") as server:
        for prompt in QUIET:
            assert ask(server, prompt).cached == 0, "a page of another kind of server was used"
        answers = device_hits(server)
        for prompt, expected in zip(QUIET, answers, strict=True):
            flush_device(server)
            reply = ask(server, prompt)
            assert reply.below == reply.cached > 0
            assert reply.answer == expected
    if other == "model":
        assert answers != first_answers


@pytest.mark.slow
def test_the_first_kind_of_server_finds_its_pages_again(
    shared_disk: tuple[Path, list[Answer]], folder: Path
) -> None:
    disk, answers = shared_disk
    with Server([*COMMON, *hier_args(disk)], log_path=folder / "again.log", stop="kill") as server:
        assert tier_hits(server) == answers


# ---- adapters --------------------------------------------------------------------------------


def lora_server(args: list[str], log_path: Path) -> Server:
    return Server(args, log_path=log_path, env=UNPINNED, stop="kill")


@pytest.mark.slow
def test_two_adapters_at_one_path(folder: Path) -> None:
    """Reloaded from the same path with other weights, at run time and across a restart."""
    disk, path = folder / "lora-tiers", folder / "adapter"
    weight_models.adapter(path, 1)
    args = [*COMMON, *LORA, *hier_args(disk), "--lora-paths", f"tone={path}"]
    pages = sum((len(prompt) - 1) // 64 for prompt in QUIET)

    with lora_server(args, folder / "lora-1.log") as server:
        base = device_hits(server)
        first = device_hits(server, lora_path="tone")
        assert first != base
        assert tier_hits(server, lora_path="tone") == first
        assert tier_hits(server) == base
        # The same name and path, other weights, without a restart.
        assert call(server, "/unload_lora_adapter", {"lora_name": "tone"})[0]
        weight_models.adapter(path, 2)
        assert call(server, "/load_lora_adapter", {"lora_name": "tone", "lora_path": str(path)})[0]
        flush_device(server)
        for prompt in QUIET:
            assert ask(server, prompt, lora_path="tone").cached == 0
        second = device_hits(server, lora_path="tone")
        assert second != first
        assert tier_hits(server, lora_path="tone") == second
        assert tier_hits(server) == base
        wait_written(server, 3 * pages)

    # SGLang gives an adapter of --lora-paths the same id again: only the weights' digest differs.
    with lora_server(args, folder / "lora-2.log") as server:
        assert tier_hits(server) == base
        for prompt in QUIET:
            assert ask(server, prompt, lora_path="tone").below == 0
        assert device_hits(server, lora_path="tone") == second
        assert tier_hits(server, lora_path="tone") == second

    weight_models.adapter(path, 1)
    with lora_server(args, folder / "lora-3.log") as server:
        assert tier_hits(server, lora_path="tone") == first
        assert tier_hits(server) == base
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4
