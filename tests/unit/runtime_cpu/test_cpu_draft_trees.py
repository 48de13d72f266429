"""The CPU runtime's trees of draft tokens, against walks over the trees themselves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cpu.plugins.sglang_cpu.drafts import branch_rows
from tests.unit.runtime_cpu.stub_modules import load_stub

# Parents of tokens 1, 2, ... of one tree; token 0 is the root.
trees = st.integers(1, 8).flatmap(
    lambda num: st.tuples(*(st.integers(0, token) for token in range(num)))
)


@settings(max_examples=200, deadline=None)
@given(parents=trees, data=st.data())
def test_the_longest_path_of_right_guesses_is_accepted(
    parents: tuple[int, ...], data: st.DataObject
) -> None:
    module, num, seq_len, vocab = load_stub("draft_trees"), len(parents) + 1, 11, 3
    children = {at: [c for c, p in enumerate(parents, 1) if p == at] for at in range(num)}
    tokens = [0] * num
    for siblings in children.values():  # those of a parent differ
        for at, token in zip(siblings, data.draw(st.permutations(range(8))), strict=False):
            tokens[at] = token
    wanted = data.draw(st.lists(st.integers(0, vocab), min_size=num, max_size=num))
    mask = torch.eye(num, dtype=torch.bool)
    for at, parent in enumerate(parents, 1):
        mask[at] |= mask[parent]
    positions = torch.empty(num, dtype=torch.long)
    links = [torch.full((1, num), 7) for _ in range(3)]
    module.reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.tensor([seq_len]), positions, *links, 1, num
    )
    assert positions.tolist() == (mask.sum(1) + seq_len - 1).tolist()

    predicts = torch.zeros(num, dtype=torch.int32)
    accepted = torch.full((1, num), -1, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    module.verify_tree_greedy_cpu(
        predicts, accepted, count, torch.tensor([tokens]), *links, torch.tensor([wanted])
    )
    path, here = [0], 0
    while follower := next((c for c in children[here] if tokens[c] == wanted[here]), None):
        path.append(follower)
        here = follower
    assert accepted[0, : len(path)].tolist() == path
    assert (accepted[0, len(path) :] == -1).all()
    assert count.item() == len(path) - 1
    assert [predicts[at].item() for at in path] == [wanted[at] for at in path]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_chains_and_trees_are_linked_as_their_candidates_say(choices: list[int]) -> None:
    """Candidates in groups of 4, each group behind one of the group before."""
    module, topk, depth = load_stub("draft_trees"), 4, len(choices)
    # Group g holds candidates 4 g to 4 g + 3; group 0 follows the root, and group g > 0 the
    # candidate that was chosen of the group before.
    groups = [-1, *(topk * group + choice for group, choice in enumerate(choices[:-1]))]
    chosen = [topk * group + choice for group, choice in enumerate(choices)]
    others = [topk * group + (choice + 1) % topk for group, choice in enumerate(choices)]
    selected = sorted(chosen + others)
    num = len(selected) + 1
    mask = torch.zeros(num * num, dtype=torch.bool)
    positions = torch.empty(num, dtype=torch.long)
    links = [torch.full((1, num), -1) for _ in range(3)]
    module.build_tree_kernel_efficient_cpu(
        torch.tensor([groups]),
        torch.tensor([selected]),
        torch.tensor([20]),
        mask,
        positions,
        *links,
        topk,
        depth,
        num,
        1,
    )
    place = {candidate: at for at, candidate in enumerate(selected, 1)}
    for candidate, at in place.items():
        group = candidate // topk
        before = [0, *(place[c] for c in chosen[:group])]
        assert mask.view(num, num)[at].nonzero().flatten().tolist() == sorted({*before, at})
        assert positions[at] == 20 + group + 1
    again = [torch.empty(num, dtype=torch.long), *(torch.empty(1, num).long() for _ in range(3))]
    module.reconstruct_indices_from_tree_mask(mask, torch.tensor([20]), *again, 1, num)
    assert all(a.equal(b) for a, b in zip(again, [positions, *links], strict=True))


def test_a_token_whose_parent_was_not_selected_is_linked_to_none() -> None:
    """Of candidates 0 to 3 the first two follow the root, and 2 and 3 follow candidate 0."""
    module = load_stub("draft_trees")
    parents = module._parents([-1, 0], [1, 2], 2)
    assert parents == [-1, 0, -1]
    child, sibling = (torch.full((3,), -1) for _ in range(2))
    module._link(parents, child, sibling)
    assert child.tolist() == [1, -1, -1]
    assert sibling.tolist() == [-1, -1, -1]


def test_a_branch_attends_to_what_is_known_and_to_rows_of_its_own() -> None:
    """Pages of 4, two branches of 3 tokens; the first one goes on in the last known page."""
    table = torch.arange(64, dtype=torch.int32).view(2, 32)
    found = branch_rows(table, torch.tensor([0, 1]), torch.tensor([6, 4]), 2, 2, 3, 4)
    assert found.shape == (4, 8)
    known = list(range(6))
    assert found[:2].tolist() == [[*known, 6, 7], [*known, 6 + 8, 7 + 8]]
    known = list(range(32, 36))  # they end with a page, so one is enough for a branch
    assert found[2:, :6].tolist() == [[*known, 36, 37], [*known, 36 + 4, 37 + 4]]
