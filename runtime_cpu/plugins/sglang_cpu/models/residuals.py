"""What Kimi K3 needs of a GPU: streams that it makes and never waits for, and mixed residuals."""

from __future__ import annotations

import sys

import torch

_RESIDUALS = "sglang.srt.layers.attn_residual"


class IdleStream:
    """Stands for a stream of CUDA where there is none; SGLang uses them in captured graphs only."""


def allow_streams() -> None:
    """Lets a model make streams, which torch refuses without CUDA."""
    if not torch.cuda.is_available():
        setattr(torch.cuda, "Stream", IdleStream)  # noqa: B010


def bind_residuals() -> None:
    """Puts SGLang's own mixture in plain torch in the place of its kernels, if a model mixes."""
    residuals = sys.modules.get(_RESIDUALS)
    if residuals is not None:
        setattr(residuals, "_mix_fused", residuals.aggregate_stream_torch)  # noqa: B010
