"""Exact requests among truncated ones, against plain SGLang: `python -m bench.truncation.mix`.

A server with truncation is sent conversations that grow, fork, overflow and are quoted, with salts
and extra keys, and loses its device tier again and again. Plain SGLang, whose pool holds
everything, is sent those that fit, in the same order: every hit of its is a device hit. Answers to
them must have the same tokens and log-probabilities, from the same number of reused tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testkit.requests import flush_device
from testkit.server import Server
from testkit.workload import load_texts, load_tokenizer

PAGE, CONTEXT, NEW_TOKENS = 16, 512, 8
_HOST_GB, _DISK_GB = 0.2, 0.5
_KEYS: tuple[dict[str, str], ...] = ({}, {"extra_key": "team"}, {"cache_salt": "salt"})
_FLUSH_EVERY = 7


@dataclass
class Prompts:
    """The next prompt, at random: a conversation goes on, forks, or is quoted.

    Attributes:
        rng: draws everything.
        talks: conversations so far, as (tokens, fields of their requests).
    """

    rng: random.Random
    talks: list[tuple[list[int], dict[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = [token for text in load_texts(load_tokenizer()) for token in text]

    def _words(self, num: int) -> list[int]:
        at = self.rng.randrange(len(self._text) - num)
        return self._text[at : at + num]

    def next(self) -> tuple[list[int], dict[str, str]]:
        """A prompt and the fields that go with it."""
        rng = self.rng
        kind = rng.choices(("new", "on", "fork", "other key", "quote"), (2, 14, 3, 2, 3))[0]
        if not self.talks or kind == "new":
            tokens, fields = self._words(rng.randint(40, 300)), rng.choice(_KEYS)
        else:
            old, fields = rng.choice(self.talks)
            tokens = list(old)
            if kind == "fork":
                tokens = tokens[: rng.randint(1, len(tokens))]
            elif kind == "other key":
                fields = rng.choice(_KEYS)
            elif kind == "quote":  # the head and a tail, as a client would cut it
                tokens = tokens[:4] + tokens[-rng.randint(1, 400) :]
        tokens += self._words(rng.randint(8, 90))
        if len(tokens) > 1_500:
            tokens = tokens[:200]
        return tokens, fields

    def said(self, tokens: list[int], fields: dict[str, str]) -> None:
        """A conversation got an answer."""
        self.talks.append((tokens, fields))
        if len(self.talks) > 16:
            self.talks.pop(self.rng.randrange(len(self.talks)))


def _ask(server: Server, tokens: list[int], fields: dict[str, str]) -> dict[str, Any]:
    return server.generate(
        input_ids=tokens,
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )


def _answer(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        "tokens": answer["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "cached": meta["cached_tokens"],
    }


def compare(num_exact: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Serves the mix on both servers.

    Args:
        num_exact: requests that fit, to compare.
        folder: for the disk tier and the logs; empty.
        seed: of the mix.

    Returns:
        `exact`, `truncated`: requests; `equal`: exact ones with the same tokens, log-probabilities
        and reused tokens; `exact_reused`, `moved`: tokens; `different`: the first few that differ.
    """
    common: list[Any] = ["--page-size", PAGE, "--context-length", CONTEXT]
    plain_args = [*common, "--max-total-tokens", 400_000, "--sleep-on-idle"]
    ours_args = [*common, "--max-total-tokens", 2_048, "--enable-hier-kv"]
    ours_args += ["--hier-kv-host-size", _HOST_GB, "--hier-kv-disk-dir", folder / "disk"]
    ours_args += ["--hier-kv-disk-size", _DISK_GB, "--hier-kv-disk-segment-size", 0.02]
    options: dict[str, Any] = {"stop": "kill", "start_timeout_s": 600}
    plain = Server(plain_args, log_path=folder / "plain.log", **options).start()
    ours = Server(ours_args, log_path=folder / "ours.log", **options).start()
    try:
        plain.wait_ready()
        ours.wait_ready()
        return _serve(plain, ours, num_exact, seed)
    finally:
        plain.kill()
        ours.kill()


def _serve(plain: Server, ours: Server, num_exact: int, seed: int) -> dict[str, Any]:
    prompts = Prompts(random.Random(seed))
    found = {"exact": 0, "truncated": 0, "equal": 0, "exact_reused": 0, "moved": 0}
    different: list[Any] = []
    while found["exact"] < num_exact:
        tokens, fields = prompts.next()
        answer = _ask(ours, tokens, fields)
        details = (answer["meta_info"]["cached_tokens_details"] or {}).get("hier_kv", {})
        if "dropped" in details:
            found["truncated"] += 1
            found["moved"] += details["moved"]
        else:
            found["exact"] += 1
            mine, theirs = _answer(answer), _answer(_ask(plain, tokens, fields))
            found["exact_reused"] += mine["cached"]
            found["equal"] += mine == theirs
            if mine != theirs and len(different) < 5:
                different.append({"prompt_tokens": len(tokens), "ours": mine, "plain": theirs})
        prompts.said([*tokens, *answer["output_ids"]], fields)
        if (found["exact"] + found["truncated"]) % _FLUSH_EVERY == 0:
            flush_device(ours)
    return {**found, "different": different}


def main() -> int:
    """Prints the result as JSON; 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=300, help="requests to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the mix")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options.num, Path(folder), options.seed)
    print(json.dumps(result, indent=1))
    return 0 if result["equal"] == result["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
