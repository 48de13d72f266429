"""Prompts with images, K and V of every head and an EAGLE-3 draft, on the real server.

A small Qwen2.5-VL and a Qwen3-VL, whose keys are of pairs then: a page is named by the image of the
token behind it, too. A plain server of SGLang's says what is right; of the plugin's one is killed,
and another one goes on with its disk, on which a prompt's pages lack the draft's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext.device.layout import PageLayout
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.eagle import DRAFTS, TREES
from testkit.drafts.vision_eagle3 import write_drafted_vision_model, write_vision_draft
from testkit.images.qwen3_vl_model import write_qwen3_vl
from testkit.images.vision_model import NUM_LAYERS, write_vision_model
from testkit.server import Server
from tests.e2e.drafts import image_guesses
from tests.e2e.drafts.restored import check_thresholds_stay
from tests.e2e.drafts.test_speculation import lose_part, records, share
from tests.e2e.hier_server import settled
from tests.e2e.images.image_prompts import BASE, LARGE, PAGE, PLUGIN
from tests.e2e.models.hybrid_answers import drop_device

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release, pytest.mark.long]

ANSWER = 24
ROW_BYTES = 2 * 32 * 4  # of K of a token in a layer


def server_of(folder: Path, guesses: tuple[str, ...], *, is_plain: bool = False) -> Server:
    """One with the disk that the one before it left."""
    draft = ["--speculative-algorithm", "EAGLE3", *guesses]
    draft += ["--speculative-draft-model-path", str(folder / "draft")]
    tiers = [*PLUGIN, "--hier-kv-write-policy", "write_through", "--hier-kv-host-size", "0.1"]
    tiers += ["--hier-kv-disk-dir", str(folder / "disk")]
    args = [*BASE, *LARGE, *draft, *([] if is_plain else tiers)]
    return Server(args, model=str(folder / "model"), stop="kill", start_timeout_s=400)


def lose_draft_rows(folder: Path, names: set[bytes]) -> None:
    """Zeros in the place of the draft's rows in pages of these names, which stay sound."""
    rows = (ROW_BYTES,) * (NUM_LAYERS + 1)
    layout = PageLayout(PAGE, rows, rows, 4)
    first, end = layout.k_offsets[-1], layout.tail_offset
    for path, start, record in list(records(folder)):
        if parse_header(record)[0].page_hash in names:
            assert record[first:end].any()
            lose_part(path, start, record, first, end)


def check_counts(server: Server) -> None:
    """Every request with images was named, and nothing failed."""
    host = settled(server)["host"]
    assert host["image_requests"] > 0
    assert host["loaded_pages"] > 0
    for name in ("unnamed_image_requests", "image_name_conflicts", "load_failures"):
        assert not host.get(name), name


@pytest.mark.parametrize("guesses", [DRAFTS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("write", [write_vision_model, write_qwen3_vl], ids=["qwen2_5", "qwen3"])
def test_images_come_back_with_the_rows_of_a_draft(
    write: Callable[[Path], Path], guesses: tuple[str, ...], tmp_path: Path
) -> None:
    """From DRAM and disk, and with as many right guesses, as from the device."""
    write_drafted_vision_model(tmp_path / "model", write)
    write_vision_draft(tmp_path / "draft", tmp_path / "model")
    with server_of(tmp_path, guesses) as server:
        check_thresholds_stay(server)
        images = image_guesses.device_hits(server, tmp_path / "disk", ANSWER)
        drop_device(server)
        images.check(server, "host")
        image_guesses.check_another_image(server, ANSWER)
        check_counts(server)
    assert 0.2 < share(images.hits) < 1
    with server_of(tmp_path, guesses, is_plain=True) as server:
        images.check_plain(server)
    assert images.names
    lose_draft_rows(tmp_path / "disk", images.names)
    with server_of(tmp_path, guesses) as server:
        images.check(server, "disk", lost=1)
        check_counts(server)
