"""Finds steps of pages that do not fit their state, on whatever thread they are taken."""

from __future__ import annotations

from sglang_ext.tiers.store.books.page_states import Step
from sglang_ext.tiers.store.books.page_table import PageTable
from sglang_ext.tiers.store.types import Rows

misfits: list[str] = []
"""What was found; a thread that moves pages would only count and log what is raised there."""


def check_steps() -> None:
    """From now on every table of this process looks at the states from which it takes steps."""
    original = PageTable.take

    def take(self: PageTable, step: Step, rows: Rows) -> None:
        flags = self.index.flags[rows]
        wrong = flags[~step.fits(flags)]
        misfits.extend(f"{step.name} from {state:08b}" for state in set(wrong.tolist()))
        original(self, step, rows)

    PageTable.take = take  # type: ignore[method-assign]
