"""Guesses that branch, and whose verification is heard of one step late; see `late_world`.

A verification writes a row for each token of a tree of guesses, one behind the other, whatever
branch it is of. Then the rows of the accepted branch are moved behind the root, and the draft's
rows are computed anew from what was verified. To guess, a draft has whole pages for each branch,
which begin with a copy of the last page of what is known. How rows are reserved, copied and moved
is left to SGLang's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.property.drafts.late_world import DRAFT, GUESSED, LateRequest, LateWorld, Step
from tests.property.worlds import taint_world
from tests.property.worlds.taint_world import LAYERS, PAGE

from sglang.srt.mem_cache import allocation_sizing  # isort: skip
from sglang.srt.mem_cache.memory_pool import (  # isort: skip
    MLATokenToKVPool,
    move_kv_cache_native,
)
from sglang.srt.speculative.eagle_worker_common import (  # isort: skip
    duplicate_prefix_tail_to_draft_branches,
)
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache  # isort: skip

STEPS, BRANCHES, NODES = 3, 2, 6  # of the nodes one is the root
MOST_TOKENS = 128  # of a request, with what is reserved for its branches
RIGHT = 0.7  # of the nodes with children, behind which one of these is right
TARGET = tuple(set(range(LAYERS)) - {DRAFT})


@dataclass
class Tree:
    """Guesses behind a token that is known, node 0.

    Attributes:
        paths: of each node the nodes from the root to it, both among them.
        tokens: of each node; the root's is not looked at.
    """

    paths: list[list[int]]
    tokens: list[int]

    def text(self, node: int) -> list[int]:
        """The tokens behind the root up to a node."""
        return [self.tokens[each] for each in self.paths[node][1:]]


class Layers:
    """Some layers of a world's pool, as a pool whose rows SGLang moves."""

    def __init__(self, world: BranchingWorld, layers: tuple[int, ...]) -> None:
        self._world, self._layers = world, layers

    def get_kvcache(self) -> Layers:
        """As SGLang's allocators have it."""
        return self

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As SGLang's pools have it; a forward does."""
        pool = self._world.kv_pool
        self._world.at_rows("moves", source, writes=False)
        self._world.at_rows("moves to", target, writes=True)
        k, v = ([each[layer] for layer in self._layers] for each in (pool.k_buffer, pool.v_buffer))
        if not self._world.moves_latent_rows:
            move_kv_cache_native(k, v, target, source)
            return
        rows: Any = SimpleNamespace(size=pool.size, page_size=pool.page_size, kv_buffer=[*k, *v])
        MLATokenToKVPool.move_kv_cache(rows, target, source)


class BranchingWorld(LateWorld):
    """A server with trees of drafts; it has many methods because `LateWorld` has.

    Attributes:
        moves_latent_rows: rows are moved as SGLang's pool of latent rows does it.
    """

    moves_latent_rows = False

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        spec = SimpleNamespace(
            speculative_algorithm="EAGLE",
            speculative_num_steps=STEPS,
            speculative_eagle_topk=BRANCHES,
        )
        for name, value in {
            "get_spec": spec,
            "get_schedule": SimpleNamespace(page_size=PAGE),
            "get_parallel": SimpleNamespace(attn_dcp_size=1),
            "max_speculative_num_draft_tokens": NODES,
        }.items():
            patch.setattr(allocation_sizing, name, lambda value=value: value)
        patch.setattr(taint_world, "MAX_TOKENS", MOST_TOKENS)
        self.reserved = allocation_sizing.get_alloc_reserve_per_decode()
        super().__init__(folder, patch, seed, **{"device_pages": 64, **options})

    def guess(self, req: LateRequest) -> tuple[list[int], list[int], list[Step]]:
        """See `LateWorld`; a tree, of which a branch is right as far as the model goes along."""
        before, start = list(req.known), len(req.known) - 1
        tree = self._grow()
        right = self._follow(tree)
        behind = {tree.tokens[node] for node in self._children(tree, right)}
        new = [*tree.text(right), self.rng.choice(sorted({0, 1, 2} - behind))]
        path = tree.paths[right]
        self.num_rejected += NODES - len(path)
        if path != list(range(len(path))):
            self.count("moves")
        assert start + NODES <= req.kv.kv_allocated_len
        table = self.rows_of(req, 0, req.kv.kv_allocated_len)
        rows, known = table[: start + NODES], [*before, *new]
        req.known = known
        steps: list[Step] = [
            lambda: self.draft(table, before, start),
            lambda: self.verify(req, rows, before, tree),
            lambda: self.move_accepted(rows[start:], path),
            lambda: self.extend(rows, known, start),
        ]
        return new, [*before, *tree.text(NODES - 1)], steps

    def _grow(self) -> Tree:
        """Of a node's children each has another token; no two trees need be alike."""
        tree = Tree([[0]], [0])
        while len(tree.paths) < NODES:
            parent = self.rng.randrange(len(tree.paths))
            taken = {tree.tokens[node] for node in self._children(tree, parent)}
            if len(tree.paths[parent]) > STEPS or len(taken) == BRANCHES:
                continue
            tree.paths.append([*tree.paths[parent], len(tree.paths)])
            tree.tokens.append(self.rng.choice(sorted({0, 1, 2} - taken)))
        return tree

    def _children(self, tree: Tree, parent: int) -> list[int]:
        return [at for at, path in enumerate(tree.paths) if path[:-1] == tree.paths[parent]]

    def _follow(self, tree: Tree) -> int:
        """The last node that is right."""
        node = 0
        while (children := self._children(tree, node)) and self.rng.random() < RIGHT:
            node = self.rng.choice(children)
        return node

    # ---- what the device does ----

    def draft(self, table: torch.Tensor, before: list[int], start: int) -> None:
        """The draft's guesses, in pages of their branches."""
        in_page = start % PAGE
        num_pages = -(-(in_page + STEPS) // PAGE)
        duplicate_prefix_tail_to_draft_branches(
            Layers(self, (DRAFT,)),
            table[None],
            *(torch.tensor([each]) for each in (start - in_page, in_page, num_pages)),
            BRANCHES,
            PAGE,
        )
        values = self.layer_values(DRAFT, before, len(before))[-1:] + GUESSED
        for branch in range(BRANCHES):
            first = start + branch * num_pages * PAGE
            self.put(DRAFT, table[first : first + STEPS - 1], values.expand(STEPS - 1, -1))

    def verify(self, req: LateRequest, rows: torch.Tensor, before: list[int], tree: Tree) -> None:
        """A row of each layer of the model for each node, by the tokens of its branch."""
        self.require_own(req, rows[:-NODES])
        for layer in TARGET:
            texts = [[*before, *tree.text(node)] for node in range(NODES)]
            values = [self.layer_values(layer, text, len(text))[-1] for text in texts]
            self.put(layer, rows[-NODES:], torch.stack(values))

    def move_accepted(self, rows: torch.Tensor, path: list[int]) -> None:
        """What was accepted lies one behind the other from here on."""
        batch = SimpleNamespace(seq_lens=torch.zeros(1, dtype=torch.int64), out_cache_loc=rows)
        accepted = torch.full((1, STEPS + 1), -1, dtype=torch.int32)
        accepted[0, : len(path)] = torch.tensor(path)
        num_right = torch.tensor([len(path) - 1])
        pool: Any = Layers(self, TARGET)
        move_accept_tokens_to_target_kvcache(batch, accepted, num_right, pool)

    def extend(self, rows: torch.Tensor, known: list[int], start: int) -> None:
        """The draft's rows of what is known; what is behind that is not looked at."""
        values = self.layer_values(DRAFT, known, len(known) - 1)[start:]
        rest = values[-1:].expand(NODES - len(values), -1) + GUESSED
        self.put(DRAFT, rows[start:], torch.cat([values, rest]))
