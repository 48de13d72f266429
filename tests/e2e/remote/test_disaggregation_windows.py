"""Prefill and decode servers of a model with window layers in a pool of their own.

Of window layers SGLang sends the last window alone, to rows of which it takes some more than it
fills. What the pair answers is what one server answers that has all on its device; and each byte
that the two store is one that this server stores.

By default on one rank; the long form has two, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.hybrids.window_model import WINDOW, write_window_model
from tests.e2e.hier_server import PAGE, real_prompts
from tests.e2e.remote.prefill_decode import (
    ATTENTION,
    SetUp,
    check_close,
    check_common_bytes,
    check_hybrid,
    stored_beside_retractions,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Of whole pages, where the windows of a prompt and of all but its last token are not the same, and
# SGLang takes a page of rows more than it fills; and of one token more and less.
LENGTHS = [640, 641, 639, 768, 64, 128]


@pytest.mark.sampled("1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_windows_are_handed_on_and_come_back(num_ranks: int, tmp_path: Path) -> None:
    assert WINDOW % PAGE == 0
    made = SetUp(ATTENTION, write_window_model(tmp_path / "model"), {}).on_ranks(num_ranks)
    check_hybrid(made, tmp_path, list(real_prompts(LENGTHS, seed=9)), 5, check_common_bytes)


def test_windows_that_a_retraction_brought_back_are_not_stored(tmp_path: Path) -> None:
    """SGLang takes rows for a whole window, of which some had been given away before.

    What is stored is compared with the rows of the same tokens on a server that retracts nothing,
    in float32, so that only rows of other tokens make other values.
    """
    made = SetUp([*ATTENTION, "--dtype", "float32"], write_window_model(tmp_path / "model"), {})
    known, found = stored_beside_retractions(made, tmp_path)
    check_close(known, found, found.keys() & known.keys())
