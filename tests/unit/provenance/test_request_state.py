"""Where a request's reused tokens are said to come from."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.provenance.request_state import HitTier, RequestState, find_state, state_of

PAGE = 16


def state(*tiers: tuple[HitTier, int]) -> RequestState:
    made = RequestState()
    made.note_enqueued(PAGE, list(tiers))
    return made


def test_by_the_tier_at_enqueue() -> None:
    made = state((HitTier.DEVICE, 2), (HitTier.HOST, 3), (HitTier.DISK, 4))
    made.note_loaded(2 * PAGE, 7 * PAGE, HitTier.HOST)
    assert made.by_tier(9 * PAGE) == {
        "device": 2 * PAGE, "host": 3 * PAGE, "disk": 4 * PAGE, "remote": 0,
    }  # fmt: skip


def test_what_was_not_reused_is_not_counted() -> None:
    made = state((HitTier.HOST, 3), (HitTier.DISK, 4))
    assert made.by_tier(4 * PAGE) == {"device": 0, "host": 3 * PAGE, "disk": PAGE, "remote": 0}


def test_pages_that_another_request_computed_meanwhile() -> None:
    made = state((HitTier.DEVICE, 1))
    made.note_loaded(PAGE, 2 * PAGE, HitTier.HOST)
    found = made.by_tier(5 * PAGE)
    assert found == {"device": 3 * PAGE, "host": 2 * PAGE, "disk": 0, "remote": 0}


def test_a_last_page_cut_by_the_match_limit() -> None:
    made = state((HitTier.DEVICE, 1), (HitTier.DISK, 1))
    assert made.by_tier(2 * PAGE - 1) == {"device": PAGE, "host": 0, "disk": PAGE - 1, "remote": 0}


def test_a_request_that_enters_the_queue_again_starts_anew() -> None:
    made = state((HitTier.DISK, 4))
    made.note_loaded(0, 4 * PAGE, HitTier.HOST)
    made.note_enqueued(PAGE, [(HitTier.DEVICE, 1)])
    assert made.by_tier(2 * PAGE) == {"device": 2 * PAGE, "host": 0, "disk": 0, "remote": 0}


def test_nothing_reused() -> None:
    assert set(RequestState().by_tier(0).values()) == {0}


@given(
    st.lists(
        st.tuples(st.sampled_from([HitTier.DEVICE, HitTier.HOST, HitTier.DISK]), st.integers(0, 6))
    ),
    st.integers(0, 20 * PAGE),
)
def test_every_token_has_one_tier(tiers: list[tuple[HitTier, int]], num_tokens: int) -> None:
    made = state(*tiers)
    made.note_loaded(PAGE, 3 * PAGE, HitTier.HOST)
    found = made.by_tier(num_tokens)
    assert sum(found.values()) == num_tokens
    assert min(found.values()) >= 0


def test_it_lives_on_the_request() -> None:
    req = SimpleNamespace()
    assert find_state(req) is None
    made = state_of(req)
    assert state_of(req) is made is find_state(req)
