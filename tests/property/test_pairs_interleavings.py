"""Keys of pairs of tokens, as with an EAGLE draft, in random interleavings.

A row of a draft's KV depends on the token behind it, too. So here a row says which tokens are up to
it and which one follows, and a request may attend to none whose follower is another than its own.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from tests.long_form import count
from tests.property.worlds.coverage import run_until_counted
from tests.property.worlds.taint_world import IDENTITY, Request, World, Wrong

pytestmark = pytest.mark.usefixtures("scheduler_waits")

ROUNDS = count(2, 8)  # and on until all is seen


class PairsWorld(World):
    """Rows know the token behind them; a draft learns the last one's when it is sampled."""

    def row_values(self, tokens: list[int], end: int) -> torch.Tensor:
        prints, print_ = [], 0
        for at, token in enumerate(tokens[:end]):
            print_ = zlib.crc32(token.to_bytes(4, "little"), print_)
            own = print_
            if at + 1 < len(tokens):
                own = zlib.crc32(tokens[at + 1].to_bytes(4, "little"), own)
            prints.append([own >> shift & 127 for shift in (0, 8, 16, 24)])
        return torch.tensor(prints, dtype=torch.bfloat16)

    def forward(self, req: Request, start: int, end: int) -> None:
        if req in self.running:  # its last row was computed when no token was behind it yet
            row = self.rows_of(req, start - 1, start)
            value = self.row_values(req.tokens, start)[-1:, None]
            self.at_rows("learns what follows", row, writes=True)
            for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
                buffer[row, :, IDENTITY : IDENTITY + 4] = value
        super().forward(req, start, end)


@pytest.mark.parametrize(("seed", "with_disk"), [(0, True), (1, False)])
def test_no_row_is_behind_which_another_token_came(
    seed: int, with_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PairsWorld(tmp_path, monkeypatch, seed, lossy=False, with_disk=with_disk, of_pairs=True)
    shown = ["saved_pages", "loaded_pages", "restored_pages"]
    shown += ["promoted_pages"] if with_disk else ["saved_again_pages"]

    try:
        run_until_counted(world, tuple(shown), num_rounds=ROUNDS)
    finally:
        world.close()


def test_what_is_said_to_be_exact_is_with_pairs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a codec that loses something, and a draft; the world compares what is said."""
    world = PairsWorld(tmp_path, monkeypatch, 2, of_pairs=True)
    shown = (
        "saved_lossy_pages", "loaded_lossy_pages", "replaced_pages", "device_replaced_pages",
    )  # fmt: skip
    try:
        run_until_counted(world, shown, num_rounds=ROUNDS)
    finally:
        world.close()


def test_a_row_with_another_follower_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys of single tokens a page's last row is shared whatever comes behind it."""
    world = PairsWorld(tmp_path, monkeypatch, 1, lossy=False, with_disk=False)
    try:
        world.run([1, 2, 3, 4, 5])
        with pytest.raises(Wrong, match="another's"):
            world.run([1, 2, 3, 4, 6])
    finally:
        world.close()
