"""A sample of `fuzz_flags`: nothing is accepted that fails behind the weights."""

from __future__ import annotations

from collections import Counter

from tests.faults.fuzz.fuzz_flags import run
from tests.long_form import count

NUM_CASES = count(12, 1000)


def test_nothing_is_accepted_that_cannot_be_built() -> None:
    cases = run(NUM_CASES, seed=4)
    failed = [case for case in cases if case["end"] == "FAILED"]
    assert not failed, failed
    ends = Counter(case["end"] for case in cases)
    assert ends["accepted"] >= NUM_CASES // 6, ends
    assert ends["refused"] >= NUM_CASES // 6, ends
