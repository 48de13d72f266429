"""Models of latent rows with a draft layer in their checkpoint (MTP), on the real server.

As DeepSeek V3, and with rows of an index as DeepSeek V3.2 and GLM-5: a page holds the draft layer's
rows behind the model's. What is restored is compared with a device hit bit for bit, as is how many
guesses of the draft are right; without the draft layer's rows fewer are.

By default DeepSeek V3 runs (`test_coded_drafts.py` has a model with rows of an index); the long
form has all, two ranks, trees of guesses, and chains whose length SGLang adapts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.device.layout import HEADER_BYTES, PageLayout
from testkit.drafts.eagle import adaptive
from testkit.drafts.nextn import KINDS, NEXTN, PLAIN, rows_of, write_nextn_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.drafts import test_speculation as speculation
from tests.e2e.drafts.restored import check_restored, device_hits
from tests.e2e.drafts.test_speculation import (
    IN_TREES,
    check_switched,
    lose_part,
    records,
    share,
    share_of_tokens,
    trees,
)
from tests.e2e.hier_server import GIB, settled, state

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
# What the small models' drafts guess right at least, so that one sees where fewer are. An index of
# fp8 values chooses others for the draft than for the model now and then (0.37 are right with one).
LEAST = 0.3
LENGTHS = [436, 577]  # of pairs the second has whole pages; the first's answer fills one
turns = partial(speculation.turns, lengths=LENGTHS, num_new=24)
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", *NEXTN]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--enable-hier-kv"]
BASE += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
BASE += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]
BASE += ["--hier-kv-write-policy", "write_through"]


def layout_of(kind: str) -> PageLayout:
    """Where a page's parts lie."""
    latent, index = rows_of(kind)
    has_index = any(index)
    return PageLayout(PAGE, latent, index, 2, is_bound=has_index, has_index=has_index)


def server_of(kind: str, folder: Path, *args: str, **options: Any) -> Server:
    host_gib = 200.5 * layout_of(kind).slot_bytes / GIB
    tiers = ["--hier-kv-host-size", f"{host_gib:.9f}", "--hier-kv-disk-dir", str(folder / "disk")]
    return Server(
        [*BASE, *tiers, *args],
        model=folder / "model",
        log_path=folder / "server.log",
        stop="kill",
        start_timeout_s=400,
        **options,
    )


def check_bytes(server: Server, kind: str) -> None:
    """What a page takes: a twentieth more than its rows at most."""
    needed = PAGE * sum(map(sum, rows_of(kind)))
    found = state(server)
    assert found["kv_bytes_per_page"] == needed
    assert found["slot_bytes"] == layout_of(kind).slot_bytes <= 1.05 * needed


def lose_draft_rows(folder: Path, kind: str) -> int:
    """Zeros in the place of the draft layer's rows in all records, which stay sound; how many."""
    layout, num = layout_of(kind), 0
    first, end = layout.k_offsets[-1], layout.tail_offset
    assert HEADER_BYTES < first < end
    for path, start, record in list(records(folder)):
        assert record[first:end].any()
        lose_part(path, start, record, first, end)
        num += 1
    return num


@pytest.mark.sampled("deepseek_v3")
@pytest.mark.parametrize("name", [*KINDS, trees(PLAIN)])
def test_what_is_restored_answers_and_guesses_as_a_device_hit(name: str, tmp_path: Path) -> None:
    kind, _, how = name.partition("-in-")
    args = IN_TREES if how else []
    write_nextn_model(tmp_path / "model", kind)
    with server_of(kind, tmp_path, *args) as server:
        hits = device_hits(server, turns)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        settled(server)
        check_bytes(server, kind)
        stored = state(server)["host"]["saved_pages"]
    assert share(hits) > LEAST
    with server_of(kind, tmp_path, *args) as server:  # after a kill -9
        check_restored(turns(server), hits, "disk")
        settled(server)
    assert lose_draft_rows(tmp_path / "disk", kind) >= stored
    with server_of(kind, tmp_path, *args) as server:
        without = turns(server)
    assert [answer["output_ids"] for answer in without] == [hit["output_ids"] for hit in hits]
    assert share(without) < share(hits) - 0.1


@pytest.mark.long
@pytest.mark.parametrize("kind", [PLAIN, KINDS[-1]])
def test_chains_whose_length_changes_are_restored_alike(kind: str, tmp_path: Path) -> None:
    write_nextn_model(tmp_path / "model", kind)
    with server_of(kind, tmp_path, *adaptive(tmp_path / "steps.json")) as server:
        hits = device_hits(server, turns)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        check_switched(server.log())
    assert share_of_tokens(hits) > LEAST


@pytest.mark.long
def test_two_ranks_load_a_draft_layers_rows_of_which_one_keeps_all(tmp_path: Path) -> None:
    """SGLang's consensus checker ends the server where ranks decide differently."""
    kind = PLAIN  # two ranks with rows of an index and a draft: test_latent_attention_dp.py
    write_nextn_model(tmp_path / "model", kind)
    env = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
    with server_of(kind, tmp_path, "--tp-size", "2", env=env) as server:
        hits = device_hits(server, turns)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        settled(server)
        first, second = (rank["host"] for rank in state(server)["tp_ranks"])
        assert first["saved_pages"] > 0 == second.get("saved_pages", 0)
        assert first["loaded_pages"] == second["loaded_pages"] > 0
        # The prompt whose pairs are whole pages has its last one computed, and then replaced.
        assert first["restored_pages"] == second["restored_pages"] > 0
        log = server.log()
    assert "all kept by tensor parallel rank 0" in log
    assert log.count("Rank consensus checker is enabled") == 2
    assert "Found rank divergence" not in log
    with server_of(kind, tmp_path, "--tp-size", "2", env=env) as server:
        check_restored(turns(server), hits, "disk")
    assert share(hits) > LEAST
