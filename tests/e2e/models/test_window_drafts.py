"""Window layers and an EAGLE-3 draft, on the real server: gpt-oss, and Mellum.

A page of the full layers holds the draft's layer behind them; window layers are kept where a prompt
is resumed. What is restored is compared with plain SGLang's device hits bit for bit, as is how many
guesses are right; without the draft's rows fewer are. And what is stored, of either part, is
compared with the KV of the same tokens, computed without speculation.

By default gpt-oss runs on one rank; the long form has Mellum, two ranks and a remote store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.device.layout import LayerGroups, PageLayout
from sglang_ext.device.windows.window_layers import group_hashes
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS
from testkit.drafts.eagle3 import (
    LAYER_TYPES,
    write_drafted_oss_model,
    write_eagle3_config,
    write_oss_draft,
)
from testkit.hybrids.window_model import PATTERN, write_window_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import ask, by_tier, connected, real_prompts, settled, state
from tests.e2e.models import test_speculation as speculation
from tests.e2e.models.test_speculation import (
    assert_same,
    guesses,
    lose_part,
    page_keys,
    records,
    share,
)

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

    def groups(self, num_drafts: int) -> LayerGroups:
        """Which layers the parts of a page hold."""
        behind = len(self.full) + len(self.window)
        return LayerGroups((*self.full, *range(behind, behind + num_drafts)), self.window)


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
    "mellum": Kind(write_window_model, *_layers([bool(kind) for kind in PATTERN])),
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


def device_hits(server: Server) -> list[dict[str, Any]]:
    """Answers behind what the device has; see test_speculation.py of why it is the third time."""
    for time_ in range(2):
        turns(server)
        settled(server)
        if time_ == 0:
            flush_device(server)
    hits = turns(server)
    settled(server)
    assert min(by_tier(answer)["device"] for answer in hits) >= 384
    return hits


def check_restored(
    found: Sequence[dict[str, Any]], hits: Sequence[dict[str, Any]], tier: str
) -> None:
    """Tokens, log-probabilities and guesses are those of device hits; all came from a tier."""
    reused = [by_tier(answer)["device"] for answer in hits]
    assert [by_tier(answer)[tier] for answer in found][::2] == reused[::2]
    assert_same(found, hits, 0.0)
    assert [guesses(answer) for answer in found] == [guesses(answer) for answer in hits]


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
        hits = device_hits(server)
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


def target_kv(folder: Path, kind: Kind, num_drafts: int) -> dict[tuple[bytes, int], Any]:
    """K and V of each layer of the target in each stored page, by its hash and the layer."""
    layout, groups = layout_of(kind, 4, num_drafts), kind.groups(num_drafts)
    found: dict[tuple[bytes, int], Any] = {}
    for _, _, record in records(folder):
        meta, _ = parse_header(record)
        key = np.frombuffer(meta.page_hash, np.uint8)[None]
        for number, layers in enumerate(groups.model_layers):
            own = key if not number else group_hashes(key, number - 1)
            for at, layer in enumerate(layers):
                if layer < len(kind.full) + len(kind.window):
                    block = slice(
                        layout.k_offsets[at], [*layout.k_offsets, layout.tail_offset][at + 1]
                    )
                    found[own.tobytes(), layer] = record[block].view(np.float32).copy()
    return found


@pytest.mark.sampled("gpt-oss")
@pytest.mark.parametrize("name", KINDS)
def test_no_token_that_was_not_verified_is_in_a_stored_page_of_either_part(
    name: str, tmp_path: Path
) -> None:
    kind, exact = write(name, tmp_path), ["--dtype", "float32"]
    prompts = list(real_prompts([100, 333, 40, 512, 200, 90], seed=8))
    short = list(real_prompts([126, 125, 124, 125, 123, 122], seed=9))
    with server_of(tmp_path, *exact, *args_of(name, tmp_path), disk="guessed") as server:
        with ThreadPoolExecutor(len(prompts)) as pool:  # batches of several lengths
            answers = list(pool.map(lambda prompt: ask(server, prompt, 80), prompts))
        # Answers that end within what a verification accepts, where a page is full or nearly so.
        ends = [ask(server, prompt, 2 + at) for at, prompt in enumerate(short)]
        settled(server)
    right, proposed = (sum(x) for x in zip(*(guesses(a) for a in answers), strict=True))
    assert right < 0.95 * proposed
    texts = [
        [*p, *a["output_ids"]] for p, a in zip([*prompts, *short], [*answers, *ends], strict=True)
    ]
    with server_of(tmp_path, *exact, disk="plain") as server:
        for text in texts:
            ask(server, text, 1)
        settled(server)
    stored, wanted = (
        target_kv(tmp_path / "guessed", kind, 1),
        target_kv(tmp_path / "plain", kind, 0),
    )
    compared = {"full": 0, "window": 0, "generated": 0}
    for text, prompt in zip(texts, [*prompts, *short], strict=True):
        keys = zip(page_keys(text, of_pairs=True), page_keys(text, of_pairs=False), strict=False)
        for page, (own, other) in enumerate(keys):
            for layer in (*kind.full, *kind.window):
                if (own, layer) not in stored or (other, layer) not in wanted:
                    continue
                compared["window" if layer in kind.window else "full"] += 1
                compared["generated"] += (page + 1) * PAGE > len(prompt) and layer in kind.window
                np.testing.assert_allclose(
                    stored[own, layer], wanted[other, layer], atol=5e-3, rtol=0
                )
    print(name, right, proposed, compared)
    assert min(compared.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_agree_on_what_is_restored(name: str, tmp_path: Path) -> None:
    """Their stores are late; SGLang's consensus checker ends the server where they differ."""
    write(name, tmp_path)
    args = [*args_of(name, tmp_path), "--tp-size", "2"]
    env = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
    with server_of(tmp_path, *args, env=env) as server:
        hits = device_hits(server)
        flush_device(server)
        check_restored(turns(server), hits, "host")
        settled(server)
        counts = [rank["host"].get("restored_pages", 0) for rank in state(server)["tp_ranks"]]
        assert counts[0] == counts[1] > 0
        log = server.log()
    assert log.count("Rank consensus checker is enabled") == 2
    assert "Found rank divergence" not in log
    with server_of(tmp_path, *args, env=env) as server:
        check_restored(turns(server), hits, "disk")


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_another_server_gets_pages_and_windows_from_their_store(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    (tmp_path / "shared").mkdir()
    store = ["--hier-kv-remote-url", f"file://{tmp_path / 'shared'}?size=1GB"]
    args = [*args_of(name, tmp_path), *store]
    with server_of(tmp_path, *args, disk="") as server:
        connected(server)
        hits = device_hits(server)
        saved = settled(server)["host"]["saved_pages"]
        deadline_s = time.monotonic() + 300
        while state(server)["host"].get("remote_written_pages", 0) < saved:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    with server_of(tmp_path, *args, disk="") as server:
        connected(server)
        check_restored(turns(server), hits, "remote")
