"""Qwen3-Next with the draft layer of its checkpoint (MTP), on the real server.

A page holds the draft layer's K and V behind those of the model's full layers, and the states
beside them are those behind tokens that were verified. What is restored is compared with a device
hit bit for bit, as is how many guesses are right, and with what transformers computes for the same
tokens; without the draft layer's rows fewer guesses are right, and with those of a shared store as
many again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.device.layout import HEADER_BYTES
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.nextn import NEXTN
from testkit.drafts.state_nextn import DRAFT_BYTES, KIND, PAGE_BYTES, write_state_nextn_model
from testkit.server import Server
from tests.e2e.drafts.restored import check_same
from tests.e2e.drafts.test_speculation import (
    lose_part,
    page_keys,
    records,
    share,
)
from tests.e2e.hier_server import GIB, by_tier, clear_tiers, connected, real_prompts, settled
from tests.e2e.models.hybrid_answers import Computed, answers, drop_device

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
ANSWER = 24
# An answer to them fills a page, so SGLang keeps a state that a verification came to; what is asked
# behind it fills none, so it goes on behind that state whenever it is asked.
LENGTHS, MORE = [436, 620], 20
PLACES = [[384, 576], [448, 640]]  # where the first and the second turns go on
LEAST = 0.3  # guesses that are right, so that one sees where fewer are
TOLERANCE = 5e-4  # of a log-probability in float32
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", *NEXTN]
BASE += ["--dtype", "float32", "--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--max-mamba-cache-size", "100"]
BASE += ["--mamba-track-interval", str(PAGE), "--enable-hier-kv"]
BASE += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
BASE += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]
BASE += ["--hier-kv-write-policy", "write_through"]


def server_of(folder: Path) -> Server:
    """One with the disk that the one before it left, and a store that several have."""
    host_gib = 300.5 * (PAGE_BYTES + HEADER_BYTES) / GIB
    tiers = ["--hier-kv-host-size", f"{host_gib:.9f}", "--hier-kv-disk-dir", str(folder / "disk")]
    tiers += ["--hier-kv-remote-url", f"file://{folder / 'store'}?size=1GB"]
    return Server(
        [*BASE, *tiers],
        model=folder / "model",
        log_path=folder / "server.log",
        stop="kill",
        start_timeout_s=600,
        env={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    )


def first_turns() -> list[list[int]]:
    return list(real_prompts(LENGTHS, seed=3))


def second_turns(found: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What is asked behind the answers to the first ones."""
    more = real_prompts([MORE] * len(LENGTHS), seed=4)
    told = zip(first_turns(), found, more, strict=True)
    return [[*prompt, *answer["output_ids"], *text] for prompt, answer, text in told]


def check_tier(found: Sequence[dict[str, Any]], tier: str, places: list[int]) -> None:
    """Answers went on behind these places, all of which was in a tier."""
    assert [by_tier(answer).get(tier, 0) for answer in found] == places
    assert [answer["meta_info"]["cached_tokens"] for answer in found] == places


def lose_draft_rows(folder: Path, texts: Sequence[Sequence[int]]) -> None:
    """Zeros in the place of the draft layer's rows in the pages of texts, which stay sound."""
    keys = {key for text in texts for key in page_keys(text, of_pairs=False)}
    end = HEADER_BYTES + PAGE_BYTES
    num = 0
    for path, start, record in list(records(folder)):
        if parse_header(record)[0].page_hash in keys:
            assert record[end - DRAFT_BYTES : end].any()
            lose_part(path, start, record, end - DRAFT_BYTES, end)
            num += 1
    assert num >= sum(len(text) // PAGE for text in texts)


def device_hits(server: Server) -> tuple[list[list[int]], list[Any], list[Any]]:
    """The second turns, and answers behind what the device has: to the first ones, to these."""
    first = first_turns()
    answers(server, first, ANSWER)
    hits = answers(server, first, ANSWER)
    check_tier(hits, "device", PLACES[0])
    second = second_turns(hits)
    more_hits = answers(server, second, ANSWER)
    check_tier(more_hits, "device", PLACES[1])
    return second, hits, more_hits


def test_what_is_restored_answers_and_guesses_as_a_device_hit(tmp_path: Path) -> None:
    write_state_nextn_model(tmp_path / "model")
    (tmp_path / "store").mkdir()
    with server_of(tmp_path) as server:
        connected(server)
        second, hits, more_hits = device_hits(server)
        drop_device(server)
        found = answers(server, second, ANSWER)
        check_tier(found, "host", PLACES[1])
        check_same(found, more_hits)
        drop_device(server)
        found = answers(server, first_turns(), ANSWER)
        check_tier(found, "host", PLACES[0])
        check_same(found, hits)
        counted = settled(server)
        assert counted["kv_bytes_per_page"] == PAGE_BYTES
        assert counted["host"]["saved_states"] > 0
        assert counted["host"].get("save_failures", 0) == 0
    assert min(share(hits), share(more_hits)) > LEAST
    assert max(share(hits), share(more_hits)) < 1  # some were wrong, and left nothing behind
    opened = KIND.open(tmp_path / "model")
    computed = Computed(lambda tokens: opened(tokens).logits[0])
    assert computed.furthest(first_turns(), hits) < TOLERANCE
    assert computed.furthest(second, more_hits) < TOLERANCE
    with server_of(tmp_path) as server:  # after a kill -9
        found = answers(server, second, ANSWER)
        check_tier(found, "disk", PLACES[1])
        check_same(found, more_hits)
        settled(server)
    lose_draft_rows(tmp_path / "disk", [prompt[:-MORE] for prompt in second])
    with server_of(tmp_path) as server:
        connected(server)
        without = answers(server, second, ANSWER)
        clear_tiers(server)
        found = answers(server, second, ANSWER)  # what the first server put into the store
        check_tier(found, "remote", PLACES[1])
        check_same(found, more_hits)
        counted = settled(server)["host"]
        assert counted.get("load_failures", 0) == counted.get("remote_failed_pages", 0) == 0
    check_tier(without, "disk", PLACES[1])
    assert [answer["output_ids"] for answer in without] == [hit["output_ids"] for hit in more_hits]
    assert share(without) < share(more_hits) - 0.1
