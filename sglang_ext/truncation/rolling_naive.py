"""What `rolling.MatchIndex.find` finds, said plainly: every place against every stored page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredPage:
    """A page in a tree of pages.

    Attributes:
        group: what must be equal besides the text.
        tokens: of the page.
        parent: id of the page before it, or None.
    """

    group: int
    tokens: tuple[int, ...]
    parent: int | None


def longest_run(prompt: Sequence[int], group: int, pages: Mapping[int, StoredPage]) -> int:
    """Tokens of the longest stretch of `prompt` along one path, with at least one whole page.

    Args:
        prompt: tokens.
        group: of the pages that count.
        pages: by id.
    """
    mine = {index: page for index, page in pages.items() if page.group == group}
    children: dict[int, list[StoredPage]] = {}
    for page in mine.values():
        if page.parent is not None:
            children.setdefault(page.parent, []).append(page)
    ids = {id(page): index for index, page in mine.items()}

    def after(index: int, place: int) -> int:
        best = 0
        for child in children.get(index, []):
            same = _equal(child.tokens, prompt[place:])
            if same == len(child.tokens):
                same += after(ids[id(child)], place + same)
            best = max(best, same)
        return best

    def before(index: int, place: int) -> int:
        parent = mine[index].parent
        if parent is None:
            return 0
        tokens = mine[parent].tokens
        same = _equal(tokens[::-1], prompt[:place][::-1])
        return same + (before(parent, place - same) if same == len(tokens) else 0)

    best = 0
    for index, page in mine.items():
        for place in range(len(prompt) - len(page.tokens) + 1):
            if tuple(prompt[place : place + len(page.tokens)]) == page.tokens:
                end = place + len(page.tokens)
                best = max(best, before(index, place) + len(page.tokens) + after(index, end))
    return best


def _equal(first: Sequence[int], second: Sequence[int]) -> int:
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    return same
