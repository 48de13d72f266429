"""What the case `faults` counts, and the errors of its own checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


class FaultCheckError(RuntimeError):
    """A fault was not injected as meant, or was not counted: the run says nothing."""


def check(holds: object, message: str) -> None:
    """Ends the case unless something holds that its figures rely on.

    Raises:
        FaultCheckError: it does not.
    """
    if not holds:
        raise FaultCheckError(message)


@dataclass
class Tally:
    """Figures of one kind of fault.

    Attributes:
        injected: faults that the code under test met.
        wrong_tokens: answers that differ from plain SGLang's, or wrong pages handed out.
        failed_requests: requests that were answered with an error, or not at all.
        lost_acknowledged_pages: pages that the log says are on disk, and that are not.
    """

    injected: int = 0
    wrong_tokens: int = 0
    failed_requests: int = 0
    lost_acknowledged_pages: int = 0

    @property
    def harmless(self) -> bool:
        """Whether the faults did no harm."""
        return not (self.wrong_tokens or self.failed_requests or self.lost_acknowledged_pages)


@dataclass
class Tallies:
    """A `Tally` per kind, made on first use."""

    by_kind: dict[str, Tally] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Tally:
        return self.by_kind.setdefault(kind, Tally())

    @property
    def num_injected(self) -> int:
        """Faults of all kinds; any thread may ask."""
        return sum(tally.injected for tally in list(self.by_kind.values()))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain values, for JSON."""
        return {kind: asdict(tally) for kind, tally in sorted(self.by_kind.items())}
