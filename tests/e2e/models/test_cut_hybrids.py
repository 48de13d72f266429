"""Conversations over their context on hybrids: window layers that move, and what is not moved.

A model of one window layer and one full layer shows that what is kept goes to its new positions in
both: a row of the first layer rests on its own token alone, and one of the second on its window, so
but for the first rows behind a cut the moved KV is that which the cut prompt gives, as transformers
computes it for the whole of it. Of kinds whose pages stay where they are a prompt is cut all the
same, and goes on from what was computed behind the same cut.

Of those the default run has two, the long form all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.hybrids.index_model import write_index_model
from testkit.hybrids.oss_model import open_oss_model, write_oss_model
from testkit.hybrids.shaped_models import write_shaped_model
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.hybrids.window_model import write_window_model
from testkit.rank_requests import ENVIRONMENT
from testkit.server import Server
from testkit.workload import load_tokenizer
from tests.e2e.hier_server import ask, real_prompts, state, tokens_and_logprobs
from tests.e2e.models.hybrid_answers import Computed, cached, drop_device

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.sampled("states", "index"),
]

PAGE, CONTEXT, WINDOW = 16, 512, 64
NUM_TOKENS = 24
# How far rounding and the rows right behind a cut take a log-probability; KV at other positions
# takes it to 1 and more.
TOLERANCE = 0.4


def server_of(
    model: Path, folder: Path, *more: str, page: int = PAGE, env: dict[str, str] | None = None
) -> Server:
    args = ["--page-size", str(page), "--attention-backend", "cpu_extend"]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "4096"]
    args += ["--enable-hier-kv", "--hier-kv-host-size", "0.02", "--hier-kv-truncation", "overflow"]
    args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.2"]
    args += ["--hier-kv-disk-segment-size", "0.01", "--hier-kv-prefetch-policy", "timeout"]
    args += ["--hier-kv-prefetch-timeout-ms", "60000", *more]
    log = folder / "server.log"
    return Server(args, model=model, log_path=log, env=env or {}, stop="kill", start_timeout_s=300)


class Chat:
    """A conversation in the words of the bundled tokenizer's template, which grows without end."""

    def __init__(self, seed: int) -> None:
        tokenizer = load_tokenizer()
        names = ("system", "user", "assistant", "end")
        ids: Any = [tokenizer.token_to_id(f"<|{name}|>") for name in names]
        system, self.user, self.assistant, self.end = ids
        self.told = [system, 50, 60, 70, self.end]
        self.head = len(self.told)
        self._seed = seed

    def ask(self, server: Server, num_tokens: int, **fields: Any) -> Any:
        """The next turn, with so many new tokens, and what else a request has."""
        (said,) = real_prompts([num_tokens], seed=self._seed)
        self._seed += 1
        self.told += [self.user, *said, self.end, self.assistant]
        answer = ask(server, self.told, NUM_TOKENS, **fields)
        self.told += [*answer["output_ids"], self.end]
        return answer

    def kept(self, dropped: int) -> list[int]:
        """The last prompt, without so many tokens behind its head."""
        prompt = self.told[: -NUM_TOKENS - 1]
        return prompt[: self.head] + prompt[self.head + dropped :]


def report(answer: Any) -> dict[str, Any]:
    """What a client is told of its prompt."""
    details = answer["meta_info"]["cached_tokens_details"] or {}
    found: dict[str, Any] = details.get("hier_kv", {})
    return found


def ask_exact(server: Server, chat: Chat) -> Any:
    """The last prompt again, of somebody who wants exact KV: it is computed anew."""
    answer = server.generate(
        input_ids=chat.told[: -NUM_TOKENS - 1],
        sampling_params={
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "custom_params": {"hier_kv_exact": True},
        },
        return_logprob=True,
    )
    assert report(answer).get("moved", 0) == cached([answer])[0] == 0
    assert report(answer).get("quality", "exact") == "exact"
    return answer


def test_what_is_kept_goes_to_its_new_positions_in_every_layer(tmp_path: Path) -> None:
    """From DRAM, and in a server started on the disk that another one left."""
    from transformers import MellumForCausalLM

    model = write_window_model(tmp_path / "model", window=WINDOW, pattern=(1, 0))
    opened = MellumForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_transformers = Computed(lambda tokens: opened(tokens).logits[0])
    chat, prompts, found = Chat(seed=80), [], []
    with server_of(model, tmp_path) as server:
        for turn in range(11):
            # Behind a short turn the window reaches into what was moved.
            answer = chat.ask(server, 3 + turn if turn % 2 else 101)
            drop_device(server)
            prompts.append(chat.kept(report(answer).get("dropped", 0)))
            found.append(answer)
            assert len(prompts[-1]) == answer["meta_info"]["prompt_tokens"]
        counted = state(server)["host"]
    cuts = [report(answer).get("dropped", 0) for answer in found]
    assert len(set(cuts)) >= 3, cuts
    assert any(each % PAGE for each in cuts), "nothing began inside a page"
    for answer, dropped in zip(found, cuts, strict=True):
        if dropped:
            told = report(answer)
            assert told["quality"] == "approximated"
            assert told["moved"] > WINDOW
            num_new = answer["meta_info"]["prompt_tokens"] - cached([answer])[0]
            assert num_new < 101 + NUM_TOKENS + 3 * PAGE
    assert counted.get("load_failures", 0) == counted.get("save_failures", 0) == 0
    # After a kill -9, from disk; on the cut of before, and what was moved is not stored twice.
    with server_of(model, tmp_path, "--hier-kv-codec", "lossless") as server:
        answer = chat.ask(server, 3)
        told = report(answer)
        assert told["disk"] == cached([answer])[0] > WINDOW
        assert told["moved"] > 0
        prompts.append(chat.kept(told["dropped"]))
        found.append(answer)
        exact = ask_exact(server, chat)
        prompts.append(prompts[-1])
        found.append(exact)
    assert by_transformers.furthest(prompts, found) < TOLERANCE


def test_sinks_do_not_keep_a_model_from_moving_its_pages(tmp_path: Path) -> None:
    """They are taken out for the check at start, and are back when the first prompt comes."""
    model = write_oss_model(tmp_path / "model")
    opened = open_oss_model(model)
    by_transformers = Computed(lambda tokens: opened(tokens).logits[0])
    chat, moved = Chat(seed=90), 0
    with server_of(model, tmp_path) as server:
        first = chat.ask(server, 61)
        prompts = [chat.kept(0)]
        for turn in range(1, 7):
            told = report(chat.ask(server, 61 + 3 * turn))
            moved += told.get("moved", 0)
            drop_device(server)
        assert state(server)["self_check_failed_layers"] == []
        exact = ask_exact(server, chat)
    assert moved > 0
    prompts.append(chat.kept(told["dropped"]))
    assert by_transformers.furthest(prompts, [first, exact]) < TOLERANCE


STATES = STATE_MODELS["qwen3_next"]
# What writes a model, and its servers' arguments and environment.
BOUND: dict[str, tuple[Callable[[Path], Path], list[str], dict[str, str]]] = {
    "states": (
        partial(write_state_model, name="qwen3_next"),
        ["--dtype", STATES.dtype_name, "--max-mamba-cache-size", "40", *STATES.server_args],
        {"SGLANG_MAMBA_CONV_DTYPE": STATES.dtype_name},
    ),
    "index": (partial(write_index_model, name="glm"), [], {}),
    "windows of two shapes": (partial(write_shaped_model, name="gemma"), [], {}),
    "windows by two ranks": (write_window_model, ["--tp-size", "2"], ENVIRONMENT),
}


@pytest.mark.parametrize("name", BOUND)
def test_what_is_not_moved_is_computed_behind_each_new_cut_and_then_reused(
    tmp_path: Path, name: str
) -> None:
    write, args, env = BOUND[name]
    page = 64
    with server_of(write(tmp_path / "model"), tmp_path, *args, page=page, env=env) as server:
        check_new_cuts(server, page, _check_bits)


def _check_bits(again: Any, answer: Any) -> None:
    assert tokens_and_logprobs(again) == tokens_and_logprobs(answer)


def check_new_cuts(
    server: Server, page: int, check_same: Callable[[Any, Any], None], **fields: Any
) -> None:
    """A chat's kept text is computed behind each new cut, and reused until the next one.

    Args:
        server: with a context of `CONTEXT` tokens.
        page: P.
        check_same: of an answer to a cut prompt, and one to what was kept as a prompt of its own.
        fields: of each request, such as the group of ranks that it goes to.
    """
    chat, cuts = Chat(seed=70), [0]
    for _ in range(8):
        answer = chat.ask(server, 101, **fields)
        drop_device(server)
        told = report(answer)
        dropped = told.get("dropped", 0)
        cuts.append(dropped)
        assert told.get("moved", 0) == 0
        assert told.get("quality", "exact") == "exact"
        if dropped == cuts[-2]:
            # All that the turn before left, but for its last pages.
            most_new = 101 + NUM_TOKENS + 3 * page
            assert cached([answer])[0] > len(chat.kept(dropped)) - most_new
            continue
        assert cached([answer]) == [0]
        again = ask(server, chat.kept(dropped), NUM_TOKENS, **fields)  # a prompt like any other
        assert cached([again]) == [0]
        check_same(again, answer)
    counted = state(server)["host"]
    assert len(set(cuts)) >= 3, cuts
    assert len(set(cuts)) < len(cuts) - 1, cuts
    assert counted.get("load_failures", 0) == counted.get("save_failures", 0) == 0
