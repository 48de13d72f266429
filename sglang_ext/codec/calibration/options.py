"""How a calibration is made."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.codec.profile_file import MAX_LEVELS


@dataclass(frozen=True)
class CalibrationOptions:
    """How a profile is made; the defaults are those of the measurements in docs/codec.md.

    Attributes:
        num_windows: pieces of text to run, each ``prefix_tokens`` and ``continuation_tokens`` long.
        prefix_tokens: tokens whose KV is sampled; fewer if the model's context is shorter.
        continuation_tokens: tokens that look at that KV.
        num_draws: gradients from each window.
        max_block_channels: the largest transform; its cost per value grows with it.
        num_levels: levels, each with a third of the step of the one before.
        default_level: which of them gets ``target_kl``.
        target_kl: mean KL in nats, measured on windows held out, of the default level.
        held_out: windows for that.
        seed: of the draws.
    """

    num_windows: int = 48
    prefix_tokens: int = 1500
    continuation_tokens: int = 200
    num_draws: int = 2
    max_block_channels: int = 512
    num_levels: int = 7
    default_level: int = 2
    target_kl: float = 0.0015
    held_out: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not (1 <= self.num_levels <= MAX_LEVELS and 0 <= self.default_level < self.num_levels):
            raise ValueError(
                f"1 to {MAX_LEVELS} levels and a default below their number are wanted, got "
                f"{self.num_levels} and {self.default_level}"
            )
        counts = (self.num_windows, self.prefix_tokens, self.continuation_tokens, self.num_draws)
        if min(*counts, self.held_out, self.max_block_channels) < 1 or not self.target_kl > 0:
            raise ValueError("sizes, counts and the target KL of a calibration must be positive")
