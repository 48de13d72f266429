"""Attention of speculative decoding: a target model's verification, a draft model's steps.

SGLang builds a draft model's backends from a list of names of its own; `prepare_speculation` adds
this package's to it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import NAME
from .backend import CpuExtendAttnBackend
from .drafts import branch_rows


class DraftStepAttnBackend(CpuExtendAttnBackend):
    """Decodes one of a draft model's steps, a token of each branch of each request.

    Args:
        model_runner: the draft model's.
        step: how many of a branch's tokens precede the one that is decoded.
        num_branches: of each request.
        num_steps: of the drafts, by which SGLang lays out the branches' rows.
    """

    def __init__(self, model_runner: Any, step: int, num_branches: int, num_steps: int) -> None:
        super().__init__(model_runner)
        self._step = step
        self._num_branches, self._num_steps = num_branches, num_steps
        self._page_size: int = model_runner.page_size

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """SGLang's interface. The batch's lengths are those of the tokens that are known."""
        batch = SimpleNamespace(
            out_cache_loc=forward_batch.out_cache_loc,
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens + self._step + 1,
            encoder_lens=None,
        )
        return super().forward_decode(q, k, v, layer, batch, *args, **kwargs)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        if self._num_branches > 1:
            # To what decodes, each branch is a request of its own.
            num_known = seq_lens - self._step - 1
            sizes = self._num_branches, self._num_steps, self._page_size
            rows = branch_rows(req_to_token, req_pool_indices, num_known, self._step + 1, *sizes)
            req_to_token, req_pool_indices = rows, torch.arange(len(rows))
            seq_lens = seq_lens.repeat_interleave(self._num_branches)
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            *args, **options,
        )  # fmt: skip

    def lengths_of(self, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CpuExtendAttnBackend.lengths_of`."""
        lengths, news = super().lengths_of(forward_batch)
        return lengths + self._step + 1, news


class DraftAttnBackends:
    """A draft model's backends, one a step that runs the model.

    Attributes:
        attn_backends: of the steps.
    """

    def __init__(self, model_runner: Any, num_branches: int, num_steps: int) -> None:
        self.attn_backends = [
            DraftStepAttnBackend(model_runner, step, num_branches, num_steps)
            for step in range(num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """SGLang's interface."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def prepare_speculation() -> None:
    """Lets SGLang build a draft model's backends under this package's name.

    And lets it look up rows without Triton, as it does for ``torch_native``.
    """
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    allocation.get_last_loc = allocation.get_last_loc_torch
    create = DraftBackendFactory._create_backend
    if getattr(create, "offers_cpu", False):
        return

    def create_or_own(
        self: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        runner = self.draft_model_runner

        def steps() -> tuple[str, Any]:
            return NAME, DraftAttnBackends(runner, self.topk, self.speculative_num_steps)

        def extend() -> tuple[str, Any]:
            return NAME, CpuExtendAttnBackend(runner)

        own = steps if backend_map["triton"] == self._create_triton_decode_backend else extend
        return create(self, backend_name, {**backend_map, NAME: own}, *args, **kwargs)

    create_or_own.offers_cpu = True  # type: ignore[attr-defined]
    DraftBackendFactory._create_backend = create_or_own
