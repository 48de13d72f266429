"""What truncated chats say: written with reused KV and with recomputed KV, scored by recomputation.

Chats of manual prose, all of equal message lengths. Each grows turn by turn through three cuts; the
last answer is begun for the model, which goes on at temperature 1, with the same random numbers
both ways (greedily a small model repeats itself). Both texts are scored on the whole kept prompt,
computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.codec.corpus import TEXT
from bench.truncation.chat import CONTEXT, Conversation, Mode
from bench.truncation.kv import Cached, PooledLm
from sglang_ext.codec.calibration.hf_capture import I64
from sglang_ext.truncation.cut import Messages
from sglang_ext.truncation.marks import MessageMarks, marks_of_tokenizer

MODES: tuple[Mode, ...] = ("recompute", "reuse")
NUM_CUTS = 3
_WORDS, _BEGUN = 60, 20  # tokens of a message, and of the answer that the model goes on with
_NEW = 48
_BATCH = 16
_NUM_SPECIAL = 6  # of the bundled tokenizer, its first ones
_SYSTEM = "<|system|>You quote the manual.<|end|>"


@dataclass
class Texts:
    """What was written, and its mean negative log-likelihood in nats by chat.

    Attributes:
        nll: by mode, [chats].
        same: share of chats in which both wrote the same.
        example: the end of one chat's prompt and both answers, one that differs if there is one.
    """

    nll: dict[Mode, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    same: list[bool] = field(default_factory=list)
    example: dict[str, str] = field(default_factory=dict)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the ratio, over chats."""
        mine, exact = (np.asarray(self.nll[mode]) for mode in ("reuse", "recompute"))
        picks = np.random.default_rng(7).integers(0, mine.size, (2000, mine.size))
        low, high = np.percentile(mine[picks].mean(1) / exact[picks].mean(1), [2.5, 97.5])
        return float(low), float(high)

    @property
    def ratio(self) -> float:
        """Mean NLL of what reuse wrote over that of what recomputation wrote."""
        return float(np.mean(self.nll["reuse"]) / np.mean(self.nll["recompute"]))


def measure_texts(model: PooledLm, num_chats: int, tell: Callable[[str], None]) -> Texts:
    """Lets chats be written both ways and scores them."""
    texts, marks = Texts(), marks_of_tokenizer(model.lm.tokenizer)
    chats = _chats(model, num_chats)
    for begin in range(0, num_chats, _BATCH):
        tell(f"texts, chat {begin} of {num_chats}")
        _run_batch(model, chats[begin : begin + _BATCH], marks, texts)
    return texts


def _chats(model: PooledLm, count: int) -> I64:
    """Chats [count, n] whose messages begin at the same places, long enough for three cuts."""
    paths = sorted(path for path in TEXT.glob("*/*") if path.name != "COPYRIGHT")
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    prose = [int(token) for token in model.lm.tokenize(text)]
    num_messages = (NUM_CUTS + 2) * CONTEXT // _WORDS
    starts = np.linspace(0, len(prose) - num_messages * _WORDS - 1, count).astype(int)
    chats = []
    for start in starts:
        ids = [*map(int, model.lm.leading_tokens()), *model.ids(_SYSTEM)]
        for number in range(num_messages):
            at = int(start) + number * _WORDS
            role = "<|assistant|>" if number % 2 else "<|user|>"
            ids += [*model.ids(role), *prose[at : at + _WORDS], *model.ids("<|end|>")]
        chats.append(ids)
    return np.asarray(chats, np.int64)


def _run_batch(model: PooledLm, chats: I64, marks: MessageMarks, texts: Texts) -> None:
    found = marks.find(chats[0])
    head, limit = found.first or 0, CONTEXT - _NEW
    # Prompts end within an answer, where the model is to go on; the last is the first one behind
    # the third cut, so that all its older text is reused.
    prompts = [int(at) + 1 + _BEGUN for at in np.setdiff1d(found.all, found.turns)]
    written: dict[Mode, I64] = {}
    for mode in ("reuse", "recompute"):
        chat = Conversation(model, mode, head, batch=len(chats), limit=limit)
        for end in prompts:
            begins = Messages(found.all[found.all < end], found.turns[found.turns < end])
            logits = chat.feed(chats[:, :end], begins)
            if len(chat.cut.starts) == NUM_CUTS:
                break
        if mode == "reuse":
            prompts = [end]  # recomputation needs no history
        prompt = np.concatenate([chats[:, :head], chats[:, chat.cut.tail_start : end]], axis=1)
        written[mode] = _write(chat.cached, logits[:, -1], seed=len(texts.same))
    for mode, text in written.items():
        texts.nll[mode] += _score(model, prompt, text)
    same = (written["reuse"] == written["recompute"]).all(axis=1)
    texts.same += same.tolist()
    if not texts.example or not same.all():
        row = int(np.argmin(same))
        decode = model.lm.tokenizer.decode
        texts.example = {
            "prompt": str(decode(prompt[row, -_BEGUN - _WORDS :])),
            **{mode: str(decode(text[row])) for mode, text in written.items()},
        }


def _write(cached: Cached, logits: torch.Tensor, seed: int) -> I64:
    """Sampled text [B, _NEW]; no special token is taken, so that all are of one length."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(_NEW):
        # The largest logit plus Gumbel noise is a sample of the distribution.
        noise = torch.from_numpy(rng.gumbel(size=tuple(logits.shape)).astype(np.float32))
        noise[:, :_NUM_SPECIAL] = -torch.inf
        chosen = (logits + noise).argmax(-1).numpy()[:, None]
        out.append(chosen)
        if len(out) < _NEW:
            logits = cached.append(chosen)[:, -1]
    return np.concatenate(out, axis=1)


def _score(model: PooledLm, prompt: I64, text: I64) -> list[float]:
    cached = Cached(model, len(prompt), CONTEXT)
    logits = cached.append(np.concatenate([prompt, text], axis=1), text.shape[1] + 1)
    said: Any = torch.log_softmax(logits[:, :-1], -1)
    chosen = said.gather(-1, torch.from_numpy(text)[..., None])[..., 0]
    nll: list[float] = (-chosen.mean(-1, dtype=torch.float64)).tolist()
    return nll
