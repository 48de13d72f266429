"""Recall of facts in the part of a dialogue that a cut keeps: recomputed against reused KV.

Dialogues in the form that the bundled model was trained on: the user tells registers, one a line,
and asks for one. The list grows beyond the window; when it is full its oldest lines go (each counts
as a message, so that what stays has the trained form), and the model is asked for registers told
in the lines that stay. Both ways of keeping KV are asked the same questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bench.truncation.chat import CONTEXT, Conversation, Mode
from bench.truncation.kv import PooledLm
from sglang_ext.codec.calibration.hf_capture import I64
from sglang_ext.truncation.cut import Messages

MODES: tuple[Mode, ...] = ("recompute", "reuse")
NUM_CUTS = 3
QUESTIONS = 12  # at most, behind each cut of a dialogue
_USER = "<|user|>"
_ROOM = 24  # for a question and its answer


@dataclass
class Recall:
    """Right (True) or wrong answers by mode: lists of [questions] by cut, paired between modes."""

    right: dict[Mode, list[list[bool]]] = field(
        default_factory=lambda: {mode: [[] for _ in range(NUM_CUTS)] for mode in MODES}
    )

    def share(self, mode: Mode) -> list[float]:
        """Of right answers, after each number of cuts."""
        return [float(np.mean(answers)) for answers in self.right[mode]]

    def interval(self, mode: Mode) -> list[tuple[float, float]]:
        """95 % interval of the share less recomputation's: paired bootstrap over questions."""
        out = []
        for mine, exact in zip(self.right[mode], self.right["recompute"], strict=True):
            extra = np.asarray(mine, np.float64) - np.asarray(exact, np.float64)
            picks = np.random.default_rng(7).integers(0, extra.size, (2000, extra.size))
            low, high = np.percentile(extra[picks].mean(axis=1), [2.5, 97.5])
            out.append((float(low), float(high)))
        return out


class _Dialogue:
    """A list of registers; `facts` are (name, number, first token of its line)."""

    def __init__(self, model: PooledLm, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
        names = [first + second for first in syllables for second in syllables]
        self.names = [str(name) for name in self.rng.permutation(names)]
        self.model = model
        self.ids = [*map(int, model.lm.leading_tokens()), *model.ids(_USER)]
        self.head = len(self.ids)
        self.facts: list[tuple[str, str, int]] = []

    def lines(self) -> Messages:
        """Where lines begin."""
        begins = np.asarray([begin for _, _, begin in self.facts], np.int64)
        return Messages(begins, begins)

    def grow(self, limit: int) -> None:
        """Adds lines until there are more than `limit` tokens."""
        while len(self.ids) <= limit:
            name, number = self.names.pop(), str(self.rng.integers(100, 1000))
            self.facts.append((name, number, len(self.ids)))
            self.ids += self.model.ids(f"\nregister {name}: {number}")


def measure_recall(model: PooledLm, num_dialogues: int, tell: Callable[[str], None]) -> Recall:
    """Asks for registers in the kept part, behind one, two and three cuts."""
    found = Recall()
    for seed in range(num_dialogues):
        tell(f"recall, dialogue {seed} of {num_dialogues}")
        _run_dialogue(_Dialogue(model, seed), found)
    return found


def _run_dialogue(dialogue: _Dialogue, found: Recall) -> None:
    limit = CONTEXT - _ROOM
    # The whole window but its last line, which then goes over it.
    dialogue.grow(limit)
    last = dialogue.facts[-1][2]
    first = Conversation(dialogue.model, "reuse", dialogue.head, limit=limit)
    first.feed(np.asarray([dialogue.ids[:last]]))
    chats = {mode: first.fork(mode) for mode in MODES}
    for number in range(NUM_CUTS):
        for chat in chats.values():
            chat.feed(np.asarray([dialogue.ids]), dialogue.lines())
        cut = chats["reuse"].cut
        _ask(dialogue, chats, cut.tail_start, number, found)
        dialogue.grow(limit + cut.num_dropped)
        # What is recomputed is so at the next cut, whole.
        chats["reuse"].feed(np.asarray([dialogue.ids[: dialogue.facts[-1][2]]]), dialogue.lines())


def _ask(
    dialogue: _Dialogue,
    chats: dict[Mode, Conversation],
    tail_start: int,
    number: int,
    found: Recall,
) -> None:
    kept = [fact for fact in dialogue.facts if fact[2] >= tail_start]
    order = dialogue.rng.permutation(len(kept))[:QUESTIONS]
    asked = [
        (
            dialogue.model.ids(f"\nWhat is register {kept[at][0]}?<|end|><|assistant|>"),
            dialogue.model.ids(kept[at][1]),
        )
        for at in order
    ]
    batch: I64 = np.zeros((len(asked), max(len(q) + len(a) for q, a in asked)), np.int64)
    for row, (question, answer) in enumerate(asked):
        batch[row, : len(question) + len(answer)] = question + answer
    for mode, chat in chats.items():
        said = chat.cached.peek(batch).argmax(-1).numpy()
        for row, (question, answer) in enumerate(asked):
            begin = len(question) - 1
            right = said[row, begin : begin + len(answer)].tolist() == answer
            found.right[mode][number].append(right)
