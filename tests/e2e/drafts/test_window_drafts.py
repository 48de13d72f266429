"""Window layers and an EAGLE-3 draft, on the real server: gpt-oss.

A page of the full layers holds the draft's layer behind them; window layers are kept where a prompt
is resumed. What is restored is compared with a device hit bit for bit, as is how many guesses are
right; without the draft's rows fewer are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.device.layout import PageLayout
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS
from testkit.drafts.eagle3 import (
    LAYER_TYPES,
    write_drafted_oss_model,
    write_eagle3_config,
    write_oss_draft,
)
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.drafts import test_speculation as speculation
from tests.e2e.drafts.restored import check_restored, device_hits
from tests.e2e.drafts.test_speculation import (
    lose_part,
    page_keys,
    records,
    share,
)
from tests.e2e.hier_server import real_prompts, settled

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE, HEADS, DIM = 64, 2, 32
# Prompts of whole pages, and of a token more: with pairs those are whole pages. Behind the first
# one an answer fills a page.
LENGTHS, ANSWER = [436, 512, 577], 24
turns = partial(speculation.turns, lengths=LENGTHS, num_new=ANSWER)
EAGLE3 = ["--speculative-algorithm", "EAGLE3", *DRAFTS]
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--enable-hier-kv", "--hier-kv-host-size", "0.05"]
BASE += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
BASE += ["--hier-kv-write-policy", "write_through"]


@dataclass(frozen=True)
class Kind:
    """A target.

    Attributes:
        write: writes it into a new folder.
        full: its layers with full attention.
        window: those with a window.
        guesses_well: whether there is a draft for it that does.
    """

    write: Callable[[Path], Path]
    full: tuple[int, ...]
    window: tuple[int, ...]
    guesses_well: bool = False


def _layers(of_window: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full, window = (
        tuple(at for at, is_window in enumerate(of_window) if is_window == wanted)
        for wanted in (False, True)
    )
    return full, window


KINDS = {
    "gpt-oss": Kind(
        write_drafted_oss_model, *_layers([kind != "full_attention" for kind in LAYER_TYPES]), True
    ),
}


def layout_of(kind: Kind, item_bytes: int, num_drafts: int = 1) -> PageLayout:
    """Where the layers of a part lie."""
    rows = (HEADS * DIM * item_bytes,) * (len(kind.full) + num_drafts)
    return PageLayout(PAGE, rows, rows, item_bytes)


def write(name: str, folder: Path) -> Kind:
    """Writes a target and its draft; returns the kind."""
    kind = KINDS[name]
    kind.write(folder / "model")
    if kind.guesses_well:
        write_oss_draft(folder / "draft", folder / "model")
    else:
        write_eagle3_config(folder / "draft", folder / "model")
    return kind


def args_of(name: str, folder: Path) -> list[str]:
    """Of a server that guesses."""
    args = [*EAGLE3, "--speculative-draft-model-path", str(folder / "draft")]
    if not KINDS[name].guesses_well:
        args += ["--speculative-draft-load-format", "dummy"]
    return args


def server_of(folder: Path, *args: str, disk: str = "disk", **options: Any) -> Server:
    tiers = ["--hier-kv-disk-dir", str(folder / disk), "--hier-kv-disk-size", "0.5"]
    tiers += ["--hier-kv-disk-segment-size", "0.01"]
    return Server(
        [*BASE, *(tiers if disk else []), *args],
        model=folder / "model",
        log_path=folder / "server.log",
        stop="kill",
        start_timeout_s=400,
        **options,
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


def lose_draft_rows(folder: Path, kind: Kind, texts: Sequence[Sequence[int]]) -> int:
    """Zeros in the place of the draft's rows in the full layers' records; how many."""
    layout, num = layout_of(kind, 2), 0
    keys = {key for text in texts for key in page_keys(text, of_pairs=True)}
    for path, start, record in list(records(folder)):
        if parse_header(record)[0].page_hash not in keys:
            continue
        assert record[layout.k_offsets[-1] : layout.tail_offset].any()
        lose_part(path, start, record, layout.k_offsets[-1], layout.tail_offset)
        num += 1
    return num


@pytest.mark.sampled("gpt-oss")
@pytest.mark.parametrize("name", KINDS)
def test_what_is_restored_answers_and_guesses_as_a_device_hit(name: str, tmp_path: Path) -> None:
    kind = write(name, tmp_path)
    args = args_of(name, tmp_path)
    with server_of(tmp_path, *args) as server:
        hits = device_hits(server, turns)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        found = settled(server)
        assert found["host"]["saved_windows"] > 0
        # The prompt whose pairs are whole pages has its last one computed, and then replaced.
        assert found["host"]["restored_pages"] > 0
        assert found["slot_bytes"] == layout_of(kind, 2).slot_bytes
    with server_of(tmp_path, *args) as server:  # after a kill -9
        check_restored(turns(server), hits, "disk")
        settled(server)
    texts = texts_of(hits)
    assert lose_draft_rows(tmp_path / "disk", kind, texts) >= sum(len(t) // PAGE - 1 for t in texts)
    with server_of(tmp_path, *args) as server:
        without = turns(server)
    assert [answer["output_ids"] for answer in without] == [hit["output_ids"] for hit in hits]
    print(name, f"{share(hits):.3f} of guesses right, {share(without):.3f} without the draft's KV")
    if kind.guesses_well:
        assert share(hits) > 0.3
        assert share(without) < share(hits) - 0.1
