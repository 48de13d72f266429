"""As `media_world`, with a draft whose rows depend on the next token, so that keys are of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.property.media.media_world import MediaWorld, meaning
from tests.property.worlds.taint_world import IDENTITY, Request, Wrong

_IDENTITY = slice(IDENTITY, IDENTITY + 4)


class PairsMediaWorld(MediaWorld):
    """A token's row says which one follows, too: which image, where that is one's.

    That of the last token lacks it until the next one is there.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        super().__init__(folder, patch, seed, of_pairs=True, **options)

    def row_values(self, tokens: list[int], end: int) -> torch.Tensor:
        """As its base, with what is said of the next token added to that of each."""
        with_next = super().row_values(tokens, end + 1)
        found = with_next[:end].clone()
        found[: len(with_next) - 1] += with_next[1:]
        return found

    def forward(self, req: Request, start: int, end: int) -> None:
        """Computes tokens; of the one before them the next one is known by now."""
        super().forward(req, start, end)
        if start and self._lacks_next(req, start - 1):
            known = self.row_values(req.tokens, start)[-1]
            row = self.rows_of(req, start - 1, start)
            for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
                buffer[row, :, _IDENTITY] = known

    def check_attended(self, req: Request, end: int) -> None:
        """Rows are those of the prompt's own tokens, images and next tokens."""
        if not end:
            return
        self._meant = meaning(req)
        checked = end - self._lacks_next(req, end - 1)
        rows, expected = self.rows_of(req, 0, end), self.row_values(req.tokens, end)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            if not torch.equal(buffer[:, 0, _IDENTITY][rows][:checked], expected[:checked]):
                raise Wrong(f"rows of {req.rid} are another's")

    def _lacks_next(self, req: Request, at: int) -> bool:
        """Whether a token's row was computed when no token followed, of all layers."""
        row = self.rows_of(req, at, at + 1)
        alone = MediaWorld.row_values(self, req.tokens, at + 1)[-1:]
        return all(
            torch.equal(buffer[:, 0, _IDENTITY][row], alone)
            for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer)
        )
