"""Models with a state a sequence on the real server.

What is restored is compared with plain SGLang's own device hits bit for bit, and every answer, with
many requests at once, with what transformers computes for the same tokens, or the testkit where
transformers has no such model.

By default Granite 4 and Nemotron-H (Mamba2) and Qwen3-Next (gated delta rule) run, and one is asked
for by many at once; the long form has all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.state_model import STATE_MODELS, StateModel, write_state_model
from testkit.server import Server
from tests.e2e.hier_server import (
    GIB,
    by_tier,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.models.hybrid_answers import (
    Computed,
    answers,
    answers_at_once,
    branching_prompts,
    cached,
    check_hits,
    drop_device,
    longest_first,
    talk,
    two_chats,
    values,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.newest_release,
    pytest.mark.sampled("granite", "nemotron_h", "qwen3_next"),
]

PAGE = 64
CHUNK = 256
HEADER_BYTES = 4096  # of a slot, its tail included
HOST_PAGES = 400
ANSWER = 10  # tokens, in a chat
LENGTHS = [40, 130, 333, 702, 1290]
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", str(CHUNK), "--max-running-requests", "6"]
# How far rounding takes a log-probability. A state of which one layer is wrong takes it further in
# float32; in bfloat16 it need not, and the tests that compare bits have to see it.
TOLERANCES = {"float32": 5e-4, "bfloat16": 0.25}


@dataclass(frozen=True)
class Case:
    """A model and where it lies."""

    kind: StateModel
    folder: Path

    @property
    def slot_bytes(self) -> int:
        """A page in DRAM or on disk."""
        return self.kind.page_bytes + HEADER_BYTES

    @property
    def num_parts(self) -> int:
        """Slots that a state takes."""
        return -(-self.kind.state_bytes // self.kind.page_bytes)


@pytest.fixture(scope="module", params=list(STATE_MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    return Case(STATE_MODELS[request.param], write_state_model(folder / "model", request.param))


@pytest.fixture(scope="module")
def chats() -> list[list[list[int]]]:
    """What is said in each turn of two chats, which begin alike."""
    return two_chats(5 * PAGE + 20, 170)  # the first answers fill a page


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return list(real_prompts(LENGTHS, seed=3))


def server_of(
    case: Case, folder: Path, *more: str, pool: int, num_states: int = 100, host_pages: int = 0
) -> Server:
    """A server with DRAM for that many pages, and a disk; a plain one for none.

    Args:
        case: the model.
        folder: for the log and the disk.
        more: of its arguments.
        pool: tokens that the full layers have room for.
        num_states: states that there is room for on the device.
        host_pages: pages, or parts of states, in DRAM.
    """
    dtype = case.kind.dtype_name
    args = [*BASE, *case.kind.server_args, "--dtype", dtype, "--max-total-tokens", str(pool)]
    args += ["--max-mamba-cache-size", str(num_states), *more]
    if host_pages:
        args += ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
        args += ["--hier-kv-host-size", f"{(host_pages + 0.5) * case.slot_bytes / GIB:.9f}"]
        args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
        args += ["--hier-kv-disk-segment-size", "0.01", "--hier-kv-prefetch-timeout-ms", "60000"]
    return Server(
        args,
        model=case.folder,
        log_path=folder / "server.log",
        stop="kill",
        start_timeout_s=300,
        env={"SGLANG_MAMBA_CONV_DTYPE": dtype},
    )


class Transformers:
    """The same weights without SGLang."""

    def __init__(self, case: Case) -> None:
        opened = case.kind.open(case.folder)
        self._tolerance = TOLERANCES[case.kind.dtype_name]
        self._computed = Computed(lambda tokens: opened(tokens).logits[0])

    def check(self, prompts: Sequence[Sequence[int]], found: Sequence[Any]) -> None:
        """Each token is the likeliest one, or as good as that, and as likely as was answered."""
        assert self._computed.furthest(prompts, found) < self._tolerance
        for prompt, tokens, _ in longest_first(prompts, found):
            rows = self._computed.rows(prompt, tokens)
            wanted = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
            assert float((rows.amax(-1) - wanted).max()) < self._tolerance


@pytest.fixture(scope="module")
def by_transformers(case: Case) -> Transformers:
    return Transformers(case)


@dataclass(frozen=True)
class Plain:
    """Plain SGLang's answers, with pools that hold everything."""

    first: list[Any]
    repeat: list[Any]
    talks: list[Any]


@pytest.fixture(scope="module")
def plain(
    case: Case,
    prompts: list[list[int]],
    chats: list[list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Plain:
    with server_of(case, tmp_path_factory.mktemp("plain"), pool=32768) as server:
        first, repeat = answers(server, prompts), answers(server, prompts)
        return Plain(first, repeat, talk(server, chats, lambda: None, ANSWER))


@dataclass(frozen=True)
class Earlier:
    """What a server with much room answered, and the disk that it left when it was killed."""

    folder: Path
    first: list[Any]
    restored: list[Any]
    state: dict[str, Any]


@pytest.fixture(scope="module")
def earlier(
    case: Case, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Earlier:
    folder = tmp_path_factory.mktemp("tiers")
    codec = ["--hier-kv-codec", "lossless"]
    with server_of(case, folder, *codec, pool=8192, host_pages=HOST_PAGES) as server:
        first = answers(server, prompts)
        drop_device(server)
        restored = answers(server, prompts)
        settled(server)
        return Earlier(folder, first, restored, state(server))


@pytest.fixture(scope="module")
def restarted(case: Case, earlier: Earlier) -> Iterator[Server]:
    """A server with little room on the disk that the one before left.

    It has few states more than six requests take: those that wait to be saved are soon needed.
    """
    folder = earlier.folder
    with server_of(case, folder, pool=3072, num_states=32, host_pages=100) as server:
        yield server


def test_the_engine_computes_states_as_transformers_does(
    case: Case, prompts: list[list[int]], plain: Plain, by_transformers: Transformers
) -> None:
    grid = case.kind.grid
    assert cached(plain.first) == [0] * len(LENGTHS)
    assert cached(plain.repeat) == [length // grid * grid for length in LENGTHS]
    by_transformers.check(prompts, plain.first)
    by_transformers.check(prompts, plain.repeat)


def test_a_hit_from_dram_is_what_the_device_would_have_given(
    case: Case, plain: Plain, earlier: Earlier
) -> None:
    assert values(earlier.first) == values(plain.first)
    check_hits(earlier.restored, plain.repeat, "host")
    counted = earlier.state["host"]
    assert counted["host_capacity_pages"] == HOST_PAGES  # as large as they should be
    # A state where each chunk ends and at the last place for one; an answer reaches no further.
    grid = case.kind.grid
    states = sum(-(-(n // grid) // (CHUNK // grid)) for n in LENGTHS)
    assert counted["saved_states"] == states
    pages = sum(n // grid * (grid // PAGE) for n in LENGTHS)
    assert counted["saved_pages"] == pages + case.num_parts * states
    assert earlier.state["disk"]["codec"]["pages_coded"] >= counted["saved_pages"], earlier.state[
        "disk"
    ]


def test_a_hit_from_disk_after_a_restart_is_what_the_device_would_have_given(
    prompts: list[list[int]],
    chats: list[list[list[int]]],
    plain: Plain,
    restarted: Server,
) -> None:
    check_hits(answers(restarted, prompts), plain.repeat, "disk")
    talks = talk(restarted, chats, lambda: drop_device(restarted), ANSWER)
    ours, theirs = sum(cached(talks)), sum(cached(plain.talks))
    print(f"chats: {ours} of {theirs} tokens that the device would have reused")
    assert ours >= 0.95 * theirs
    same = [a == b for a, b in zip(cached(talks), cached(plain.talks), strict=True)]
    for a, b, is_same in zip(talks, plain.talks, same, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert not is_same or tokens_and_logprobs(a) == tokens_and_logprobs(b)


@pytest.mark.sampled("qwen3_next")
def test_with_many_at_once_and_too_little_room_every_answer_is_right(
    restarted: Server, by_transformers: Transformers
) -> None:
    """Branches anywhere, evictions of both pools and all tiers, and what is restored in between."""
    rng = random.Random(9)
    prompts = branching_prompts(rng, 6, 18)
    prompts += prompts

    found = answers_at_once(restarted, prompts, rng, 70)
    counted = state(restarted)["host"]
    by_transformers.check(prompts, found)
    from_tiers = sum(by_tier(a).get("host", 0) + by_tier(a).get("disk", 0) for a in found)
    print(f"{from_tiers} tokens from the tiers; {counted}")
    assert from_tiers > 20 * PAGE, (from_tiers, counted)
    assert counted.get("load_failures", 0) == counted.get("save_failures", 0) == 0
