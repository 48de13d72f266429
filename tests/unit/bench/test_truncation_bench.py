"""The truncation bench: its own checks refuse what is wrong, and its report has the agreed keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.core.case import CaseFailedError
from bench.truncation.case import report_of
from bench.truncation.chat import CONTEXT, MODES, Conversation
from bench.truncation.kv import Cached, PooledLm, check_transform
from bench.truncation.ppl import NUM_CUTS, Losses, held_out_windows
from bench.truncation.recall import Recall
from bench.truncation.serve import Served, Turn, _check
from bench.truncation.texts import Texts
from sglang_ext.truncation.cut import CutRule


@pytest.fixture(scope="module")
def model() -> PooledLm:
    torch.set_num_threads(1)
    return PooledLm()


def test_k_that_is_not_moved_is_refused(model: PooledLm, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.stack(held_out_windows(model)[:2])[:, :128]
    cut = CutRule(128).cut(129, 128, 4)
    check_transform(model, text, cut)
    truncated = Cached.truncated
    monkeypatch.setattr(Cached, "truncated", lambda self, cut, _mode: truncated(self, cut, "naive"))
    with pytest.raises(CaseFailedError, match="moved to its new position"):
        check_transform(model, text, cut)


def test_moved_kv_says_nearly_what_recomputed_kv_says(model: PooledLm) -> None:
    text = held_out_windows(model)[3][None]
    first = Conversation(model, "reuse", 4)
    first.feed(text[:, :CONTEXT])
    end = CONTEXT + 100
    said = {}
    for mode in MODES:
        chat = first.fork(mode)
        said[mode] = torch.log_softmax(chat.feed(text[:, :end], num_scored=100)[0], -1)
        assert chat.cached.length == chat.cut.num_kept
    exact = said["recompute"]
    kl = {mode: float((exact.exp() * (exact - said[mode])).sum(-1).mean()) for mode in MODES}
    assert 0 < kl["reuse"] < 0.05 < kl["naive"]


def _turns(dropped: int, prompt: int) -> list[Turn]:
    chats = [
        Turn(chat, 1, dropped if chat < 3 else 0, chat < 3, 1200, prompt, 100, 1.0)
        for chat in range(10)
    ]
    return [*chats, Turn(0, 0, 0, False, 100, 100, 0, 1.0)]


def test_a_workload_that_was_not_cut_is_refused() -> None:
    _check(Served({"with": _turns(700, 500), "without": _turns(700, 500)}))
    with pytest.raises(CaseFailedError, match="0 of 10 conversations overflow"):
        _check(Served({"with": _turns(0, 500)}))
    with pytest.raises(CaseFailedError, match="over the context"):
        _check(Served({"with": _turns(700, 1020)}))


def test_the_report_has_the_agreed_keys() -> None:
    losses, recall, texts = Losses(), Recall(), Texts()
    for per_cut in losses.by_mode.values():
        for values in per_cut:
            values += [2.0, 3.0]
    for asked in recall.right.values():
        for answers in asked:
            answers += [True, False]
    texts.nll = {"recompute": [1.0, 2.0], "reuse": [1.0, 2.0]}
    texts.same, texts.example = [True, True], {"prompt": "p", "recompute": "a", "reuse": "a"}
    match = {
        "ms": {"cut": {"p50": 1.0, "p95": 1.0}},
        "samples": {"cut": [1.0]},
        "insert_us": 1.0,
        "bytes_per_page": 1.0,
    }
    served = Served({"with": _turns(700, 500), "without": _turns(700, 500)})
    report = report_of(losses, recall, texts, match, served)
    for key in ("ppl_recompute", "ppl_reuse", "ppl_naive", "recall_recompute", "recall_reuse"):
        assert len(report.results[key]) == NUM_CUTS
    assert report.results["ppl_reuse"][0] == pytest.approx(np.exp(2.5))
    assert report.results["hit_rate_with"] == report.results["hit_rate_without"] == 0.2
    assert report.n["chats_over"] == 3
    assert all(table.render() for table in report.tables)
