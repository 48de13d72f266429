"""Window layers and an EAGLE-3 draft, on the real server: gpt-oss.

A page of the full layers holds the draft's layer behind them; window layers are kept where a prompt
is resumed. What is restored is compared with a device hit bit for bit, as is how many guesses are
right; without the draft's rows fewer are. Of two ranks the stores are late, each by its own chance,
and SGLang's rank consensus checker is on: it ends the server when ranks decide differently.

By default two ranks run, with a KV cache in fp8, the draft's, too, for which the checkpoints ask
(`test_coded_drafts.py` has one of 16 bits); the long form has one rank and 16 bits, too, and
compares with plain SGLang's own device hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_ext.device.layout import PageLayout
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS
from testkit.drafts.eagle3 import (
    LAYER_TYPES,
    ask_for_fp8,
    write_drafted_oss_model,
    write_oss_draft,
)
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.drafts import test_speculation as speculation
from tests.e2e.drafts.restored import check_restored, check_same, device_hits
from tests.e2e.drafts.test_speculation import lose_part, of_chats, page_keys, records, share
from tests.e2e.hier_server import (
    check_agreed,
    clear_tiers,
    connected,
    ranks_of,
    real_prompts,
    settled,
)
from tests.e2e.models.hybrid_answers import cached
from tests.long_form import FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE, HEADS, DIM = 64, 2, 32
# Prompts of whole pages, and of a token more: with pairs those are whole pages. Behind the first
# one an answer fills a page.
LENGTHS, ANSWER = [436, 512, 577], 24
KEPT, LOST = {0}, {1, 2}  # chats that come back from disk with their draft's KV, and without
turns = partial(speculation.turns, lengths=LENGTHS, num_new=ANSWER)
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--speculative-algorithm", "EAGLE3", *DRAFTS]
PLUGIN = ["--enable-hier-kv", "--hier-kv-host-size", "0.05"]
PLUGIN += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
PLUGIN += ["--hier-kv-write-policy", "write_through"]
PLUGIN += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]


class Ranks(NamedTuple):
    """How many there are, and what their KV cache is.

    Attributes:
        num: tensor parallel ranks.
        is_narrow: it is in fp8, for which both checkpoints ask.
    """

    num: int
    is_narrow: bool

    @property
    def layout(self) -> PageLayout:
        """Where the full layers and the draft's lie in a page of one of the ranks."""
        num_layers = LAYER_TYPES.count("full_attention") + 1
        value_bytes = 1 if self.is_narrow else 2
        rows = (HEADS // self.num * DIM * value_bytes,) * num_layers
        return PageLayout(PAGE, rows, rows, value_bytes)


def server_of(folder: Path, ranks: Ranks, *, is_plain: bool = False) -> Server:
    """One with the disk that the one before it left, and a store that several have."""
    args = [*BASE, "--tp-size", str(ranks.num)]
    args += ["--speculative-draft-model-path", str(folder / "draft")]
    if not is_plain:
        args += [*PLUGIN, "--hier-kv-disk-dir", str(folder / "disk")]
        args += ["--hier-kv-remote-url", f"file://{folder / 'store'}?size=1GB"]
    return Server(
        args,
        model=folder / "model",
        log_path=folder / "server.log",
        stop="kill",
        start_timeout_s=400,
        env={} if ranks.num == 1 else {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)},
    )


def texts_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """All tokens of each chat."""
    firsts = real_prompts(LENGTHS, seed=3)
    more = real_prompts([70] * len(LENGTHS), seed=4)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return [
        [*first, *one["output_ids"], *then, *other["output_ids"]]
        for first, then, (one, other) in zip(firsts, more, pairs, strict=True)
    ]


def lose_draft_rows(folder: Path, ranks: Ranks, texts: Sequence[Sequence[int]]) -> None:
    """Zeros in the place of the draft's rows in the full layers' records, which stay sound."""
    layout, num = ranks.layout, 0
    keys = {key for text in texts for key in page_keys(text, of_pairs=True)}
    for path, start, record in list(records(folder)):
        if parse_header(record)[0].page_hash not in keys:
            continue
        assert record[layout.k_offsets[-1] : layout.tail_offset].any()
        lose_part(path, start, record, layout.k_offsets[-1], layout.tail_offset)
        num += 1
    assert num >= ranks.num * sum(len(text) // PAGE - 1 for text in texts)


def check_ranks(server: Server, ranks: Ranks) -> None:
    """Every rank has whole pages of its own shape, none failed, and all decided alike."""
    for rank in ranks_of(settled(server)):
        assert rank["slot_bytes"] == ranks.layout.slot_bytes
        assert rank["host"]["loaded_pages"] > 0
        for failures in ("save_failures", "load_failures", "remote_failed_pages"):
            assert rank["host"].get(failures, 0) == 0
    if ranks.num > 1:
        check_agreed(server.log(), ranks.num)


@pytest.mark.sampled("2-in-fp8")
@pytest.mark.parametrize("case", ["1", "2", "1-in-fp8", "2-in-fp8"])
def test_what_is_restored_answers_and_guesses_as_a_device_hit(case: str, tmp_path: Path) -> None:
    ranks = Ranks(int(case[0]), is_narrow=case.endswith("fp8"))
    write_drafted_oss_model(tmp_path / "model")
    write_oss_draft(tmp_path / "draft", tmp_path / "model")
    if ranks.is_narrow:
        for name in ("model", "draft"):
            ask_for_fp8(tmp_path / name)
    (tmp_path / "store").mkdir()
    with server_of(tmp_path, ranks) as server:
        connected(server)
        hits = device_hits(server, turns)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        for rank in ranks_of(settled(server)):
            assert rank["host"]["saved_windows"] > 0
            # The prompt whose pairs are whole pages has its last one computed, and then replaced.
            assert rank["host"]["restored_pages"] > 0
        check_ranks(server, ranks)
    assert share(hits) > 0.3
    if FACTOR:
        with server_of(tmp_path, ranks, is_plain=True) as server:
            check_plain(server, hits)
    texts = texts_of(hits)
    lose_draft_rows(tmp_path / "disk", ranks, [texts[chat] for chat in LOST])
    with server_of(tmp_path, ranks) as server:  # after a kill -9
        connected(server)
        found = turns(server)
        check_restored(of_chats(found, KEPT), of_chats(hits, KEPT), "disk")
        without, lost_hits = of_chats(found, LOST), of_chats(hits, LOST)
        assert [one["output_ids"] for one in without] == [hit["output_ids"] for hit in lost_hits]
        print(f"{share(lost_hits):.3f} of guesses right, {share(without):.3f} without the KV")
        assert share(without) < share(lost_hits) - 0.1
        clear_tiers(server)
        check_restored(turns(server), hits, "remote")  # what the first server put into the store
        check_ranks(server, ranks)


def check_plain(server: Server, hits: Sequence[dict[str, Any]]) -> None:
    """Device hits are plain SGLang's, whose third answers are asked for as `device_hits` does."""
    turns(server)
    flush_device(server)
    turns(server)
    plain = turns(server)
    assert cached(plain) == cached(hits)
    check_same(plain, hits)
