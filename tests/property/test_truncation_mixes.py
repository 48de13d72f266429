"""Exact, truncated, forked and quoting prompts at random: nobody meets KV that is not theirs.

See `truncation_world`. Every request is compared with the brute-force model at every forward,
insert and load. The long form has more requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.provenance.request_state import state_of
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.truncation import quote_search
from sglang_ext.truncation.lineage import QuoteLineage, lineage_of, quote_name
from sglang_ext.truncation.quotes import StoredRun
from tests.long_form import count
from tests.property.worlds import truncation_world
from tests.property.worlds.coverage import missing, run_until_all_seen
from tests.property.worlds.taint_world import PAGE, Request, Wrong
from tests.property.worlds.truncation_world import TruncationWorld, world

CASES = count(200, 20000)
SEEDS = 3

pytestmark = pytest.mark.usefixtures("scheduler_waits")


@pytest.mark.parametrize("seed", range(SEEDS + 1))
def test_nobody_meets_kv_that_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    core = "rust" if seed == SEEDS else "python"
    cases = CASES // (SEEDS + 1)
    served: TruncationWorld = world(tmp_path, monkeypatch, seed, core=core)

    def one_round() -> None:
        for _ in range(400):
            served.step()
        served.drain()

    def unseen() -> list[str]:
        seen = {
            **served.store.stats(), "served": served.num_served, "cut": served.num_cut,
            "exact and cut": served.num_exact_cut, "quoting": served.num_quoting,
        }  # fmt: skip
        least = {
            "served": cases, "cut": cases // 12, "exact and cut": 1, "quoting": 1,
            "moved_tokens": cases // 4, "aliased_pages": 1,
        }  # fmt: skip
        return missing(seen, least)

    try:
        run_until_all_seen(one_round, unseen, num_rounds=1)
        print(served.num_served, served.num_cut, served.counts, served.store.stats())
    finally:
        served.close()


SPLITS = (
    ("a", "bc"), ("ab", "c"), ("abc", None), (None, "abc"), (None, None), ("a", None), (None, "a"),
    ("('a', 'bc')", None), ("a|bc", None), ("a\0bc", None),
)  # fmt: skip


@pytest.mark.parametrize("core", ["python", "rust"])
def test_one_prompt_under_keys_and_salts_cut_otherwise_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    monkeypatch.setattr(truncation_world, "KEYS", SPLITS)
    served = world(tmp_path, monkeypatch, 1, core=core, lossy=False)
    prompt = [*range(1, 25), 1]
    try:
        for device_holds_all in (True, False):
            for key in range(len(SPLITS)):
                req = served.arrive(prompt, exact=True, key=key)
                found = req.prefix_len + req.host_hit_length
                assert (found > 0) != device_holds_all, SPLITS[key]
                served.drain()
            served.cache.reset()
    finally:
        served.close()


# ---- prompts that quote, by hand ----

NAMED = 1  # of KEYS
LEFT_OUT = 22  # tokens of a conversation in front of what is quoted
NOT_QUOTED = 4  # behind it


@pytest.fixture(params=[0, 3, 4])
def quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[TruncationWorld]:
    """Servers in which every search is waited for, and what is lost is nowhere else.

    Prompts have a head of none, of a part of a page, and of a page.
    """
    monkeypatch.setattr(quote_search, "_DEADLINE_S", 300.0)
    options: dict[str, Any] = {
        "policy": "write_through", "device_pages": 100, "host_pages": 200, "with_disk": False,
        "lossy": False, "head_tokens": request.param,
    }  # fmt: skip
    served = world(tmp_path, monkeypatch, 1, **options)
    yield served
    served.close()


def serve(served: TruncationWorld, tokens: list[int], *, exact: bool = False) -> Request:
    """One request to its end; then nothing is on the device."""
    req = served.arrive(tokens, exact=exact, num_new=0, key=NAMED, mode="all")
    served.serve(req)
    served.cache.reset()
    served.allocator.clear()
    return req


def serve_quote(
    served: TruncationWorld, talk: list[int], num_new: int
) -> tuple[Request, QuoteLineage]:
    """One that quotes a conversation."""
    req = serve(served, quote(served, talk, num_new))
    lineage = lineage_of(req)
    assert isinstance(lineage, QuoteLineage)
    return req, lineage


def talks(served: TruncationWorld, num: int) -> list[list[int]]:
    """Conversations that differ in what is left out of them; head and quote are whole pages."""
    head = list(range(100, 100 + len(served.head([0] * 8))))
    end = list(range(200, 220 + -len(head) % PAGE + NOT_QUOTED))
    between = [[1 + 30 * at + each for each in range(LEFT_OUT - len(head))] for at in range(num)]
    return [head + each + end for each in between]


def quote(served: TruncationWorld, talk: list[int], num_new: int) -> list[int]:
    """Head and end of a conversation, and new text."""
    return [*served.head(talk), *talk[LEFT_OUT:-NOT_QUOTED], *range(300, 300 + num_new)]


def lose_first_quoted_page(served: TruncationWorld, talk: list[int]) -> None:
    """The page in which what is quoted begins proves damaged."""
    extra_key, salt = truncation_world.KEYS[NAMED]
    hashes = served.truncator.hash_of(array("q", talk), extra_key, salt)
    page = LEFT_OUT // PAGE
    ticket = served.store.pin_ready(served.space, hashes[page : page + 1])
    assert ticket is not None
    served.store.drop_damaged(ticket, np.zeros(1, np.int64))
    served.store.release(ticket.slots)


def test_a_quote_goes_on_behind_pages_that_were_computed_otherwise(
    quoted: TruncationWorld,
) -> None:
    """As all of them are of the same text: the head, what was left out, and the prompt's own."""
    (talk,) = talks(quoted, 1)
    serve(quoted, talk)
    _, first = serve_quote(quoted, talk, 14)
    assert first.num_moved == len(quote(quoted, talk, 0)) - first.head
    lose_first_quoted_page(quoted, talk)
    _, second = serve_quote(quoted, talk, 1)
    assert not second.num_moved, "it is computed on the head alone"
    req, third = serve_quote(quoted, talk, 14)
    assert first.key == second.key == third.key
    assert third.loaded is not None
    assert third.loaded.num_pages == len(req.tokens) // PAGE
    assert not third.num_moved, "its first pages are the second's, its last ones the first's"
    assert state_of(req).reused == state_of(req).taint == Quality.APPROXIMATED
    exact = serve(quoted, req.tokens, exact=True)
    assert lineage_of(exact) is None
    assert state_of(exact).taint == Quality.EXACT


@pytest.mark.parametrize("is_mistaken", [False, True])
def test_quotes_behind_other_text_share_nothing(
    quoted: TruncationWorld, monkeypatch: pytest.MonkeyPatch, is_mistaken: bool
) -> None:
    """With a mistake in the name, which leaves out what was left out, the model says so."""

    def of_any_text(secret: bytes, whose: int, run: StoredRun) -> str:
        return quote_name(secret, whose, replace(run, hashes=np.zeros_like(run.hashes)))

    if is_mistaken:
        monkeypatch.setattr(quote_search, "quote_name", of_any_text)
    talk, other = talks(quoted, 2)
    serve(quoted, talk)
    _, first = serve_quote(quoted, talk, 14)
    assert quoted.cache.quotes is not None
    quoted.cache.quotes.forget()
    serve(quoted, other)
    if is_mistaken:
        with pytest.raises(Wrong, match="are another's, or of other text"):
            serve_quote(quoted, other, 14)
        return
    _, second = serve_quote(quoted, other, 14)
    assert second.key != first.key
    assert second.num_moved == first.num_moved
    assert second.loaded is not None
    assert second.loaded.num_pages * PAGE == len(quote(quoted, other, 0)), "but for new text"
