"""Where a prompt is cut, case by case."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ext.settings.config import TRUNCATION_RATIOS
from sglang_ext.truncation.cut import CutRefusedError, CutRule, Messages


def _messages(*turns: int, other: tuple[int, ...] = ()) -> Messages:
    return Messages(np.asarray(sorted({*turns, *other}), np.int64), np.asarray(turns, np.int64))


def test_half_of_the_window_goes_at_the_next_turn() -> None:
    cut = CutRule(1000).cut(1000, 940, 100, _messages(100, 300, 560, 700))
    assert cut.starts == (560,)  # 550 at least
    assert cut.num_kept == 540


def test_without_boundaries_half_goes_exactly() -> None:
    assert CutRule(1000).cut(1000, 940, 100).starts == (550,)
    assert CutRule(1000, align=64).cut(1000, 940, 100).starts == (100 + 8 * 64,)


def test_the_turn_nearest_to_half_comes_before_other_messages() -> None:
    rule = CutRule(1000)
    assert rule.cut(1000, 940, 100, _messages(100, 480, 700, other=(549,))).starts == (480,)
    assert rule.cut(1000, 940, 100, _messages(100, 380, 610, other=(549,))).starts == (610,)
    assert rule.cut(1000, 940, 100, _messages(100, 200, 900, other=(400, 600))).starts == (600,)


def test_a_last_message_that_fits_is_not_cut_into() -> None:
    assert CutRule(1000).cut(1000, 940, 100, _messages(100, 200, other=(990,))).starts == (200,)


def test_a_message_that_does_not_fit_is_cut_into() -> None:
    cut = CutRule(1000).cut(3000, 940, 100, _messages(100, 200))
    assert cut.starts[0] == 200
    assert cut.num_kept <= 940
    assert cut.tail_start > 200


def test_a_long_conversation_passes_several_places() -> None:
    cut = CutRule(1000, ratio=0.5).cut(2200, 940, 0, _messages(*range(0, 2200, 100)))
    assert cut.starts == (500, 1000, 1500)
    assert cut.ancestors() == [1000, 500, 0]


def test_a_head_that_leaves_nothing_is_refused_in_one_sentence() -> None:
    with pytest.raises(CutRefusedError, match="first 900 tokens"):
        CutRule(1000).cut(1200, 940, 900)
    # The same prompt fits uncut where it is short enough.
    assert not CutRule(1000).cut(930, 940, 900).is_cut


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": 1e-9}, "between 0.01 and 0.99"),  # no token would go, and no cut would end
        ({"ratio": 0.999999}, "between 0.01 and 0.99"),
        ({"ratio": float("nan")}, "ratio"),
        ({"head_tokens": -1}, "head"),
        ({"align": 0}, "alignment"),
        ({"head_tokens": 990}, "head of 990"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CutRule(1000, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", TRUNCATION_RATIOS)
def test_the_least_and_the_most_ratio_cut_a_long_prompt(ratio: float) -> None:
    cut = CutRule(4096, ratio=ratio).cut(8 * 4096, 3800, 4)
    assert 16 <= cut.num_kept <= 3800
    assert len(cut.starts) <= 8 / ratio


def test_room_is_the_wish_up_to_half_of_the_context() -> None:
    rule = CutRule(1600)
    assert [rule.room(wish) for wish in (0, 1, 128, 800, 1500, None)] == [1, 1, 128, 800, 800, 100]


def test_the_head_is_the_system_prompt_and_the_sinks_at_least() -> None:
    rule = CutRule(1000)
    assert [rule.head_len(first) for first in (None, 1, 4, 57)] == [4, 4, 4, 57]


def test_only_the_tokens_that_were_cut_can_be_kept() -> None:
    with pytest.raises(ValueError, match="of 1000 tokens, not of 3"):
        CutRule(1000).cut(1000, 940, 100).keep([1, 2, 3])
