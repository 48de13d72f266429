"""Links in virtual time: how long bytes take when bandwidth changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GBPS = 1e9 / 8  # bytes a second


class Link(ABC):
    """A link whose bandwidth may change."""

    @abstractmethod
    def finish_s(self, start_s: float, chunk: int, num_bytes: float) -> float:
        """When bytes of a chunk have gone through that began to be sent at `start_s`."""

    @abstractmethod
    def seconds_per_byte(self, num_chunks: int, total_s: float) -> npt.NDArray[np.float64]:
        """What a byte of each chunk costs who knows everything and has `total_s`, `[N]`."""


@dataclass(frozen=True)
class SteadyLink(Link):
    """Always the same bandwidth."""

    bytes_per_s: float

    def finish_s(self, start_s: float, chunk: int, num_bytes: float) -> float:
        """See `Link`."""
        return start_s + num_bytes / self.bytes_per_s

    def seconds_per_byte(self, num_chunks: int, total_s: float) -> npt.NDArray[np.float64]:
        """See `Link`."""
        return np.full(num_chunks, 1 / self.bytes_per_s)


@dataclass(frozen=True)
class ChunkLink(Link):
    """A bandwidth for each chunk of the context, as CacheGen's figure 13 draws it.

    Whatever is sent of a chunk, at whatever time, is sent at that bandwidth.
    """

    bytes_per_s: tuple[float, ...]

    def finish_s(self, start_s: float, chunk: int, num_bytes: float) -> float:
        """See `Link`."""
        return start_s + num_bytes / self.bytes_per_s[chunk % len(self.bytes_per_s)]

    def seconds_per_byte(self, num_chunks: int, total_s: float) -> npt.NDArray[np.float64]:
        """See `Link`."""
        speeds = [self.bytes_per_s[at % len(self.bytes_per_s)] for at in range(num_chunks)]
        return 1 / np.array(speeds)


@dataclass(frozen=True)
class TimedLink(Link):
    """A bandwidth for each interval of time, the last one for ever."""

    interval_s: float
    bytes_per_s: tuple[float, ...]

    def finish_s(self, start_s: float, chunk: int, num_bytes: float) -> float:
        """See `Link`."""
        now_s, left = start_s, num_bytes
        while True:
            at = min(int(now_s / self.interval_s + 1e-9), len(self.bytes_per_s) - 1)
            end_s = (at + 1) * self.interval_s
            speed = self.bytes_per_s[at]
            if at == len(self.bytes_per_s) - 1 or left <= speed * (end_s - now_s):
                return now_s + left / speed
            left -= speed * (end_s - now_s)
            now_s = end_s

    def capacity_bytes(self, total_s: float) -> float:
        """Bytes that go through from the start until `total_s`."""
        starts = self.interval_s * np.arange(len(self.bytes_per_s))
        spans = np.clip(total_s - starts, 0, self.interval_s)
        spans[-1] = max(0.0, total_s - starts[-1])
        return float(spans @ np.array(self.bytes_per_s))

    def seconds_per_byte(self, num_chunks: int, total_s: float) -> npt.NDArray[np.float64]:
        """See `Link`; every byte costs the same, as the trace does not ask whose it is."""
        return np.full(num_chunks, total_s / self.capacity_bytes(total_s))


def random_chunk_link(rng: np.random.Generator, num_chunks: int) -> ChunkLink:
    """0.1 to 10 Gbps, uniform, for each chunk."""
    return ChunkLink(tuple(rng.uniform(0.1, 10.0, num_chunks) * GBPS))


def random_timed_link(rng: np.random.Generator, interval_s: float, length_s: float) -> TimedLink:
    """0.1 to 10 Gbps, uniform, for each interval."""
    count = int(np.ceil(length_s / interval_s))
    return TimedLink(interval_s, tuple(rng.uniform(0.1, 10.0, count) * GBPS))


def falling_link() -> TimedLink:
    """The paper's figure 7: 2 Gbps, 0.2 from the second second on, 1 from the fourth."""
    return TimedLink(1.0, tuple(speed * GBPS for speed in (2.0, 2.0, 0.2, 0.2, 1.0)))
