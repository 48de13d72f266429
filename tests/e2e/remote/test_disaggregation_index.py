"""Prefill and decode servers of models with rows of an index beside their latent ones.

SGLang sends the index's rows apart from the latent ones, behind the last part of these. What the
pair answers is what one server answers that has all on its device, and each byte that the two
store, the index's rows and a draft layer's among them, is one that this server stores. By
default one kind runs that has all of it; the long form has every one, another server behind a kill,
and what a decode server retracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.layout import HEADER_BYTES, PageLayout
from testkit.drafts.nextn import NEXTN, write_nextn_model
from testkit.hybrids.index_model import (
    INDEX_DIM,
    LATENT,
    LAYERS,
    ROTARY,
    TOP_K,
    index_layers,
    write_index_model,
)
from testkit.slow import ENV_UNNAMED_ROWS, FIRST_LOST_ROOM
from tests.e2e.hier_server import PAGE, ask, real_prompts, settled, tokens_and_logprobs
from tests.e2e.remote.prefill_decode import (
    ANSWER_TOKENS,
    ATTENTION,
    DISK_GB,
    FIRST_TOKENS,
    PATIENCE_S,
    RETRACTS,
    TURN_TOKENS,
    Pair,
    SetUp,
    both_answered,
    check_bytes,
    check_last_turn,
    converse,
    counted,
    guesses_of,
    one_server,
    plain_turns,
    running_pair,
    stored,
)
from tests.long_form import FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS = 3
LONE_TOKENS = 5 * PAGE  # of whole pages: the second time its device has all of them
# A model, whether with its draft layer, and ranks.
CASES = list(product(["glm", "deepseek"], [False, True], [1, 2]))


def set_up(name: str, has_draft: bool, num_ranks: int, folder: Path) -> SetUp:
    """A small model with an index, on one rank or two."""
    write = write_nextn_model if has_draft else write_index_model
    args = [*ATTENTION, *(NEXTN if has_draft else ()), "--max-running-requests", "6"]
    return SetUp(args, write(folder / "model", name), {}).on_ranks(num_ranks)


@pytest.mark.sampled("deepseek-True-1")
@pytest.mark.parametrize(("name", "has_draft", "num_ranks"), CASES)
def test_index_rows_are_handed_on_and_come_back(
    name: str, has_draft: bool, num_ranks: int, tmp_path: Path
) -> None:
    assert TOP_K < PAGE < FIRST_TOKENS  # so what is attended to is chosen
    made = set_up(name, has_draft, num_ranks, tmp_path)
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    (lone,) = real_prompts([LONE_TOKENS], seed=8)
    with one_server(made, tmp_path / "one") as server:
        turns = plain_turns(server, parts)
        answer = ask(server, lone, ANSWER_TOKENS)
        settled(server, PATIENCE_S)
    folder = tmp_path / "pair"
    how: dict[str, Any] = {"model": made.model, "disk_gb": DISK_GB}
    how["env"] = {**made.env, ENV_UNNAMED_ROWS: "1"}
    with running_pair(folder, made.args, **how) as pair:
        converse(pair, turns[:-1] if FACTOR else turns)
        check_that_pages_without_all_index_rows_are_left(pair, lone, num_ranks)
        assert tokens_and_logprobs(pair.ask(lone)[1]) == tokens_and_logprobs(answer)
        assert counted(pair.decode, "received_foreign_requests") == [1] * num_ranks
        if not FACTOR:
            check_bytes(pair, folder, tmp_path / "one", are_alike=True)
            check_that_each_page_is_put_by_one_rank(pair, num_ranks)
    if FACTOR:
        with running_pair(folder, made.args, **how) as pair:  # after a kill -9 of both
            decoded = check_last_turn(pair, turns[-1])
            assert guesses_of(decoded) == turns[-1].guesses
            check_bytes(pair, folder, tmp_path / "one", are_alike=True)


def check_that_pages_without_all_index_rows_are_left(
    pair: Pair, prompt: Sequence[int], num_ranks: int
) -> None:
    """A decode server names no page for the last ones, and SGLang sends the others."""
    names = ("saved_pages", "duplicate_pages")
    before = [counted(pair.decode, name) for name in names]
    pair.ask(prompt, room=FIRST_LOST_ROOM)
    assert counted(pair.decode, "received_foreign_requests") == [1] * num_ranks
    assert [counted(pair.decode, name) for name in names] == before
    pair.ask(prompt)
    assert counted(pair.decode, "received_foreign_requests") == [1] * num_ranks
    saved = [each + (len(prompt) + ANSWER_TOKENS - 1) // PAGE for each in before[0]]
    assert counted(pair.decode, "saved_pages") == saved


def check_that_each_page_is_put_by_one_rank(pair: Pair, num_ranks: int) -> None:
    """All ranks have the same rows: what one puts into the store, the others leave to it."""
    for server in pair.servers:
        saved = counted(server, "saved_pages")
        written, there = (counted(server, f"remote_{n}_pages") for n in ("written", "duplicate"))
        assert len(set(saved)) == 1
        assert 0 < sum(written) + sum(there) <= saved[0]
        assert all(counted(server, "remote_left_pages")) == (num_ranks > 1)


@pytest.mark.long  # what SGLang keeps is looked at in test_index_pool.py
def test_rows_that_a_retraction_brought_back_are_those_of_their_tokens(tmp_path: Path) -> None:
    """SGLang takes index rows aside with the latent ones, and other requests' lie there then.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing.
    It computes them in other batches, so some values are rounded otherwise, and now and then the
    index chooses another token; rows of other tokens are wrong in nearly all values.
    """
    made = set_up("glm", False, 1, tmp_path)
    folder, texts = tmp_path / "pair", []
    how: dict[str, Any] = {"model": made.model, "disk_gb": DISK_GB, "decode_env": RETRACTS}
    with running_pair(folder, made.args, **how) as pair:
        for seed in range(10, 13):
            texts += both_answered(pair, list(real_prompts([310, 330], seed=seed)))
        settled(pair.decode, PATIENCE_S)
        assert pair.decode.log().count("#retracted_reqs") > 10
    with one_server(made, tmp_path / "one") as server:
        for text in texts:
            ask(server, text[:-1], 1)  # the last token has no row
        settled(server, PATIENCE_S)
    known, found = (stored(at / "disk") for at in (tmp_path / "one", folder / "decode"))
    assert found.keys() <= known.keys()
    assert len(found) >= sum((len(text) - 1) // PAGE for text in texts) - 2 * len(texts)
    others = [shares_alike(*two) for two in pairwise(found.values())]  # of other tokens
    alike = [shares_alike(content, known[key]) for key, content in found.items()]
    assert np.max(others) < 0.2 < 0.5 < np.min(alike)


def shares_alike(page: bytes, other: bytes) -> tuple[float, float]:
    """How many of two pages' latent values are close, and how many bytes of index rows equal."""
    with_index = index_layers("glm")
    rows = tuple(INDEX_DIM + 4 if layer in with_index else 0 for layer in range(LAYERS))
    latent = (2 * (LATENT + ROTARY),) * LAYERS
    layout = PageLayout(PAGE, latent, rows, 2, is_bound=True, has_index=True)
    two = [np.frombuffer(each, np.uint8) for each in (page, other)]

    def parts(offsets: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        places = [
            slice(at - HEADER_BYTES, at - HEADER_BYTES + PAGE * size)
            for at, size in zip(offsets, sizes, strict=True)
            if size
        ]
        return [np.concatenate([each[place] for place in places]) for each in two]

    values, wanted = (
        (each.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # bfloat16
        for each in parts(layout.k_offsets, latent)
    )
    index, index_wanted = parts(layout.v_offsets, rows)
    close = np.isclose(values, wanted, atol=0.02, rtol=0.05)
    return float(close.mean()), float((index == index_wanted).mean())
