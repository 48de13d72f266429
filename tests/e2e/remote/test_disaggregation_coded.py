"""Prefill and decode servers whose pages are coded without loss, in DRAM, on disk and in the store.

What the pair answers is what one server answers that has all on its device and codes nothing.

By default K and V of every head with a draft of EAGLE, whose guesses are compared, too; the long
form has the other kinds, and two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tiers.records.record import parse_header
from testkit.hybrids.index_model import write_index_model
from testkit.hybrids.window_model import write_window_model
from testkit.server import TINYLM
from tests.e2e.drafts.test_speculation import records
from tests.e2e.hier_server import real_prompts
from tests.e2e.remote.latent_model import write_latent_model
from tests.e2e.remote.prefill_decode import (
    ATTENTION,
    DISK_GB,
    FIRST_TOKENS,
    NUM_TURNS,
    TURN_TOKENS,
    SetUp,
    check_last_turn,
    check_last_turn_anywhere,
    converse,
    counted,
    guesses_of,
    one_server,
    plain_turns,
    running_pair,
)
from tests.e2e.remote.test_disaggregation_drafts import set_up as draft_set_up
from tests.e2e.remote.test_disaggregation_states import set_up as state_set_up
from tests.e2e.remote.test_disaggregation_windows import DRAFTED
from tests.e2e.remote.test_disaggregation_windows import set_up as window_set_up

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CODEC = ["--hier-kv-codec", "host=lossless,disk=lossless,remote=lossless"]
DRAFTED_STATES, DRAFTED_WINDOWS = "drafted-qwen3_next", "drafted-windows"
STATES = ("qwen3_next", "kimi_linear", DRAFTED_STATES)
HYBRIDS = ("windows", DRAFTED_WINDOWS, *STATES)
DRAFTS = ("eagle", "nextn")
CASES = [("mha", 1), ("mla", 2), ("windows", 1), ("indexed", 1), ("indexed", 2)]
CASES += [("eagle", 1), ("eagle", 2), ("nextn", 2)]
CASES += [(name, num_ranks) for name in (*STATES, DRAFTED_WINDOWS) for num_ranks in (1, 2)]


def set_up(kind: str, num_ranks: int, folder: Path) -> SetUp:
    """A model of a kind, on one rank or two."""
    made = SetUp([], TINYLM, {})
    if kind in STATES:
        return state_set_up(folder, kind, num_ranks)
    if kind in DRAFTS:
        folder.mkdir()
        return draft_set_up(kind, num_ranks, folder)
    if kind == "mla":
        made = made._replace(model=write_latent_model(folder))
    elif kind == "windows":
        made = SetUp(ATTENTION, write_window_model(folder), {})
    elif kind == DRAFTED_WINDOWS:
        made = window_set_up(DRAFTED, folder)
    elif kind == "indexed":
        args = [*ATTENTION, "--max-running-requests", "6"]
        made = SetUp(args, write_index_model(folder, "deepseek"), {})
    return made.on_ranks(num_ranks)


@pytest.mark.sampled("eagle-1")
@pytest.mark.parametrize(("kind", "num_ranks"), CASES)
def test_what_is_coded_without_loss_comes_back_as_it_was(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    made, is_hybrid = set_up(kind, num_ranks, tmp_path / "model"), kind in HYBRIDS
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    with one_server(made, tmp_path / "one") as server:
        turns = plain_turns(server, parts)
    folder = tmp_path / "pair"
    how: dict[str, Any] = {"model": made.model, "env": made.env, "disk_gb": DISK_GB}
    with running_pair(folder, [*made.args, *CODEC], **how) as pair:
        converse(pair, turns[:-1], are_planned_again=is_hybrid)
    for name in ("prefill", "decode"):
        codecs = {parse_header(record)[0].codec for _, _, record in records(folder / name)}
        assert codecs == {"lossless"}
    with running_pair(folder, [*made.args, *CODEC], **how) as pair:  # after a kill -9 of both
        if is_hybrid:
            check_last_turn_anywhere(pair, turns[-1])
        else:
            decoded = check_last_turn(pair, turns[-1])
            assert guesses_of(decoded) == turns[-1].guesses
        assert not any(counted(pair.decode, "received_foreign_requests"))
        assert not any(counted(pair.decode, "received_inexact_requests"))
