"""Equality with plain SGLang, for the `serve` case: output tokens and their log-probabilities.

The reference is plain SGLang's own device hit (the repeat of a prompt, its pool large enough), one
request at a time: a cached prefix changes rounding against no cache even there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.case import ROOT, CaseFailedError
from bench.core.output import Progress
from testkit.requests import by_tier, flush_device, settle
from testkit.server import Server

_TEXTS = ROOT / "tests" / "assets" / "text"
_NEW_TOKENS = 16
_PAGE = 64
_PAGE_BYTES = 266_240  # a slot of the bundled model's
_HOST_PAGES = 64
_PROMPT_CHARS = (1_000, 1_700, 2_500, 3_300, 4_100, 5_000)

Answer = tuple[list[int], list[float]]


def measure_exact(folder: Path, num_prompts: int, progress: Progress) -> dict[str, Any]:
    """Compares device, host and disk hits with plain SGLang's device hits, on the bundled model.

    Args:
        folder: for the disk tier; empty.
        num_prompts: prompts of 300 to 1,800 tokens of documentation.
        progress: where to say how far it is.

    Returns:
        `greedy_match`, `logprob_match` (shares), and `by_tier`: compared answers, and how many
        tokens were reused.

    Raises:
        CaseFailedError: an answer differs, or a tier was not used.
    """
    prompts = _prompts(num_prompts)
    common: list[Any] = ["--page-size", _PAGE, "--max-total-tokens", 65_536]
    plain = Server([*common, "--sleep-on-idle"], stop="kill").start()
    tiers: list[Any] = ["--enable-hier-kv", "--hier-kv-disk-dir", folder, "--hier-kv-disk-size", 1]
    tiers += ["--hier-kv-prefetch-policy", "wait_complete"]
    tiers += ["--hier-kv-host-size", _HOST_PAGES * _PAGE_BYTES / 2**30]
    ours = Server([*common, *tiers], stop="kill").start()
    try:
        plain.wait_ready()
        ours.wait_ready()
        progress.update("plain SGLang")
        expected = [_repeat(plain, prompt) for prompt in prompts]
        return _compare(ours, prompts, expected, progress)
    finally:
        plain.kill()
        ours.kill()


def _prompts(num: int) -> list[str]:
    """Pieces of documents, none a prefix of another."""
    paths = [p for p in sorted(_TEXTS.glob("*/*")) if p.name != "COPYRIGHT"]
    texts = [text for p in paths if len(text := p.read_text()) > max(_PROMPT_CHARS)]
    if len(texts) < num:
        raise CaseFailedError(f"expected {num} long documents in {_TEXTS}, found {len(texts)}")
    return [text[: _PROMPT_CHARS[at % len(_PROMPT_CHARS)]] for at, text in enumerate(texts[:num])]


def _ask(server: Server, prompt: str) -> tuple[Answer, dict[str, Any]]:
    answer = server.generate(
        text=prompt,
        sampling_params={"max_new_tokens": _NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
    )
    meta = answer["meta_info"]
    logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    return (answer["output_ids"], logprobs), meta


def _repeat(server: Server, prompt: str) -> Answer:
    _ask(server, prompt)
    return _ask(server, prompt)[0]


def _compare(
    server: Server, prompts: Sequence[str], expected: Sequence[Answer], progress: Progress
) -> dict[str, Any]:
    found: dict[str, list[tuple[Answer, int]]] = {"device": [], "host": [], "disk": []}

    def ask(tier: str, prompt: str) -> None:
        answer, meta = _ask(server, prompt)
        found[tier].append((answer, by_tier(meta).get(tier, 0)))

    for at, prompt in enumerate(prompts):
        progress.update(f"device and host hits, prompt {at + 1} of {len(prompts)}")
        _ask(server, prompt)
        ask("device", prompt)
        settle(server)
        flush_device(server)
        ask("host", prompt)
    flush_device(server)
    settle(server)
    for at, prompt in enumerate(prompts):  # by now the others pushed each of them out of DRAM
        progress.update(f"disk hits, prompt {at + 1} of {len(prompts)}")
        ask("disk", prompt)
    return _shares(found, expected)


def _shares(
    found: dict[str, list[tuple[Answer, int]]], expected: Sequence[Answer]
) -> dict[str, Any]:
    greedy, logprobs, by_tier_found = [], [], {}
    for tier, answers in found.items():
        same = [a[0] == b[0] for (a, _), b in zip(answers, expected, strict=True)]
        greedy += same
        logprobs += [a[1] == b[1] for (a, _), b in zip(answers, expected, strict=True)]
        tokens = sum(hit for _, hit in answers)
        by_tier_found[tier] = {"answers": len(answers), "hit_tokens": tokens}
        if not all(hit for _, hit in answers):
            raise CaseFailedError(f"an answer that should reuse tokens from {tier} reused none")
    shares = {
        "greedy_match": sum(greedy) / len(greedy),
        "logprob_match": sum(logprobs) / len(logprobs),
    }
    if min(shares.values()) < 1.0:
        raise CaseFailedError(f"answers differ from plain SGLang's device hits: {shares}")
    return {**shares, "by_tier": by_tier_found}
