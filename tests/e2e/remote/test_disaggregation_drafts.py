"""Prefill and decode servers that speculate with a draft model (EAGLE, EAGLE3, NEXTN).

A page holds the draft's rows behind the model's. What the pair answers and guesses, and each byte
that the two store, is what one server answers, guesses and stores that has all on its device.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.device.layout import HEADER_BYTES
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS, write_eagle3_config, write_eagle_draft
from testkit.drafts.nextn import NEXTN, PLAIN, write_nextn_model
from testkit.rank_requests import ENVIRONMENT, WAYS
from testkit.server import TINYLM, Server
from tests.e2e.hier_server import (
    ask,
    hier_args,
    real_prompts,
    settled,
)
from tests.e2e.models.test_speculation import records
from tests.e2e.remote.prefill_decode import (
    FIRST_TOKENS,
    PATIENCE_S,
    SAME,
    TURN_TOKENS,
    Pair,
    Turn,
    check_last_turn,
    converse,
    counted,
    guesses_of,
    plain_turns,
    running_pair,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS = 4
LONG_ANSWER = 150
ATTENTION = ["--attention-backend", "cpu_extend"]
LEAST = {"eagle": 0.5, "eagle3": 0.0, "nextn": 0.3}  # guesses that are right; see the drafts
DISK_GB = 0.5


class SetUp(NamedTuple):
    """A model with a draft, on one rank or two."""

    args: list[str]
    model: Path
    env: dict[str, str]


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
    if num_ranks > 1:
        return SetUp([*args, *WAYS["tp"]], model, ENVIRONMENT)
    return SetUp(args, model, {})


def one_servers_turns(made: SetUp, folder: Path) -> list[Turn]:
    """A conversation with one server, which stores what it computes."""
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    with one_server(made, folder) as server:
        turns = plain_turns(server, parts)
        settled(server, PATIENCE_S)
    return turns


def one_server(made: SetUp, folder: Path) -> Server:
    """A server that does both."""
    folder.mkdir()
    return Server(
        [*SAME, *hier_args(folder, disk_gb=DISK_GB), *made.args],
        model=made.model,
        log_path=folder / "log",
        env=made.env,
        stop="kill",
        start_timeout_s=PATIENCE_S,
    )


def share(turns: Iterable[Turn]) -> float:
    """The share of guesses that were right."""
    right, proposed = np.sum([turn.guesses for turn in turns if turn.guesses], axis=0)
    return float(right / proposed)


Stored = dict[tuple[str, bytes], bytes]


def stored(folder: Path, *, are_alike: bool = False) -> Stored:
    """What each page has, of all layers and the draft's, by its rank's folder and its hash.

    Args:
        folder: of a disk.
        are_alike: all ranks have the same rows, and some of them, or one, keep a page.
    """
    found: Stored = {}
    for path, _, record in records(folder):
        rank = "" if are_alike else str(path.parent.relative_to(folder))
        content = record[HEADER_BYTES:].tobytes()
        assert found.setdefault((rank, parse_header(record)[0].page_hash), content) == content
    return found


def check_bytes(pair: Pair, folder: Path, one: Path, *, are_alike: bool) -> None:
    """The two servers' pages are those of the one: none differs, and the decode server has all."""
    for server in pair.servers:
        settled(server, PATIENCE_S)
    known = stored(one / "disk", are_alike=are_alike)
    assert known
    for name in ("prefill", "decode"):
        found = stored(folder / name / "disk", are_alike=are_alike)
        differ = [key for key, content in found.items() if known.get(key) != content]
        assert not differ, (name, len(differ), len(found), len(known))
        assert name == "prefill" or found.keys() == known.keys()


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


RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}


def test_rows_of_a_draft_that_a_retraction_lost_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes the model's rows aside and not the draft's; other requests' lie there then.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing,
    in float32, so that only rows of other tokens make other values.
    """
    made = set_up("eagle", 1, tmp_path)
    args = [*made.args, "--dtype", "float32", "--hier-kv-rope", "delta"]
    folder, texts = tmp_path / "pair", []
    with running_pair(folder, args, disk_gb=DISK_GB, decode_env=RETRACTS) as pair:
        for seed in range(10, 15):
            texts += both_answered(pair, list(real_prompts([310, 330], seed=seed)))
            if counted(pair.decode, "unsaved_retracted_requests")[0]:
                break
        (retracted,) = counted(pair.decode, "unsaved_retracted_requests")
        assert retracted > 0
    one = made._replace(args=args)
    with one_server(one, tmp_path / "one") as server:
        for text in texts:
            ask(server, text, 1)
        settled(server, PATIENCE_S)
    known, found = (stored(at / "disk") for at in (tmp_path / "one", folder / "decode"))
    assert found
    for key, content in found.items():
        values, wanted = (np.frombuffer(each, np.float32) for each in (content, known[key]))
        np.testing.assert_allclose(values, wanted, atol=2e-3, rtol=0)


def both_answered(pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Two requests at a time, with their answers behind them."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: pair.ask(prompt, LONG_ANSWER)[1], prompts))
    return [[*p, *a["output_ids"]] for p, a in zip(prompts, answers, strict=True)]
