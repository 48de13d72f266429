"""Speed of the content match: 32,768 tokens against a million stored pages, on one core.

Times are CPU time of the searching thread, so that a busy machine does not count as slowness.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.core.case import CaseFailedError
from bench.core.stats import median, percentile
from sglang_ext.truncation.rolling import MatchIndex

PROMPT_TOKENS, PAGE, NUM_PAGES = 32_768, 64, 1_000_000
_CHAIN_PAGES, _VOCABULARY, _GROUP = 500, 128_000, 1


def measure_match(num_searches: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Times searches of prompts that match nothing, of cut conversations, and of a repeat.

    Returns:
        Milliseconds of CPU by kind, `insert_us` a page, `bytes_per_page` (its tokens included).

    Raises:
        CaseFailedError: a cut conversation was not found whole.
    """
    tell("content match: filling the index")
    rng = np.random.default_rng(2)
    index = MatchIndex(PAGE, NUM_PAGES)
    kept: list[np.ndarray[Any, Any]] = []
    spent_s = 0.0
    for number in range(NUM_PAGES // _CHAIN_PAGES):
        chain = _random(rng, PAGE * _CHAIN_PAGES)
        begin_s = time.thread_time()
        index.insert_chain(_GROUP, chain)
        spent_s += time.thread_time() - begin_s
        if number % 200 == 0:
            kept.append(chain)
    tell("content match: searching")
    times: dict[str, list[float]] = {"nothing": [], "cut": [], "repeat": []}
    index.find(_random(rng, PROMPT_TOKENS), _GROUP)
    for number in range(num_searches):
        _timed(index, _random(rng, PROMPT_TOKENS), times["nothing"])
        chain = kept[number % len(kept)]
        cut, head = int(rng.integers(1, 2000)), int(rng.integers(10, 200))
        prompt = _random(rng, PROMPT_TOKENS)
        length = min(chain.size - cut, PROMPT_TOKENS - head - 100)
        prompt[head : head + length] = chain[cut : cut + length]
        run = _timed(index, prompt, times["cut"])
        if run is None or (run.start, run.length) != (head, length):
            raise CaseFailedError(f"a stored stretch of {length} tokens at {head} gave {run}")
        _timed(index, np.resize(chain[:PAGE], PROMPT_TOKENS), times["repeat"])
    return {
        "ms": {
            kind: {"p50": median(all_), "p95": percentile(all_, 95)} for kind, all_ in times.items()
        },
        "samples": times,
        "insert_us": spent_s / NUM_PAGES * 1e6,
        "bytes_per_page": index.num_bytes / len(index),
    }


def _timed(index: MatchIndex, prompt: np.ndarray[Any, Any], times: list[float]) -> Any:
    begin_s = time.thread_time()
    run = index.find(prompt, _GROUP)
    times.append(1e3 * (time.thread_time() - begin_s))
    return run


def _random(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, _VOCABULARY, count, dtype=np.int32)
