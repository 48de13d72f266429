"""Prefill and decode servers of a model with window layers in a pool of their own.

Of window layers SGLang sends the last window alone, to rows of which it takes some more than it
fills. What the pair answers is what one server answers that has all on its device; and each byte
that the two store is one that this server stores. With a draft its rows are handed on with those of
the full layers, and guesses are compared, too.

By default a gpt-oss with a draft of EAGLE3 on one rank; the long form has a Mellum without one, and
two ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.drafts.eagle import DRAFTS
from testkit.drafts.eagle3 import write_drafted_oss_model, write_oss_draft
from testkit.hybrids.window_model import WINDOW, write_window_model
from tests.e2e.hier_server import PAGE, real_prompts
from tests.e2e.remote.prefill_decode import (
    ATTENTION,
    SetUp,
    check_close,
    check_common_bytes,
    check_hybrid,
    share,
    stored_beside_retractions,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Of whole pages, where the windows of a prompt and of all but its last token are not the same, and
# SGLang takes a page of rows more than it fills; and of one token more and less.
LENGTHS = [640, 641, 639, 768, 64, 128]
# A small Mellum, and a small gpt-oss with a draft of EAGLE3.
PLAIN, DRAFTED = "plain", "drafted"
LEAST = 0.3  # guesses that are right, so that one sees where fewer are


def set_up(kind: str, folder: Path) -> SetUp:
    model = folder / "model"
    if kind == PLAIN:
        assert WINDOW % PAGE == 0
        return SetUp(ATTENTION, write_window_model(model), {})
    draft = write_oss_draft(folder / "draft", write_drafted_oss_model(model))
    args = [*ATTENTION, "--max-running-requests", "6", "--speculative-algorithm", "EAGLE3"]
    args += [*DRAFTS, "--speculative-draft-model-path", str(draft)]
    return SetUp(args, model, {})


@pytest.mark.sampled("drafted-1")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", [PLAIN, DRAFTED])
def test_windows_are_handed_on_and_come_back(kind: str, num_ranks: int, tmp_path: Path) -> None:
    made = set_up(kind, tmp_path).on_ranks(num_ranks)
    lone = list(real_prompts(LENGTHS, seed=9))
    turns = check_hybrid(made, tmp_path, lone, 5, check_common_bytes)
    if kind == DRAFTED:
        assert LEAST < share(turns) < 1  # some were wrong, and left nothing behind


def test_windows_that_a_retraction_brought_back_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes rows for a whole window, of which some had been given away before.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing,
    in float32, so that only rows of other tokens make other values.
    """
    made = SetUp([*ATTENTION, "--dtype", "float32"], write_window_model(tmp_path / "model"), {})
    known, found = stored_beside_retractions(made, tmp_path)
    check_close(known, found, found.keys() & known.keys())
