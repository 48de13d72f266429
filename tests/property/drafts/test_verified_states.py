"""Which states SGLang's tree gets of answers that are guessed and verified, by its own functions.

A verification leaves a state behind each guess. SGLang chooses which one goes on, which one is kept
for its tree and under which length, and it may launch the next verification before it processes the
result of the last one (overlap scheduling). Here a state is a digest of the tokens that it is
behind, so each that a page's key would name is compared with the tokens of the answer up to there.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess
from runtime_cpu.plugins.sglang_cpu.pools.kept_states import scatter_mamba_states_after_mtp_verify
from sglang_ext.settings import speculation

inprocess.prepare()

from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs  # noqa: E402
from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent  # noqa: E402
from sglang.srt.speculative import spec_utils  # noqa: E402
from sglang.srt.speculative.spec_utils import _verify_commit_step_indices  # noqa: E402

PAGE = 64
OWN, KEPT = 0, (1, 2)  # slots of states: the request's, and those that the tree may get
_VOCABULARY = 50


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """States at every page's end, the nearest that they can be; as a server's arguments say."""
    exec_settings = SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False))
    for module in (spec_utils, batch_result_processor):
        monkeypatch.setattr(module, "mamba_track_grid", lambda page_size: page_size)
    monkeypatch.setattr(batch_result_processor, "get_exec", lambda: exec_settings)


class Pool:
    """What SGLang asks its pool of requests for."""

    mamba_ping_pong_track_buffer_size = len(KEPT)
    req_index_to_mamba_ping_pong_track_buffer_mapping = torch.tensor([KEPT])
    get_mamba_ping_pong_other_idx = HybridReqToTokenPool.get_mamba_ping_pong_other_idx
    get_mamba_ping_pong_keep_idx = HybridReqToTokenPool.get_mamba_ping_pong_keep_idx


class Processor:
    """What SGLang processes results with."""

    tree_cache = SimpleNamespace(page_size=PAGE)
    _mamba_prefix_cache_update = SchedulerBatchResultProcessor._mamba_prefix_cache_update
    _mamba_check_track_boundary = SchedulerBatchResultProcessor._mamba_check_track_boundary


class Answer:
    """A request that answers.

    Args:
        rng: what is guessed, and how much of it is right.
        num_prompt: tokens of the prompt.
        most: tokens of a verification: the one that is known and the guesses.
        commit: copies states behind verified tokens.
    """

    def __init__(
        self,
        rng: random.Random,
        num_prompt: int,
        most: int,
        commit: Callable[..., None] = scatter_mamba_states_after_mtp_verify,
    ) -> None:
        self._rng, self._most, self._commit = rng, most, commit
        self._known = [0]  # digests of the tokens that are known, up to each
        self._add(self._tokens(num_prompt + 1))
        self.num_told = self._num_known
        self._states = SimpleNamespace(
            temporal=torch.zeros(1, 1 + len(KEPT), 1, dtype=torch.int64),
            intermediate_ssm=torch.zeros(1, 1, most, 1, dtype=torch.int64),
            conv=[],
            intermediate_conv_window=[],
        )
        self._pool = Pool()
        self.kv = SimpleNamespace(
            mamba_ping_pong_track_buffer=torch.tensor(KEPT),
            mamba_next_track_idx=0,
            mamba_last_track_idx=0,
            mamba_last_track_seqlen=None,
            mamba_prev_track_seqlen=None,
        )

    @property
    def seqlen(self) -> int:
        """Tokens that the scheduler was told of."""
        return self.num_told

    def launch(self, num_right: int) -> Callable[[], int]:
        """Verifies guesses of which so many are right, less one.

        Returns:
            Processes the result; the tokens that it was of.
        """
        num_before = self._num_known - 1
        new = self._tokens(num_right)
        wrong = [-1 - token for token in self._tokens(self._most - num_right)]
        behind = [self._known[-1]]  # the first one is known
        for token in (*new[:-1], *wrong):
            behind.append(digest(behind[-1], token))
        self._states.intermediate_ssm[0, 0, :, 0] = torch.tensor(behind)
        self._add(new)
        batch: Any = SimpleNamespace(
            reqs=[self],
            req_pool_indices=torch.tensor([0]),
            req_to_token_pool=self._pool,
            seq_lens=torch.tensor([num_before]),
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            tree_cache=Processor.tree_cache,
        )
        set_mamba_track_indices_from_reqs(batch)
        index = torch.arange(self._most)
        last, kept = _verify_commit_step_indices(
            batch=batch,
            accept_index=index.where(index < num_right, torch.tensor(-1)).unsqueeze(0),
            accept_lens=torch.tensor([num_right]),
            draft_token_num=self._most,
        )
        slots = torch.tensor([OWN]), last, batch.mamba_track_indices, kept
        self._commit(self._states, *slots)
        assert int(self._states.temporal[0, OWN]) == self._known[-2]
        result: Any = SimpleNamespace(
            num_correct_drafts_per_req_cpu=[num_right - 1],
            num_non_draft_tokens_per_req=1,
            grammar_retained_tokens=None,
        )

        def process() -> int:
            self.num_told += num_right
            Processor()._mamba_prefix_cache_update(self, batch, result, 0)
            return num_right

        return process

    def check(self, num_tokens: int) -> int:
        """What the tree would get if the answer ended there; the tokens that it is behind."""
        component: Any = SimpleNamespace(cache=SimpleNamespace(req_to_token_pool=self._pool))
        chosen = MambaComponent._select_finished_checkpoint(component, self, num_tokens)
        if chosen is None:
            return 0
        num_named, slot = chosen
        assert num_named % PAGE == 0
        assert num_named <= num_tokens
        if num_named:
            assert int(self._states.temporal[0, KEPT[slot]]) == self._known[num_named]
        return int(num_named)

    @property
    def _num_known(self) -> int:
        return len(self._known) - 1

    def _add(self, tokens: list[int]) -> None:
        for token in tokens:
            self._known.append(digest(self._known[-1], token))

    def _tokens(self, num: int) -> list[int]:
        return [self._rng.randrange(_VOCABULARY) for _ in range(num)]


def digest(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little", signed=True), before)


def answered(rng: random.Random, most: int, num_steps: int, is_late: bool, **options: Any) -> int:
    """Plays an answer and looks at each place where it might end; at how many it had a state."""
    answer = Answer(rng, rng.randrange(1, 400), most, **options)
    waiting: list[Callable[[], int]] = []
    num_states = 0
    for _ in range(num_steps):
        waiting.append(answer.launch(rng.randrange(1, most + 1)))
        while len(waiting) > is_late:
            num_right = waiting.pop(0)()
            # All of what was told but the last token has rows; it may have ended within the run.
            for num_less in range(1, num_right + 1):
                num_states += answer.check(answer.num_told - num_less) > 0
    return num_states


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("most", [2, 4, 8, speculation._MOST_GUESSES])
def test_a_state_is_behind_the_verified_tokens_that_its_key_names(most: int, is_late: bool) -> None:
    found = 0
    for seed in range(8):
        rng = random.Random(f"{most} {is_late} {seed}")
        found += answered(rng, most, 800 // most, is_late)
    assert found > 500


def test_a_state_behind_a_guess_that_was_wrong_is_noticed() -> None:
    def commit(states: Any, own: Any, last: Any, slots: Any, kept: Any) -> None:
        later = torch.where(kept >= 0, states.intermediate_ssm.shape[2] - 1, kept)
        scatter_mamba_states_after_mtp_verify(states, own, last, slots, later)

    with pytest.raises(AssertionError):
        answered(random.Random(1), 4, 500, False, commit=commit)


def test_with_more_guesses_a_late_result_has_its_state_written_over() -> None:
    """So they are refused; at once it would be right."""
    most = 300
    answered(random.Random(1), most, 60, False)
    with pytest.raises(AssertionError):
        answered(random.Random(1), most, 60, True)


def test_where_states_are_close_fewer_guesses_are_let_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model's chunk may be less than 64 tokens: what is right there is no more than this."""
    page = 16
    monkeypatch.setattr(sys.modules[__name__], "PAGE", page)
    monkeypatch.setattr(Processor, "tree_cache", SimpleNamespace(page_size=page))
    arguments = {"page_size": page, "mamba_track_interval": page}
    assert answered(random.Random(1), speculation._most_guesses(arguments.get), 200, True) > 50
    with pytest.raises(AssertionError):
        answered(random.Random(1), speculation._MOST_GUESSES, 200, True)
