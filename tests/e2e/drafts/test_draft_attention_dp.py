"""Draft models under data parallel attention, on the real server.

Two groups of ranks serve requests of their own and run each forward together, one that has nothing
to do with idle batches of model and draft. What a group restores is compared with its device hits
bit for bit, as is how many guesses are right; without the draft's rows fewer are, of a GLM-4.5 here
(of others in `test_state_drafts.py`, `test_window_drafts.py`). What one group generated is compared
with what the other one stores of the same text, which it computes as a prompt: no guess is in it
that was wrong. A group finds what it and the other one have put into a shared store, where it is
coded.

By default Qwen3-Next with its draft layer has groups of one rank; the long form has Qwen3.5, a
GLM-4.5 with its own, and EAGLE3 of a gpt-oss and of a Qwen 3, groups of two ranks, and groups on
nodes of their own, and prompts that are cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.layout import HEADER_BYTES, PageLayout
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS
from testkit.drafts.eagle3 import (
    write_drafted_oss_model,
    write_drafted_qwen_model,
    write_oss_draft,
)
from testkit.drafts.glm_nextn import HEAD_DIM, KV_HEADS, LAYERS, write_drafted_glm_model
from testkit.drafts.nextn import NEXTN, PLAIN, write_nextn_model
from testkit.drafts.state_nextn import DRAFTED_MODELS, write_drafted_model
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.drafts.restored import check_same, codecs_on_disk
from tests.e2e.drafts.test_speculation import guesses, lose_part, page_keys, records, share
from tests.e2e.hier_server import (
    ask,
    by_tier,
    check_agreed,
    clear_tiers,
    connected,
    every_rank,
    real_prompts,
    settled,
    tokens_and_logprobs,
)
from tests.e2e.models.test_cut_hybrids import CONTEXT, check_new_cuts
from tests.e2e.nodes import Nodes
from tests.e2e.reuse.test_attention_dp import ENVIRONMENT, nodes_of, num_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
FIRST, SECOND = 0, 1  # the groups
LENGTHS, ANSWER = [150, 333], 24
# Answers to them fill five pages, while the other group has one request.
TOLD, LONG_ANSWER, FILLED = [100, 190, 250], 80, 5
# Of values, and of log-probabilities; of a wrong token they differ by 1 and more.
ROUNDING = {"float32": 5e-3, "bfloat16": 0.2}
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "512", "--max-running-requests", "12"]
BASE += ["--max-total-tokens", "4096", "--enable-hier-kv", "--hier-kv-host-size", "0.2"]
BASE += ["--hier-kv-write-policy", "write_through", "--hier-kv-prefetch-policy", "timeout"]
BASE += ["--hier-kv-prefetch-timeout-ms", "60000", "--hier-kv-disk-size", "0.5"]
BASE += ["--hier-kv-disk-segment-size", "0.01"]


GLM = "glm"
# Of these the draft layer is in the model's checkpoint, and nothing is kept but pages.
_OWN_LAYERS: dict[str, Callable[[Path], Path]] = {
    GLM: write_drafted_glm_model,
    PLAIN: lambda folder: write_nextn_model(folder, PLAIN),
}
CODED = ["--hier-kv-codec", "disk=lossless,remote=lossless"]


@dataclass(frozen=True)
class Case:
    """A model with what drafts for it.

    Attributes:
        model: of `DRAFTED_MODELS` or `_OWN_LAYERS`, or what EAGLE3 drafts for.
        way: how its ranks are arranged (`test_attention_dp.WAYS`).
        keeps_more: whether more is kept of a prefix than its pages: windows, or states.
        least: of guesses that are right.
        dtype: SGLang has experts of a gpt-oss in bfloat16 alone on a CPU.
    """

    model: str
    way: str
    keeps_more: bool = True
    least: float = 0.3
    dtype: str = "float32"

    @property
    def of_pairs(self) -> bool:
        """Whether keys are of pairs of tokens."""
        return self.model not in DRAFTED_MODELS

    def write(self, folder: Path) -> list[str]:
        """Writes what is served, and returns the arguments for it."""
        if not self.of_pairs:
            kind = write_drafted_model(folder / "model", self.model).kind
            states = ["--mamba-track-interval", f"{kind.grid}", "--max-mamba-cache-size", "80"]
            return [*NEXTN, *states]
        if self.model in _OWN_LAYERS:
            _OWN_LAYERS[self.model](folder / "model")
            return [*NEXTN]
        write = {"oss": write_drafted_oss_model, "qwen3": write_drafted_qwen_model}[self.model]
        write(folder / "model")
        draft = write_oss_draft(folder / "draft", folder / "model")
        named = ["--speculative-draft-model-path", str(draft)]
        return ["--speculative-algorithm", "EAGLE3", *DRAFTS, *named]


CASES = {
    "states-two-ranks": Case("qwen3_next", "two-ranks"),
    "whole-two-ranks": Case("qwen3", "two-ranks", keeps_more=False, least=0.15),
    "own-layer-two-ranks": Case(GLM, "two-ranks", keeps_more=False),
    "windows-two-ranks": Case("oss", "two-ranks", dtype="bfloat16"),
    "states-and-experts": Case("qwen3_5_moe", "two-ranks"),
    "windows-two-by-two": Case("oss", "two-by-two", dtype="bfloat16"),
    "states-two-by-two": Case("qwen3_5", "two-by-two"),
    "states-a-rank-a-node": Case("qwen3_next", "a-rank-a-node"),
}


def server_of(case: Case, folder: Path, args: list[str]) -> Nodes:
    """With the disks that the one before it left."""
    env = {**ENVIRONMENT, "SGLANG_MAMBA_CONV_DTYPE": case.dtype}
    every = [*BASE, "--dtype", case.dtype, *args]
    return nodes_of(case.way, every, folder, env=env, model=folder / "model")


def answers(server: Server, group: int, num: int = ANSWER) -> list[dict[str, Any]]:
    prompts = real_prompts(LENGTHS, seed=3)
    return [ask(server, prompt, num, routed_dp_rank=group) for prompt in prompts]


def device_hits(server: Server, group: int) -> list[dict[str, Any]]:
    """Answers behind what the device has, which has nothing then."""
    answers(server, group)
    hits = answers(server, group)
    assert all(by_tier(hit)["device"] >= PAGE for hit in hits), hits
    settled(server)
    flush_device(server)
    return hits


def check_restored(
    found: Sequence[dict[str, Any]], hits: Sequence[dict[str, Any]], tier: str
) -> None:
    """All that device hits reuse came from a tier."""
    assert [by_tier(answer)[tier] for answer in found] == [by_tier(hit)["device"] for hit in hits]


def generate(server: Server, least: float) -> list[list[int]]:
    """Texts of which the second group generates the end, several at once, and the first prefills.

    The first one has a request, too, and then none: batches of both are padded.
    """
    prompts = list(real_prompts(TOLD, seed=8))
    (other,) = real_prompts([70], seed=9)
    asked = [(prompt, SECOND, LONG_ANSWER) for prompt in prompts] + [(other, FIRST, 20)]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(
            pool.map(lambda one: ask(server, one[0], one[2], routed_dp_rank=one[1]), asked)
        )
    right, proposed = (sum(x) for x in zip(*map(guesses, found), strict=True))
    assert least < right / proposed < 1  # some were rejected
    texts = [[*p, *a["output_ids"]] for p, a in zip(prompts, found, strict=False)]
    for text in texts:
        assert ask(server, text, 1, routed_dp_rank=FIRST)["meta_info"]["cached_tokens"] == 0
    settled(server)
    return texts


def stored(case: Case, folder: Path, group: int) -> dict[tuple[str, bytes], Any]:
    """What a group has on its disks, by its rank in the group and its name."""
    found = {}
    for place in folder.glob(f"disk*/dp{group}-*"):
        for _, _, record in records(place):
            name = place.name.partition("-")[2], parse_header(record)[0].page_hash
            content = torch.from_numpy(record[HEADER_BYTES:].copy())
            found[name] = content.view(getattr(torch, case.dtype)).float().numpy()
    return found


def check_verified_alone(case: Case, folder: Path, texts: Sequence[Sequence[int]]) -> None:
    """What was generated is stored as what the same tokens give as a prompt, the draft's, too."""
    generated, computed = (stored(case, folder, group) for group in (SECOND, FIRST))
    ranks = num_ranks(case.way) // 2
    keys = {
        key
        for text, first in zip(texts, TOLD, strict=True)
        for page, key in enumerate(page_keys(text, of_pairs=case.of_pairs))
        if (page + 1) * PAGE > first
    }
    both = generated.keys() & computed.keys()
    assert len([name for name in both if name[1] in keys]) >= FILLED * ranks
    if case.keeps_more:
        pages = {key for text in texts for key in page_keys(text, of_pairs=case.of_pairs)}
        assert [name for name in both if name[1] not in pages]
    for name in both:
        off = ROUNDING[case.dtype]
        np.testing.assert_allclose(generated[name], computed[name], atol=off, rtol=off)


def check_without_rows(
    case: Case, folder: Path, args: list[str], hits: Sequence[dict[str, Any]]
) -> None:
    """With zeros in the place of the draft layer's rows the tokens are the same, and fewer guessed.

    Args:
        case: of a GLM-4.5, each of whose ranks has all heads.
        folder: with its model, and the disks of its ranks, which are changed.
        args: of its servers.
        hits: answers behind what the device had.
    """
    rows = (KV_HEADS * HEAD_DIM * 4,) * (LAYERS + 1)
    first, end = (PageLayout(PAGE, each, each, 4).tail_offset for each in (rows[:-1], rows))
    for path, start, record in list(records(folder)):
        assert record[first:end].any()
        lose_part(path, start, record, first, end)
    with server_of(case, folder, args) as nodes:
        without = answers(nodes.head, SECOND)
    check_restored(without, hits, "disk")
    assert [answer["output_ids"] for answer in without] == [hit["output_ids"] for hit in hits]
    assert share(without) < share(hits) - 0.1


@pytest.mark.sampled("states-two-ranks")
@pytest.mark.parametrize("name", CASES)
def test_what_a_group_restores_answers_and_guesses_as_a_device_hit(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    args = case.write(tmp_path)
    with server_of(case, tmp_path, args) as nodes:
        server = nodes.head
        hits = device_hits(server, SECOND)
        found = answers(server, SECOND)
        check_restored(found, hits, "host")
        check_same(found, hits)
        assert share(hits) > case.least
        texts = generate(server, case.least)
        check_agreed(nodes.log(), num_ranks(case.way))
    check_verified_alone(case, tmp_path, texts)
    if case.model == GLM:
        check_without_rows(case, shutil.copytree(tmp_path, tmp_path / "lost"), args, hits)
    (tmp_path / "store").mkdir()
    args += ["--hier-kv-remote-url", f"file://{tmp_path / 'store'}?size=1GB", *CODED]
    with server_of(case, tmp_path, args) as nodes:  # after a kill -9
        server = connected(nodes.head)
        found = answers(server, SECOND)
        check_restored(found, hits, "disk")
        check_same(found, hits)
        clear_tiers(server)
        answers(server, SECOND)  # computed and put into the store, from which the first one has it
        settled(server)
        fetched = answers(server, FIRST)
        check_restored(fetched, hits, "remote")
        for one, hit in zip(fetched, hits, strict=True):
            (tokens, values), (wanted, expected) = map(tokens_and_logprobs, (one, hit))
            assert tokens == wanted
            np.testing.assert_allclose(values, expected, atol=ROUNDING[case.dtype], rtol=0)
        assert abs(share(fetched) - share(hits)) < 0.1
        settled(server)
        clear_tiers(server)
        again = answers(server, SECOND)
        check_restored(again, hits, "remote")
        check_same(again, hits)
        settled(server)
        for rank in every_rank(server):
            for failures in ("save_failures", "load_failures", "remote_failed_pages"):
                assert rank["host"].get(failures, 0) == 0
        assert sum(rank["host"].get("remote_coded_pages", 0) for rank in every_rank(server)) > 0
        check_agreed(nodes.log(), num_ranks(case.way))
    assert "lossless" in codecs_on_disk(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model", [GLM, PLAIN, "qwen3"])
def test_a_group_computes_prompts_that_are_cut_anew_behind_each_new_cut(
    model: str, tmp_path: Path
) -> None:
    case = Case(model, "two-ranks")
    short = ["--context-length", str(CONTEXT), "--hier-kv-truncation", "overflow"]
    short += ["--hier-kv-codec", "disk=lossless"]
    with server_of(case, tmp_path, [*case.write(tmp_path), *short]) as nodes:
        check_new_cuts(
            nodes.head,
            PAGE,
            lambda again, answer: check_same([again], [answer]),
            routed_dp_rank=FIRST,
        )
        check_agreed(nodes.log(), num_ranks(case.way))
