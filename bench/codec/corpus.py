"""Text for the codec bench: calibration, test and shifted domain, no file in two of them.

A window is a prefix whose KV is coded and a continuation whose tokens are given.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.core.case import ROOT
from sglang_ext.codec.calibration.hf_capture import I64, CausalLm

TEXT = ROOT / "tests" / "assets" / "text"
PREFIX_TOKENS = 1500
CONTINUATION_TOKENS = 200
WINDOW_TOKENS = PREFIX_TOKENS + CONTINUATION_TOKENS
# Modules of Python's standard library: code, where calibration saw manuals.
_CODE = ("argparse", "ast", "inspect", "shutil", "subprocess", "tarfile", "typing", "zipfile")
_CALIBRATION_SHARE = 0.6


@dataclass(frozen=True)
class Question:
    """A question on a prefix: what is given after it, and the tokens that are right."""

    given: I64
    answer: I64


@dataclass(frozen=True)
class RecallPrompt:
    """A prefix that tells names and numbers, and questions for some of them."""

    prefix: I64
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens.

    Attributes:
        calibration_text: for profiles.
        calibration: prefixes of it, for tables and bases.
        test: windows of the same kind of text, other files.
        shifted: windows of another kind; empty where there is none.
        recall: prompts; empty for a model that was not trained for them.
        source: where the text comes from, for the report.
        path: the file it is from; None for the bundled text.
    """

    calibration_text: str
    calibration: list[I64]
    test: list[I64]
    shifted: list[I64]
    recall: list[RecallPrompt]
    source: str
    path: Path | None = None


def bundled_corpus(lm: CausalLm) -> Corpus:
    """The repository's texts, cut as the bundled profile's calibration cut them."""
    python = _documents("python-docs")
    postgres = _documents("postgresql-docs")
    cookbook = [path for path in python if "cookbook" in path.name]
    library = Path(sysconfig.get_path("stdlib"))
    text = _text([*cookbook, *postgres[0::2]])
    return Corpus(
        calibration_text=text,
        calibration=pieces(lm, text, PREFIX_TOKENS),
        test=pieces(lm, _text([path for path in python if path not in cookbook]), WINDOW_TOKENS),
        shifted=pieces(lm, _text([library / f"{name}.py" for name in _CODE]), WINDOW_TOKENS),
        recall=[make_recall(lm, seed) for seed in range(12)],
        source="calibration: logging cookbook and every second page of the PostgreSQL manual; "
        "test: the other pages of the Python documentation; shifted: Python's standard library",
    )


def file_corpus(lm: CausalLm, path: Path) -> Corpus:
    """A text file: its first 60 % calibrate, the rest tests.

    Raises:
        ValueError: it is too short for a window of each.
    """
    text = path.read_text(errors="replace")
    cut = int(len(text) * _CALIBRATION_SHARE)
    calibration = pieces(lm, text[:cut], PREFIX_TOKENS)
    test = pieces(lm, text[cut:], WINDOW_TOKENS)
    if not calibration or not test:
        raise ValueError(
            f"{path} has {len(text)} characters, too few for windows of {WINDOW_TOKENS} tokens"
        )
    return Corpus(
        text[:cut],
        calibration,
        test,
        [],
        [],
        f"{path.name}: its first {_CALIBRATION_SHARE:.0%} calibrate, the rest tests",
        path,
    )


def pieces(lm: CausalLm, text: str, length: int) -> list[I64]:
    """Windows of `length` tokens, one after another, each begun as the model's sequences are."""
    tokens, lead = lm.tokenize(text), lm.leading_tokens()
    own = length - len(lead)
    starts = range(0, len(tokens) - own + 1, own)
    return [np.concatenate([lead, tokens[start : start + own]]) for start in starts]


def make_recall(lm: CausalLm, seed: int, num_pairs: int = 48, num_asked: int = 4) -> RecallPrompt:
    """`num_pairs` registers with a number of three digits each, in the form of tinylm's README."""
    rng = np.random.default_rng(seed)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    names = [first + second for first in syllables for second in syllables]
    chosen = [str(name) for name in rng.choice(names, num_pairs, replace=False)]
    numbers = [str(number) for number in rng.integers(100, 1000, num_pairs)]
    told = "<|user|>" + "\n".join(
        f"register {name}: {number}" for name, number in zip(chosen, numbers, strict=True)
    )
    asked = rng.choice(num_pairs, num_asked, replace=False)
    prompts = [
        lm.tokenize(f"{told}\nWhat is register {chosen[at]}?<|end|><|assistant|>") for at in asked
    ]
    shortest = min(map(len, prompts))
    same = np.all([prompt[:shortest] == prompts[0][:shortest] for prompt in prompts], axis=0)
    cut = int(np.argmin(same)) - 1 if not same.all() else shortest - 1
    questions = tuple(
        Question(prompt[cut:], lm.tokenize(numbers[at]))
        for prompt, at in zip(prompts, asked, strict=True)
    )
    return RecallPrompt(np.concatenate([lm.leading_tokens(), prompts[0][:cut]]), questions)


def _documents(folder: str) -> list[Path]:
    return sorted(path for path in (TEXT / folder).iterdir() if path.name != "COPYRIGHT")


def _text(paths: Iterable[Path]) -> str:
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
