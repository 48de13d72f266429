"""Exact, truncated, forked and quoting prompts at random: nobody meets KV that is not theirs.

See `truncation_world`. Every request is compared with the brute-force model at every forward,
insert and load. The long form has more requests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long_form import count
from tests.property.worlds import truncation_world
from tests.property.worlds.coverage import missing, run_until_all_seen
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
