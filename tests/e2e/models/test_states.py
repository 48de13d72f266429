"""A model with state-space layers on the real server.

What is restored is compared with plain SGLang's own device hits bit for bit, and every answer, with
many requests at once, with what transformers computes for the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.state_model import write_state_model
from testkit.server import Server
from tests.e2e.hier_server import (
    GIB,
    ask,
    by_tier,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
CHUNK = 256
SLOT_BYTES = 69_632  # a page of two layers of the state model, with its header
NUM_PARTS = 3  # of a state: of the state-space layers, a convolution's inputs and a matrix a head
TURNS = 4
LENGTHS = [40, 130, 200, 333, 700, 1000, 1290]
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", "--dtype", "float32"]
BASE += ["--chunked-prefill-size", str(CHUNK), "--max-running-requests", "6"]
ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# How far rounding takes a log-probability in float32; another state takes it to 1 and more.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_state_model(tmp_path_factory.mktemp("states") / "model")


@pytest.fixture(scope="module")
def chats() -> list[list[list[int]]]:
    """What is said in each turn of three chats, which begin alike."""
    (shared,) = real_prompts([5 * PAGE + 20], seed=5)
    texts = list(real_prompts([150] * 3 * TURNS, seed=6))
    turns = [texts[chat * TURNS : (chat + 1) * TURNS] for chat in range(3)]
    return [[[*shared, *first], *others] for first, *others in turns]


def server_of(
    model: Path, folder: Path, *, pool: int, num_states: int = 100, host_pages: int = 0
) -> Server:
    """A server with DRAM for that many pages, and a disk; a plain one for none.

    Args:
        model: the model's folder.
        folder: for the log and the disk.
        pool: tokens that the full layers have room for.
        num_states: states that there is room for on the device.
        host_pages: pages, or parts of states, in DRAM.
    """
    args = [*BASE, "--max-total-tokens", str(pool), "--max-mamba-cache-size", str(num_states)]
    if host_pages:
        args += ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
        args += ["--hier-kv-host-size", f"{(host_pages + 0.5) * SLOT_BYTES / GIB:.9f}"]
        args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
        args += ["--hier-kv-disk-segment-size", "0.01", "--hier-kv-prefetch-timeout-ms", "20000"]
    return Server(
        args, model=model, log_path=folder / "server.log", stop="kill", start_timeout_s=300, env=ENV
    )


def answers(server: Server, prompts: Sequence[Sequence[int]], num: int = 12) -> list[Any]:
    return [ask(server, prompt, num) for prompt in prompts]


def values(found: Sequence[Any]) -> list[Any]:
    return [tokens_and_logprobs(answer) for answer in found]


def cached(found: Sequence[Any]) -> list[int]:
    return [int(answer["meta_info"]["cached_tokens"]) for answer in found]


class Transformers:
    """The same weights without SGLang."""

    def __init__(self, model: Path) -> None:
        from transformers import GraniteMoeHybridForCausalLM

        self._model = GraniteMoeHybridForCausalLM.from_pretrained(model, dtype=torch.float32)
        torch.set_num_threads(1)  # several spin at their barriers where others want the cores

    def furthest(self, prompt: Sequence[int], answer: Any) -> float:
        """The largest difference of an answer's log-probabilities."""
        tokens, found = tokens_and_logprobs(answer)
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert rows.argmax(-1).tolist() == tokens
        wanted = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        return float((wanted - torch.tensor(found)).abs().max())


@pytest.fixture(scope="module")
def by_transformers(model: Path) -> Transformers:
    return Transformers(model)


@pytest.fixture(scope="module")
def plain(
    model: Path, chats: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Plain SGLang's answers, with pools that hold everything."""
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(model, tmp_path_factory.mktemp("plain"), pool=32768) as server:
        first, repeat = answers(server, prompts), answers(server, prompts)
        talks = talk(server, chats, after_turn=lambda: None)
    return {"prompts": prompts, "first": first, "repeat": repeat, "talks": talks}


def talk(server: Server, chats: list[list[list[int]]], after_turn: Callable[[], None]) -> list[Any]:
    """A turn of each chat at a time; a prompt is what was said before, and more."""
    told: list[list[int]] = [[] for _ in chats]
    out = []
    for turn in range(TURNS):
        for chat, texts in enumerate(chats):
            told[chat] += texts[turn]
            answer = ask(server, told[chat], 30)
            told[chat] += answer["output_ids"]
            out.append(answer)
        after_turn()
    return out


def test_the_engine_computes_states_as_transformers_does(
    plain: dict[str, Any], by_transformers: Transformers
) -> None:
    assert cached(plain["first"]) == [0] * len(LENGTHS)
    assert cached(plain["repeat"]) == [length // PAGE * PAGE for length in LENGTHS]
    for kind in ("first", "repeat"):
        for prompt, answer in zip(plain["prompts"], plain[kind], strict=True):
            assert by_transformers.furthest(prompt, answer) < TOLERANCE


def test_a_hit_is_what_the_device_would_have_given_from_every_tier(
    model: Path, chats: list[list[list[int]]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """From DRAM, from disk, and in a server started on the disk that another one left."""
    prompts = plain["prompts"]
    with server_of(model, tmp_path, pool=8192, host_pages=400) as server:
        assert values(answers(server, prompts)) == values(plain["first"])
        settled(server)
        server.post("/flush_cache")
        check_hits(answers(server, prompts), plain["repeat"], "host")
        found = settled(server)["host"]
        # A state where each chunk ends and at the last page; an answer reaches no further one.
        states = sum(-(-(n // PAGE) // (CHUNK // PAGE)) for n in LENGTHS)
        assert found["saved_states"] == states
        assert found["saved_pages"] == sum(n // PAGE for n in LENGTHS) + NUM_PARTS * states
    # Another one, after a kill -9, with a fifth of the room.
    with server_of(model, tmp_path, pool=8192, host_pages=80) as server:
        check_hits(answers(server, prompts), plain["repeat"], "disk")
        talks = talk(server, chats, after_turn=lambda: drop_device(server))
    ours, theirs = sum(cached(talks)), sum(cached(plain["talks"]))
    print(f"chats: {ours} of {theirs} tokens that the device would have reused")
    assert ours >= 0.95 * theirs
    same = [a == b for a, b in zip(cached(talks), cached(plain["talks"]), strict=True)]
    for a, b, is_same in zip(talks, plain["talks"], same, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert not is_same or tokens_and_logprobs(a) == tokens_and_logprobs(b)


def drop_device(server: Server) -> None:
    settled(server)
    server.post("/flush_cache")


def check_hits(found: list[Any], wanted: list[Any], tier: str) -> None:
    assert cached(found) == cached(wanted)
    from_tier = [by_tier(answer).get(tier, 0) for answer in found]
    assert sum(from_tier) > 0.9 * sum(cached(found)), (tier, from_tier)
    assert values(found) == values(wanted)


def test_with_many_at_once_and_too_little_room_every_answer_is_right(
    model: Path, by_transformers: Transformers, tmp_path: Path
) -> None:
    """Branches anywhere, evictions of both pools and all tiers, and what is restored in between."""
    rng = random.Random(9)
    trunks = list(real_prompts([700] * 6, seed=8))
    prompts = []
    for _ in range(40):
        head = rng.choice(trunks)[: rng.randint(30, 700)]
        prompts.append([*head, *rng.choice(trunks)[: rng.randint(1, 150)]])
    # Few states more than six requests take: those that wait to be saved are soon needed.
    with server_of(model, tmp_path, pool=3072, num_states=32, host_pages=150) as server:

        def send(prompt: list[int]) -> Any:
            return ask(server, prompt, rng.choice((1, 5, 5, 70)))

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(send, [*prompts, *prompts]))
        counted = state(server)["host"]
    for prompt, answer in zip([*prompts, *prompts], found, strict=True):
        assert by_transformers.furthest(prompt, answer) < TOLERANCE
    from_tiers = sum(by_tier(a).get("host", 0) + by_tier(a).get("disk", 0) for a in found)
    print(f"{from_tiers} tokens from the tiers; {counted}")
    assert from_tiers > 20 * PAGE, (from_tiers, counted)
    assert counted.get("load_failures", 0) == counted.get("save_failures", 0) == 0
