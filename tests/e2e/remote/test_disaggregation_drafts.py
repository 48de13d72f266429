"""Prefill and decode servers that speculate with a draft model (EAGLE, EAGLE3, NEXTN).

A page holds the draft's rows behind the model's. What the pair answers and guesses, and each byte
that the two store, is what one server answers, guesses and stores that has all on its device.

By default one rank runs EAGLE; the long form has NEXTN and EAGLE3, too, with one rank and two, and
what a decode server retracts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.drafts.eagle import DRAFTS, write_eagle3_config, write_eagle_draft
from testkit.drafts.nextn import NEXTN, PLAIN, write_nextn_model
from testkit.server import TINYLM
from tests.e2e.hier_server import (
    real_prompts,
    settled,
)
from tests.e2e.remote.prefill_decode import (
    ATTENTION,
    DISK_GB,
    FIRST_TOKENS,
    NUM_TURNS,
    PATIENCE_S,
    TURN_TOKENS,
    SetUp,
    Turn,
    check_bytes,
    check_close,
    check_last_turn,
    converse,
    counted,
    guesses_of,
    one_server,
    plain_turns,
    running_pair,
    share,
    stored_beside_retractions,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LEAST = {"eagle": 0.5, "eagle3": 0.0, "nextn": 0.3}  # guesses that are right; see the drafts


def set_up(kind: str, num_ranks: int, folder: Path) -> SetUp:
    args, model = ATTENTION, TINYLM
    if kind == "nextn":
        model = write_nextn_model(folder / "model", PLAIN)
        args = [*args, *NEXTN, "--max-running-requests", "6"]
    else:
        write = write_eagle_draft if kind == "eagle" else write_eagle3_config
        args = [*args, "--speculative-algorithm", kind.upper(), *DRAFTS]
        args += ["--speculative-draft-model-path", str(write(folder / "draft"))]
    if kind == "eagle3":
        args += ["--speculative-draft-load-format", "dummy"]
    return SetUp(args, model, {}).on_ranks(num_ranks)


def one_servers_turns(made: SetUp, folder: Path) -> list[Turn]:
    """A conversation with one server, which stores what it computes."""
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    with one_server(made, folder) as server:
        turns = plain_turns(server, parts)
        settled(server, PATIENCE_S)
    return turns


@pytest.mark.sampled("eagle-1")
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("eagle", 1), ("nextn", 1), ("eagle3", 1), ("eagle", 2), ("nextn", 2)],
)
def test_the_drafts_rows_are_handed_on_and_come_back(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    made = set_up(kind, num_ranks, tmp_path)
    turns = one_servers_turns(made, tmp_path / "one")
    assert share(turns) >= LEAST[kind]
    folder = tmp_path / "pair"
    how: dict[str, Any] = {"model": made.model, "env": made.env, "disk_gb": DISK_GB}
    with running_pair(folder, made.args, **how) as pair:
        converse(pair, turns[:-1])
        for server in pair.servers:
            assert server.log().count("Rank consensus checker is enabled") == (num_ranks > 1) * 2
    with running_pair(folder, made.args, **how) as pair:  # after a kill -9 of both
        decoded = check_last_turn(pair, turns[-1])
        assert guesses_of(decoded) == turns[-1].guesses
        assert not any(counted(pair.decode, "received_foreign_requests"))
        check_bytes(pair, folder, tmp_path / "one", are_alike=kind == "nextn")


@pytest.mark.long  # what SGLang keeps is looked at in unit/seam/test_handover_hooks.py
def test_rows_of_a_draft_that_a_retraction_lost_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes the model's rows aside and not the draft's; other requests' lie there then.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing,
    in float32, so that only rows of other tokens make other values.
    """
    made = set_up("eagle", 1, tmp_path)
    made = made._replace(args=[*made.args, "--dtype", "float32", "--hier-kv-rope", "delta"])
    known, found = stored_beside_retractions(made, tmp_path, num_unasked=0)
    check_close(known, found, found)
