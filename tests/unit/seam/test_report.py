"""The report of a request: into SGLang's own fields, and together with other prompts'."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.seam.reuse_report import merge_reports, pack_details, pack_quality

TIERS = {"device": 64, "host": 128, "disk": 192, "remote": 256}


@pytest.mark.parametrize("own", [None, {"device": 640, "host": 0}, {"device": 1, "host": 2}])
def test_sglangs_three_tiers_add_up_to_what_was_reused(own: dict[str, Any] | None) -> None:
    packed = pack_details(own, TIERS)
    found = {name: packed[name] for name in ("device", "host", "storage", "storage_backend")}
    assert found == {"device": 64, "host": 128, "storage": 448, "storage_backend": "hier_kv"}
    assert json.loads(packed["hier_kv"]) == TIERS


@pytest.mark.parametrize("sent", [None, {"device": 640, "host": 0, "storage": 64}])
def test_a_decode_server_tells_quality_beside_what_it_was_sent(sent: dict[str, int] | None) -> None:
    packed = pack_quality(sent, "lossy")
    assert json.loads(packed.pop("hier_kv")) == {"quality": "lossy"}
    assert packed == (sent or {})


def test_reports_of_several_prompts_are_sums_with_the_worst_quality() -> None:
    other = {"device": 1, "host": 0, "disk": 0, "remote": 0, "moved": 5, "dropped": 7}
    merged = merge_reports([TIERS | {"quality": "lossy"}, other | {"quality": "approximated"}])
    expected = {"device": 65, "host": 128, "disk": 192, "remote": 256, "moved": 5, "dropped": 7}
    assert merged == expected | {"quality": "approximated"}
    assert merge_reports([TIERS, TIERS | {"quality": "exact"}])["quality"] == "exact"
    assert "quality" not in merge_reports([TIERS])
    assert merge_reports([]) == {}


def test_missed_tokens_of_several_prompts_are_sums_by_reason() -> None:
    reports: list[dict[str, Any]] = [
        TIERS | {"missed": {"evicted_disk": 64}},
        TIERS | {"missed": {"evicted_disk": 128, "too_slow": 64}},
        TIERS,
    ]
    assert merge_reports(reports)["missed"] == {"evicted_disk": 192, "too_slow": 64}
    assert "missed" not in merge_reports([TIERS])
