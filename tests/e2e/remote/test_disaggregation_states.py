"""Prefill and decode servers of a model with a state a sequence.

SGLang sends the state behind the prompt alone, and none of those that the prefill server keeps in
its tree. A decode server keeps those that its own decode comes to. What the pair answers is what
one server answers that has all on its device; and each byte that the two store, states among them,
is one that this server stores.

With the draft layer of a checkpoint its rows are handed on with those of the full layers, guesses
are compared, too, and a state is behind a place that a verification may have gone past.

By default one rank of Qwen3-Next with its draft layer hands on; the long form has models without
one, states beside latent rows, two ranks, and retractions. `test_disaggregation_ranks.py` hands
latent rows on, and `models/test_states.py` has Kimi Linear on one server.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.device.states.snapshots import part_hashes
from testkit.drafts.nextn import NEXTN
from testkit.drafts.state_nextn import DRAFTED_MODELS, write_drafted_model
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from tests.e2e.hier_server import PAGE, real_prompts
from tests.e2e.remote.prefill_decode import (
    ATTENTION,
    Pair,
    SetUp,
    Stored,
    check_close,
    check_common_bytes,
    check_hybrid,
    share,
    stored_beside_retractions,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# An answer is as long as a third of a page: a state at each page of it.
ARGS = [*ATTENTION, "--mamba-track-interval", str(PAGE)]
ARGS += ["--max-running-requests", "6", "--max-mamba-cache-size", "60"]
# States beside K and V of every head, and beside latent rows.
MODELS = ("qwen3_next", "kimi_linear", "kimi_k3")
# The same model, and others, with their draft layer.
DRAFTED = "drafted-"
MATRIX = [(name, ranks) for name in MODELS for ranks in (1, 2)]
MATRIX += [(DRAFTED + name, ranks) for name in DRAFTED_MODELS for ranks in (1, 2)]
LEAST = 0.3  # guesses that are right, so that one sees where fewer are
LENGTHS = [640, 641, 639, 64, 100]


def set_up(folder: Path, name: str, num_ranks: int) -> SetUp:
    model, args = folder / "model", ARGS
    if name.startswith(DRAFTED):
        drafted = write_drafted_model(model, name.removeprefix(DRAFTED))
        kind = drafted.kind
        args = [*args, *NEXTN, "--mamba-track-interval", str(kind.grid)]
        args += ["--image-processor-backend", "pil"] if drafted.takes_images else []
    else:
        kind = STATE_MODELS[name]
        write_state_model(model, name)
    args = [*args, "--dtype", kind.dtype_name, *kind.server_args]
    return SetUp(args, model, {"SGLANG_MAMBA_CONV_DTYPE": kind.dtype_name}).on_ranks(num_ranks)


def num_states(found: Stored) -> int:
    """Of how many states the first part is among what is stored; of some models it is the whole."""
    num = 0
    for rank, key in found:
        page = np.frombuffer(key, np.uint8).reshape(1, 32)
        num += (rank, part_hashes(page, 0).tobytes()) in found
    return num


def check_bytes_and_states(pair: Pair, folder: Path) -> None:
    for common in check_common_bytes(pair, folder):
        assert num_states(common) >= 3


@pytest.mark.sampled("drafted-qwen3_next-1")
@pytest.mark.parametrize(("name", "num_ranks"), MATRIX)
def test_states_of_answers_are_those_of_one_server(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    made, lone = set_up(tmp_path, name, num_ranks), list(real_prompts(LENGTHS, seed=9))
    turns = check_hybrid(made, tmp_path, lone, 80, check_bytes_and_states)
    if name.startswith(DRAFTED):
        assert LEAST < share(turns) < 1  # some were wrong, and left nothing behind


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "drafted-qwen3_next"])
def test_states_behind_a_retraction_are_not_stored(name: str, tmp_path: Path) -> None:
    """SGLang takes the state aside, and not what it tracks beside it.

    What is stored is compared with what a server stores that retracts nothing, in float32, so that
    only rows and states of other tokens have other values.
    """
    known, found = stored_beside_retractions(set_up(tmp_path, name, 1), tmp_path)
    check_close(known, found, found.keys() & known.keys())
