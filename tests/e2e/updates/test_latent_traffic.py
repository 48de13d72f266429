"""New weights under traffic for models with rows of an index, a draft layer, and both.

As `test_weight_traffic.py`, whose traffic and checks these are: pages hold rows of the model and of
its draft layer, both of which an update changes.

Of the long form: one with both, and each alone, the draft on two ranks.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from testkit.drafts.nextn import NEXTN, PLAIN, write_nextn_model
from testkit.rank_requests import ENVIRONMENT as OF_RANKS
from testkit.server import Server
from tests.e2e.drafts.test_speculation import guesses
from tests.e2e.hier_server import hier_args, settled
from tests.e2e.updates import test_weight_traffic as traffic_of
from tests.e2e.updates import weight_models
from tests.e2e.updates.test_weight_traffic import (
    COMMON,
    NUM_CLIENTS,
    PROMPTS,
    Traffic,
    answered_under,
    check_saves,
    check_traffic,
    one_that_is_long,
    until_flushed,
    wait_for_save,
)
from tests.e2e.updates.weight_answers import NOISE, Answer, distance, hit, request
from tests.e2e.updates.weight_ways import from_disk

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARGS = [*COMMON, "--attention-backend", "cpu_extend"]
# Kind of model, whether it drafts, ranks; of two one keeps all pages.
CASES = {
    "index": ("deepseek", False, 1),
    "draft": (PLAIN, True, 2),
    "index and draft": ("glm", True, 1),
}
UPDATES = ("other", "first", "other")


def write_models(folder: Path, kind: str) -> dict[str, Path]:
    """A model, and one whose KV is noise to it."""
    first = write_nextn_model(folder / "first", kind)
    other = folder / "other"
    shutil.copytree(first, other)
    weights = weight_models.weights_of(other)
    weight_models.strange(1)(weights)
    save_file(weights, str(other / "model.safetensors"), metadata={"format": "pt"})
    return {"first": first, "other": other}


def answers_of(
    models: dict[str, Path], folder: Path, args: list[str], env: dict[str, str]
) -> dict[str, list[Answer]]:
    """What plain SGLang answers on a device hit, by model; a mistake would be seen."""
    found: dict[str, list[Answer]] = {}
    log = folder / "plain.log"
    with Server(args, model=models["first"], log_path=log, env=env, stop="kill") as plain:
        for name, path in models.items():
            assert from_disk(plain, path, True) == [(True, 200)]
            found[name] = [hit(plain, prompt) for prompt in PROMPTS]
        # The device still has the other model's KV.
        assert from_disk(plain, models["first"], False) == [(True, 200)]
        stale = [request(plain, prompt)[0] for prompt in PROMPTS]
    distances = [distance(*pair) for pair in zip(stale, found["first"], strict=True)]
    assert min(distances) > NOISE, distances
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_updates_under_traffic(case: str, tmp_path: Path) -> None:
    kind, has_draft, num_ranks = CASES[case]
    models = write_models(tmp_path, kind)
    args = [*ARGS, *(NEXTN if has_draft else ()), "--tp-size", str(num_ranks)]
    env = OF_RANKS if num_ranks > 1 else {}
    wanted = answers_of(models, tmp_path, args, env)
    args += hier_args(tmp_path, host_pages=200 // num_ranks)
    log = tmp_path / "hier.log"
    with Server(args, model=models["first"], log_path=log, env=env, stop="kill") as server:
        if num_ranks > 1:  # whose saves are those of all
            (tmp_path / "events.jsonl").symlink_to("events-dp0-tp0-of-2.jsonl")
        traffic = Traffic(server)
        spans = [(0.0, "first")]  # since when which weights are there; "" while they change
        with traffic.running():
            traffic.wait_for(2 * NUM_CLIENTS)
            wait_for_save(tmp_path, spans[-1][0])
            for number, name in enumerate(UPDATES):
                answer = one_that_is_long(server, seed=30 + number)
                next(answer)
                spans.append((time.time(), ""))
                until_flushed(from_disk, server, models[name])
                spans.append((time.time(), name))
                list(answer)
                traffic.wait_for(2 * NUM_CLIENTS)
                if len(spans) == 3:  # later ones may find all of it stored
                    wait_for_save(tmp_path, spans[-1][0])
        spans.append((time.time(), ""))
        check_traffic(traffic.sent, spans, wanted)
        settled(server)
        check_saves(tmp_path, spans)
        used = {name: answered_under(name, traffic.sent, spans)[::2] for name in models}
        traffic_of.check_tiers(server, used["other"], wanted["other"])
        assert from_disk(server, models["first"], True) == [(True, 200)]
        traffic_of.check_tiers(server, used["first"], wanted["first"])
        if has_draft:
            _, reply = request(server, PROMPTS[used["first"][0]])
            assert guesses(reply)[1]
