"""What the streaming decision is made from: sizes on offer, what levels are worth, speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class ChunkOffer:
    """What a store has of one chunk of a context.

    Attributes:
        num_tokens: tokens that the chunk covers.
        prefix_bytes: length of the shortest prefix of its stream that decodes at each level,
            coarsest first, strictly rising.
    """

    num_tokens: int
    prefix_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: no tokens, no levels, or sizes that do not rise.
        """
        sizes = (0, *self.prefix_bytes)
        if self.num_tokens < 1 or len(sizes) < 2 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(
                "a chunk on offer has tokens and, for each level, more bytes than for the one "
                f"before; got {self.num_tokens} tokens and {self.prefix_bytes}"
            )

    def bytes_between(self, have: int, want: int) -> int:
        """Bytes to fetch to go from one level (-1: nothing) to another."""
        start = self.prefix_bytes[have] if have >= 0 else 0
        return max(0, self.prefix_bytes[want] - start)


@dataclass(frozen=True)
class QualityScale:
    """What the levels are worth.

    Attributes:
        damage: expected KL divergence at each level, coarsest first; text has none.
        default_level: what a request without a deadline gets.
        floor_level: nothing coarser is ever used.
    """

    damage: tuple[float, ...]
    default_level: int
    floor_level: int = 0

    def __post_init__(self) -> None:
        """Checks the order.

        Raises:
            ValueError: a finer level is worse, or floor and default are not levels in order.
        """
        if any(coarse < fine for coarse, fine in pairwise(self.damage)):
            raise ValueError(f"a finer level must not do more damage, got {self.damage}")
        if not 0 <= self.floor_level <= self.default_level < len(self.damage):
            raise ValueError(
                f"expected 0 <= floor {self.floor_level} <= default {self.default_level} "
                f"< {len(self.damage)} levels"
            )

    def steps(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The levels worth stopping at, from the floor up: the lower hull of damage by bytes.

        Going through them in this order, all chunks at one before any goes to the next, spends
        each byte where it takes away most damage.

        Args:
            sizes: prefix bytes of a chunk by level.
        """
        hull: list[int] = []
        for level in range(self.floor_level, len(sizes)):
            while len(hull) > 1 and self._slope(sizes, hull[-2], hull[-1]) <= self._slope(
                sizes, hull[-2], level
            ):
                hull.pop()
            hull.append(level)
        return tuple(hull)

    def _slope(self, sizes: Sequence[int], coarse: int, fine: int) -> float:
        return (self.damage[coarse] - self.damage[fine]) / (sizes[fine] - sizes[coarse])


@dataclass(frozen=True)
class StreamCosts:
    """Speeds, as measured by whoever asks.

    Attributes:
        raw_bytes_per_token: KV of a token, decoded.
        decode_bytes_per_s: decoded bytes a second.
        prefill_s: seconds to compute a number of new tokens behind a number of tokens whose KV is
            there.
        request_s: from asking for bytes to the first of them.
    """

    raw_bytes_per_token: int
    decode_bytes_per_s: float
    prefill_s: Callable[[int, int], float]
    request_s: float = 0.0

    def decode_s(self, num_tokens: int) -> float:
        """Seconds to decode the KV of some tokens."""
        return num_tokens * self.raw_bytes_per_token / self.decode_bytes_per_s
