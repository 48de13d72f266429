"""Arguments of modes that one argument alone does not turn on: several ranks, and drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.faults.flag_models import model_folder

RANKS: tuple[tuple[str, ...], ...] = (
    ("--tp-size", "2"),
    ("--dp-size", "2"),
    ("--pp-size", "2"),
    ("--tp-size", "2", "--dp-size", "2"),
    ("--tp-size", "2", "--pp-size", "2"),
    ("--dp-size", "2", "--pp-size", "2"),
    ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"),
    ("--tp-size", "2", "--attn-dp-size", "2"),
    ("--tp-size", "4", "--attn-dp-size", "2"),
    ("--tp-size", "2", "--attn-dp-size", "2", "--dp-size", "2"),
    ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--pp-size", "2"),
    ("--tp-size", "2", "--ep-size", "2"),
    ("--tp-size", "2", "--attn-cp-size", "2"),
)

# Draft models, by the model that they guess for: what differs from its configuration.
_ONE_LAYER = {"num_hidden_layers": 1, "tie_word_embeddings": False}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft-eagle": {"architectures": ["LlamaForCausalLMEagle"], **_ONE_LAYER},
    "draft-eagle3": {"architectures": ["LlamaForCausalLMEagle3"], **_ONE_LAYER},
    "draft-narrow": {
        "architectures": ["LlamaForCausalLMEagle3"], **_ONE_LAYER, "num_key_value_heads": 1,
    },
    "draft-whole": {"num_hidden_layers": 2},
}  # fmt: skip

# Where a case's arguments name the folder of all models, which another process makes anew.
FOLDER = "{folder}"
_OWN = ""  # the draft layer of the model's own checkpoint
_DRAFTS_OF = {
    "EAGLE": ("draft-eagle", _OWN, "draft-whole"),
    "EAGLE3": ("draft-eagle3", "draft-narrow", _OWN),
    "NEXTN": (_OWN, "draft-eagle"),
    "STANDALONE": ("draft-whole", "draft-narrow"),
    "NGRAM": (_OWN,),
}
# Steps, branches and tokens of a guess; drawn one by one, as not all of them fit each other.
_SIZES = {
    "--speculative-num-steps": ("1", "2", "3", "5"),
    "--speculative-eagle-topk": ("1", "1", "1", "2", "4"),
    "--speculative-num-draft-tokens": ("2", "4", "6", "8"),
}
_CHAIN = ("3", "1", "4")  # which fit each other


def draw_mode(random: Random, name: str) -> list[str]:
    """Arguments of several ranks, of a draft, of both, or none.

    Args:
        random: draws.
        name: of the model, whose own draft layer is chosen where it has one.
    """
    kind = random.choice(("none", "none", "ranks", "draft", "both"))
    ranks = list(random.choice(RANKS)) if kind in ("ranks", "both") else []
    return ranks + (_draw_draft(random, name) if kind in ("draft", "both") else [])


def _draw_draft(random: Random, name: str) -> list[str]:
    algorithm = random.choice(list(_DRAFTS_OF))
    folder = random.choice(_DRAFTS_OF[algorithm])
    if name.startswith("deepseek") and random.random() < 0.6:
        algorithm, folder = "EAGLE", _OWN
    arguments = ["--speculative-algorithm", algorithm]
    if folder:
        arguments += ["--speculative-draft-model-path", f"{FOLDER}/{folder}"]
    fits = random.random() < 0.6
    for (flag, values), value in zip(_SIZES.items(), _CHAIN, strict=True):
        if fits:
            arguments += [flag, value]
        elif random.random() < 0.7:
            arguments += [flag, random.choice(values)]
    return arguments


def placed(arguments: list[str], folder: Path) -> list[str]:
    """A case's arguments, with the folder of all models in its place; drafts are made there."""
    for name in DRAFTS:
        if f"{FOLDER}/{name}" in arguments and not (folder / name).exists():
            model_folder(folder / name, DRAFTS[name])
    return [argument.replace(FOLDER, str(folder)) for argument in arguments]
