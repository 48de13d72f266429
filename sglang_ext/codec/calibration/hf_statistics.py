"""What calibration measures by running a Hugging Face model: moments, gradients, KL at a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.calibration import design
from sglang_ext.codec.calibration.hf_capture import CausalLm, compare
from sglang_ext.codec.calibration.moments import NUM_SINKS, MomentSums, num_samples, rows_of
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.float_bits import from_float32, to_float32

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Progress = Callable[[str], None]


def cut_windows(
    model: CausalLm, texts: Sequence[str], options: CalibrationOptions
) -> tuple[list[I64], int]:
    """Windows of tokens, spread evenly over the text, held-out ones first; and their prefix."""
    config = model.model.config.get_text_config(decoder=True)
    following = options.continuation_tokens
    context = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    prefix = min(options.prefix_tokens, context - following)
    tokens = model.tokenize("\n\n".join(texts))
    lead = model.leading_tokens()
    stride = prefix + following - len(lead)
    starts = range(0, len(tokens) - stride + 1, stride)
    wanted = options.num_windows + options.held_out
    if prefix < 2 * NUM_SINKS or len(starts) < options.held_out + 2:
        raise ValueError(
            f"calibration needs {(options.held_out + 2) * stride} tokens of text, got {len(tokens)}"
        )
    order = np.random.default_rng(options.seed).permutation(len(starts))[:wanted]
    cut = [np.concatenate([lead, tokens[starts[i] : starts[i] + stride]]) for i in order]
    return cut, prefix


def collect(
    model: CausalLm,
    windows: Sequence[I64],
    prefix: int,
    block: int,
    options: CalibrationOptions,
    tell: Progress,
) -> tuple[MomentSums, F32]:
    """Moments and sample rows of the windows, and rows of their first tokens."""
    sums, first = MomentSums(block), []
    for index, window in enumerate(windows):
        capture = model.prefill(window[:prefix])
        values = to_float32(capture.planes, capture.dtype)
        rows = rows_of(values)
        sums.add(rows[NUM_SINKS:])
        first.append(rows[:NUM_SINKS])
        every = max(1, len(windows) * prefix // num_samples(rows.shape[1]))
        sums.samples.append(rows[NUM_SINKS::every])
        for gradient in _gradients(model, values, window[prefix:], options, index):
            sums.add_gradient(rows_of(gradient)[NUM_SINKS:])
        tell(f"window {index + 1} of {len(windows)}")
    return sums, np.concatenate(first)


def _gradients(
    model: CausalLm, values: F32, following: I64, options: CalibrationOptions, index: int
) -> Iterator[F32]:
    """Gradients [S, T, C] of the log-likelihood of tokens that the model itself predicts.

    Such tokens are drawn at each position given the text before it. Their scores have mean zero and
    are uncorrelated between positions, so the square of the sum estimates the sum of the squares.
    """
    import torch

    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + index)
    planes = torch.from_numpy(values).to(model.device)
    keys = planes[0::2].clone().requires_grad_()
    states = planes[1::2].clone().requires_grad_()
    logs = torch.log_softmax(model.logits(model.turn(keys), states, following), -1)
    for draw in range(options.num_draws):
        drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
        score = logs.gather(1, drawn.to(logs.device)).sum()
        more = draw + 1 < options.num_draws
        of_keys, of_states = torch.autograd.grad(score, (keys, states), retain_graph=more)
        gradient = torch.empty_like(planes)
        gradient[0::2], gradient[1::2] = of_keys, of_states
        yield np.asarray(gradient.cpu().numpy(), np.float32)


def step_for_kl(
    model: CausalLm,
    transform: design.Transform,
    windows: Sequence[I64],
    prefix: int,
    options: CalibrationOptions,
    tell: Progress,
) -> float:
    """The step at which the mean KL over held-out windows is the target."""
    captures = [model.prefill(window[:prefix]) for window in windows]
    following = [window[prefix:] for window in windows]
    references = [
        model.continuation(capture.rotated, tokens, rotated=True)
        for capture, tokens in zip(captures, following, strict=True)
    ]
    values_per_window = captures[0].planes.size
    # A step's noise is step^2 / 12 in every coordinate of the metric, and KL half the sum.
    step = float(np.sqrt(24 * options.target_kl * len(following[0]) / values_per_window))
    for _ in range(4):
        damage = []
        for capture, tokens, reference in zip(captures, following, references, strict=True):
            rows = design.restored(
                transform, rows_of(to_float32(capture.planes, capture.dtype)), step
            )
            planes = rows.reshape(len(rows), -1, capture.planes.shape[2]).transpose(1, 0, 2)
            bits = from_float32(np.ascontiguousarray(planes), capture.dtype)
            damage.append(compare(reference, model.continuation(bits, tokens), tokens).kl.mean())
        kl = max(float(np.mean(damage)), 1e-9)
        tell(f"step {step:.4g}: KL {kl:.5f}")
        step *= float(np.clip(np.sqrt(options.target_kl / kl), 0.1, 10))
    return step
