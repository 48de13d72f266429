"""Speculative decoding with the tiers, on the real server.

What is restored is compared with a device hit bit for bit, as is how many guesses of the draft are
right; and what is stored is compared with the KV of the same tokens, computed without speculation.

By default EAGLE runs on two ranks, with chains whose length SGLang adapts, and on one with these
and with trees of guesses; n-grams run on one. The long form has all, EAGLE3 and a whole model as a
draft among them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.layout import HEADER_BYTES, PageLayout
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import MAGIC, parse_header
from testkit.drafts.eagle import (
    DRAFTS,
    TREES,
    adaptive,
    write_eagle3_config,
    write_eagle_draft,
)
from testkit.rank_requests import ENVIRONMENT, JITTER_MS, WAYS
from testkit.requests import flush_device
from testkit.server import TINYLM, Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import (
    GIB,
    PAGE,
    ROUNDING,
    ask,
    by_tier,
    clear_tiers,
    connected,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Pages = dict[bytes, np.ndarray[Any, np.dtype[np.float32]]]

TARGET_LAYERS, HEADS, DIM = 8, 2, 64
DRAFT_LAYERS = {"eagle": 9, "standalone": 8}
BASE = ["--attention-backend", "cpu_extend", "--page-size", str(PAGE)]
BASE += ["--chunked-prefill-size", "256", "--max-total-tokens", "8192"]
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]
NGRAM += ["--speculative-num-draft-tokens", "4"]
# Among them prompts of whole pages, and of a token more: with pairs those are whole pages. Behind
# the first one an answer fills a page.
LENGTHS = [436, 512, 577]
# Enough guesses for their share to mean something.
ANSWER = 24
# Chats that come back from disk without their draft's KV.
LOST = (1, 2)
# How deep guesses go.
STEPS = 3
# Of the KV cache, of the draft's, too.
FP8 = ["--kv-cache-dtype", "fp8_e4m3"]
# SGLang reserves pages for each branch of a request.
IN_TREES = [*TREES, "--max-total-tokens", "16384"]
# Of ranks: with it each codes its share of a page, the draft's, too, into one store.
CODED = ["--hier-kv-codec", "disk=lossless,remote=lossless"]
# Of the prompts whose stored pages are compared the shortest one.
FEWEST = 2
# Of a log-probability in float32, where another number of tokens is computed at once.
OFF = 2e-3
# In float32, so that only another token can make another value.
EXACT = ["--dtype", "float32", "--hier-kv-rope", "delta"]
SWITCH = re.compile(r"Switch adaptive runtime state: steps (\d) -> (\d)")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "eagle": write_eagle_draft(folder / "good"),
        "eagle3": write_eagle3_config(folder / "eagle3"),
        "weak": write_eagle_draft(folder / "weak", noise=0.5),
        "steps": folder / "steps.json",
    }


def args_of(algorithm: str, drafts: dict[str, Path]) -> list[str]:
    kind, _, how = algorithm.partition("-in-")
    kv = FP8 if how == "fp8" else []
    if kind == "ngram":
        return [*NGRAM, *kv]
    path = TINYLM if kind == "standalone" else drafts[kind]
    name = "EAGLE" if kind == "weak" else kind.upper()
    args = ["--speculative-algorithm", name, "--speculative-draft-model-path", str(path)]
    if kind == "eagle3":
        args += ["--speculative-draft-load-format", "dummy"]
    if how == "steps":
        # In float32, as how many tokens are verified at once changes their rounding.
        return [*args, *adaptive(drafts["steps"]), "--dtype", "float32"]
    return [*args, *(IN_TREES if how == "trees" else DRAFTS), *kv]


def server_of(folder: Path, args: Sequence[str], **options: Any) -> Server:
    tiers = ["--enable-hier-kv", "--hier-kv-host-size", f"{(160 << 20) / GIB}"]
    tiers += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
    tiers += ["--hier-kv-disk-segment-size", "0.03", "--hier-kv-prefetch-policy", "timeout"]
    tiers += ["--hier-kv-prefetch-timeout-ms", "60000", "--hier-kv-write-policy", "write_through"]
    log = folder / "server.log"
    return Server([*BASE, *tiers, *args], log_path=log, stop="kill", start_timeout_s=400, **options)


def trees(kind: str) -> Any:
    """The case in which the guesses of a draft branch."""
    return pytest.param(f"{kind}-in-trees", marks=pytest.mark.newest_release)


def guesses(answer: dict[str, Any]) -> tuple[int, int]:
    """How many were right, and how many could have been, which of a tree are those of a branch."""
    facts = answer["meta_info"]
    return facts["spec_num_correct_drafts"], STEPS * facts["spec_verify_ct"]


def turns(
    server: Server, lengths: Sequence[int] = LENGTHS, num_new: int = ANSWER
) -> list[dict[str, Any]]:
    """Two turns of each chat; the second's prompt has what the first one generated."""
    found = []
    for first, more in zip(
        real_prompts(lengths, seed=3), real_prompts([70] * len(lengths), seed=4), strict=True
    ):
        answer = ask(server, first, num_new)
        found += [answer, ask(server, [*first, *answer["output_ids"], *more], num_new // 2)]
    return found


def assert_same(
    found: Sequence[dict[str, Any]], hits: Sequence[dict[str, Any]], off: float
) -> None:
    """The same tokens, with log-probabilities that differ by no more than `off`."""
    for answer, hit in zip(found, hits, strict=True):
        (tokens, values), (wanted, expected) = map(tokens_and_logprobs, (answer, hit))
        assert tokens == wanted
        np.testing.assert_allclose(values, expected, atol=off, rtol=0)


def share(answers: Sequence[dict[str, Any]]) -> float:
    pairs = [guesses(answer) for answer in answers]
    return sum(right for right, _ in pairs) / sum(proposed for _, proposed in pairs)


def share_of_tokens(answers: Sequence[dict[str, Any]]) -> float:
    """How much of what was answered had been guessed, of whatever number of guesses."""
    num = sum(len(answer["output_ids"]) for answer in answers)
    return sum(guesses(answer)[0] for answer in answers) / num


def check_switched(log: str) -> None:
    """Guesses were none, one and three deep, from one verification to the next."""
    assert {("0", "1"), ("1", "3"), ("3", "0")} <= set(SWITCH.findall(log))


@pytest.mark.sampled("eagle-in-trees")
@pytest.mark.parametrize(
    "algorithm",
    [
        *("eagle", "standalone", "eagle3", "ngram", "eagle-in-fp8", "ngram-in-fp8"),
        *("standalone-in-fp8", "eagle3-in-fp8", "eagle-in-steps"),
        *(trees("eagle"), trees("standalone"), trees("eagle3")),
    ],
)
def test_a_restored_prefix_answers_and_guesses_as_a_device_hit(
    algorithm: str, drafts: dict[str, Path], tmp_path: Path
) -> None:
    args, off = args_of(algorithm, drafts), 0.0
    kind, _, how = algorithm.partition("-in-")
    if kind == "ngram":
        # What it guesses depends on all that the process has said, and how many tokens are verified
        # at once on what it guesses: that rounds differently, which float32 keeps from mattering,
        # but where a value that is computed anew is rounded to 8 bits.
        args, off = [*args, "--dtype", "float32"], ROUNDING if how == "fp8" else OFF
    elif how == "steps":
        off = OFF
    with server_of(tmp_path, args) as server:
        turns(server)
        settled(server)
        flush_device(server)
        # Which tokens are verified together, and so their rounding, may be others behind a restored
        # prefix than behind a computed one: hits are on what the former leads to.
        turns(server)
        settled(server)
        hits = turns(server)
        settled(server)
        flush_device(server)
        from_dram = turns(server)
        settled(server)
        log = server.log()
    reused = [by_tier(answer)["device"] for answer in hits]
    assert min(reused) >= 384
    assert_same(from_dram, hits, off)
    assert [by_tier(answer)["host"] for answer in from_dram][::2] == reused[::2]
    lost = LOST if kind in DRAFT_LAYERS else ()
    if lost:
        texts = [text_of(hits, chat) for chat in lost]
        item_bytes = {"fp8": 1, "steps": 4}.get(how, 2)
        lose_draft_layers(tmp_path / "disk", DRAFT_LAYERS[kind], texts, item_bytes)
    with server_of(tmp_path, args) as server:
        from_disk = turns(server)
    assert [by_tier(answer)["disk"] for answer in from_disk][::2] == reused[::2]
    chats = range(len(LENGTHS))
    kept, kept_hits = (of_chats(found, set(chats) - {*lost}) for found in (from_disk, hits))
    without, lost_hits = (of_chats(found, {*lost}) for found in (from_disk, hits))
    assert_same(kept, kept_hits, off)
    assert [found["output_ids"] for found in without] == [hit["output_ids"] for hit in lost_hits]
    if kind == "ngram":
        return
    assert [guesses(answer) for answer in from_dram] == [guesses(answer) for answer in hits]
    if how == "steps":
        check_switched(log)
        # The first guesses behind a start are not as many as those behind an answer.
        assert abs(share_of_tokens(kept) - share_of_tokens(kept_hits)) < 0.1
        assert share_of_tokens(without) < share_of_tokens(lost_hits) / 2
    else:
        assert [guesses(answer) for answer in kept] == [guesses(answer) for answer in kept_hits]
    if kind == "eagle3":
        return  # random weights guess nothing
    assert min(share(lost_hits), share(hits)) > 0.5
    assert share(without) < share(lost_hits) - 0.1


@pytest.mark.long
@pytest.mark.newest_release
def test_guesses_that_branch_are_those_of_sglang_alone(
    drafts: dict[str, Path], tmp_path: Path
) -> None:
    """Behind prompts that are computed, and behind what the device has; the tokens, too."""
    args = args_of("eagle-in-trees", drafts)
    log = tmp_path / "plain.log"
    with Server([*BASE, *args], log_path=log, stop="kill", start_timeout_s=400) as server:
        wanted = [*turns(server), *turns(server)]
    with server_of(tmp_path, args) as server:
        found = [*turns(server), *turns(server)]
    assert_same(found, wanted, 0.0)
    assert [guesses(answer) for answer in found] == [guesses(answer) for answer in wanted]


@pytest.mark.sampled("weak-in-steps")
@pytest.mark.parametrize(
    "algorithm", ["eagle", "eagle-in-fp8", "weak-in-steps", "ngram", trees("eagle")]
)
def test_ranks_that_guess_agree_on_what_is_restored(
    algorithm: str, drafts: dict[str, Path], tmp_path: Path
) -> None:
    """Two tensor parallel ranks, their stores late; SGLang's consensus checker ends the server.

    From DRAM, and from a store that has each rank's share of a page coded, the draft's layers, too.
    """
    args, off, chats = [*args_of(algorithm, drafts), *WAYS["tp"]], 0.0, ((436, 577), 20)
    (tmp_path / "store").mkdir()
    args += [*CODED, "--hier-kv-remote-url", f"file://{tmp_path}/store?size=1GB"]
    if algorithm == "ngram":
        args, off = [*args, "--dtype", "float32"], OFF
    elif algorithm == "weak-in-steps":
        off = OFF
    env = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
    with server_of(tmp_path, args, env=env) as server:
        connected(server)
        turns(server, *chats)
        settled(server)
        flush_device(server)
        turns(server, *chats)  # see above
        settled(server)
        hits = turns(server, *chats)
        flush_device(server)
        restored = turns(server, *chats)
        stored = state(server)
        clear_tiers(server)
        decoded = turns(server, *chats)
        sent, log = state(server), server.log()
    assert log.count("Rank consensus checker is enabled") == 2
    assert "Found rank divergence" not in log
    reused = [by_tier(answer)["device"] for answer in hits]
    assert min(reused) >= 384
    for found, tier in ((restored, "host"), (decoded, "remote")):
        assert [by_tier(answer)[tier] for answer in found][::2] == reused[::2]
        assert_same(found, hits, off)
    assert all(rank["host"]["remote_coded_pages"] > 0 for rank in sent["tp_ranks"])
    if algorithm != "ngram":
        # The prompt whose pairs are whole pages has its last one computed, and then replaced.
        counts = [rank["host"].get("restored_pages", 0) for rank in stored["tp_ranks"]]
        assert counts[0] == counts[1] > 0
        for found in (restored, decoded):
            assert [guesses(answer) for answer in found] == [guesses(answer) for answer in hits]
        if algorithm == "weak-in-steps":
            check_switched(log)
        else:
            assert share(hits) > 0.5


def of_chats(answers: Sequence[dict[str, Any]], chats: set[int]) -> list[dict[str, Any]]:
    return [answer for at, answer in enumerate(answers) if at // 2 in chats]


def text_of(answers: Sequence[dict[str, Any]], chat: int) -> list[int]:
    """All tokens of a chat."""
    first = list(real_prompts(LENGTHS, seed=3))[chat]
    more = list(real_prompts([70] * len(LENGTHS), seed=4))[chat]
    one, other = answers[2 * chat : 2 * chat + 2]
    return [*first, *one["output_ids"], *more, *other["output_ids"]]


def records(folder: Path) -> Iterator[tuple[Path, int, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """Every record below a folder: its file, its place there and its bytes."""
    for path in sorted(folder.rglob("seg-*.hkv")):
        content = np.fromfile(path, np.uint8)
        for start in range(0, len(content) - HEADER_BYTES, BLOCK_BYTES):
            if bytes(content[start : start + 4]) == MAGIC:
                _, num_bytes = parse_header(content[start:])
                yield path, start, content[start : start + HEADER_BYTES + num_bytes]


def layout_of(item_bytes: int, draft_layers: int = 0) -> PageLayout:
    """The target's layers in a page, and the draft's behind them."""
    rows = (HEADS * DIM * item_bytes,) * (TARGET_LAYERS + draft_layers)
    return PageLayout(PAGE, rows, rows, item_bytes)


def lose_part(path: Path, at: int, record: Any, first: int, end: int) -> None:
    """Zeros in place of a record's bytes `[first, end)`; it stays sound."""
    record[first:end] = 0
    seal(record)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(record.tobytes())


def lose_draft_layers(
    folder: Path, draft_layers: int, texts: Sequence[Sequence[int]], item_bytes: int
) -> None:
    """Zeros in place of the drafts' KV, in the records of texts, which are otherwise sound."""
    first, end = (layout_of(item_bytes, layers).tail_offset for layers in (0, draft_layers))
    keys = {
        key for text in texts for pairs in (False, True) for key in page_keys(text, of_pairs=pairs)
    }
    num = 0
    for path, start, record in list(records(folder)):
        assert record[first:end].any()
        if parse_header(record)[0].page_hash not in keys:
            continue
        lose_part(path, start, record, first, end)
        num += 1
    assert num >= sum(len(text) // PAGE - 1 for text in texts)


def page_keys(tokens: Sequence[int], *, of_pairs: bool) -> list[bytes]:
    """SGLang's hashes of the whole pages of some tokens, or of their pairs with the next one."""
    ids = np.asarray(tokens, "<u4")
    units = np.stack([ids[:-1], ids[1:]], 1) if of_pairs else ids[:, None]
    keys = [b""]
    for start in range(0, len(units) // PAGE * PAGE, PAGE):
        keys.append(hashlib.sha256(keys[-1] + units[start : start + PAGE].tobytes()).digest())
    return keys[1:]


def target_kv(folder: Path, draft_layers: int = 0) -> Pages:
    """K and V of the target's layers in each stored page, by its hash; the draft's behind them."""
    layout = layout_of(4, draft_layers)
    found = {}
    for _, _, record in records(folder):
        meta, _ = parse_header(record)
        assert meta.rope in ("bound", "delta")  # as the engine has it
        found[meta.page_hash] = record[HEADER_BYTES : layout.tail_offset].view(np.float32).copy()
    return found


def check_draft_rows(server: Server, disk: Path, texts: Sequence[Sequence[int]]) -> None:
    """What the draft has of answered tokens is what it has of them as a prompt."""
    behind = layout_of(4).tail_offset - HEADER_BYTES
    answered = target_kv(disk, DRAFT_LAYERS["eagle"])
    clear_tiers(server)
    settled(server)  # files are deleted behind the answer
    assert not target_kv(disk)
    for text in texts:
        ask(server, text, 1)
    settled(server)
    read = target_kv(disk, DRAFT_LAYERS["eagle"])
    assert answered.keys() <= read.keys()
    for key, values in answered.items():
        draft = values[behind // 4 :]
        assert draft.any()
        np.testing.assert_allclose(draft, read[key][behind // 4 :], atol=OFF, rtol=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that does not speculate, and its disk."""
    folder = tmp_path_factory.mktemp("plain")
    with server_of(folder, EXACT) as server:
        yield server, folder / "disk"


@pytest.mark.sampled("weak-in-trees", "weak-in-steps", "ngram")
@pytest.mark.parametrize("algorithm", ["weak", "weak-in-steps", trees("weak"), "ngram"])
def test_no_token_that_was_not_verified_is_in_a_stored_page(
    algorithm: str, drafts: dict[str, Path], plain: tuple[Server, Path], tmp_path: Path
) -> None:
    prompts = list(real_prompts([100, 333, 40, 512, 200, 90], seed=8))
    short = list(real_prompts([126, 125, 124, 125, 123, 122], seed=9))
    with server_of(tmp_path, [*EXACT, *args_of(algorithm, drafts)]) as server:
        with ThreadPoolExecutor(len(prompts)) as pool:  # batches of several lengths
            answers = list(pool.map(lambda prompt: ask(server, prompt, 80), prompts))
        # Answers that end within what a verification accepts, where a page is full or nearly so.
        ends = [ask(server, prompt, 2 + at) for at, prompt in enumerate(short)]
        settled(server)
        texts = [[*p, *a["output_ids"]] for p, a in zip(prompts, answers, strict=True)]
        texts += [[*p, *a["output_ids"]] for p, a in zip(short, ends, strict=True)]
        stored, of_pairs = target_kv(tmp_path / "disk"), algorithm != "ngram"
        if of_pairs:
            check_draft_rows(server, tmp_path / "disk", texts)
        if algorithm == "weak-in-steps":
            check_switched(server.log())
    right, proposed = (sum(x) for x in zip(*(guesses(a) for a in answers), strict=True))
    assert 0 < right < 0.9 * proposed  # many were rejected, and not all
    server, disk = plain
    found = ask(server, prompts[FEWEST], 80)
    assert found["output_ids"] == answers[FEWEST]["output_ids"]
    for text in texts:
        ask(server, text, 1)
    settled(server)
    wanted = target_kv(disk)
    compared, generated = 0, 0
    for text, prompt in zip(texts, [*prompts, *short], strict=True):
        keys = zip(
            page_keys(text, of_pairs=of_pairs), page_keys(text, of_pairs=False), strict=False
        )
        for page, (own, other) in enumerate(keys):
            if own not in stored:
                continue
            compared += 1
            generated += (page + 1) * PAGE > len(prompt)
            np.testing.assert_allclose(stored[own], wanted[other], atol=2e-3, rtol=0)
    answered = {key for text in texts for key in page_keys(text, of_pairs=of_pairs)}
    assert not set(stored) - answered  # nothing is stored that no answer has
    assert generated >= 6
    assert compared > generated
