"""Whether pages of a coded store may be left to be computed, by what the settings say."""

from __future__ import annotations

import pytest

from sglang_ext.assembly.remote_setup import text_time
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.policy.cost_model import CostModel


@pytest.mark.parametrize(
    ("settings", "may_compute"),
    [
        ({"prefetch_policy": "cost"}, True),
        ({"prefetch_policy": "wait_complete"}, False),
        ({"prefetch_policy": "timeout"}, False),
        ({"prefetch_policy": "best_effort"}, False),
        ({"prefetch_policy": "wait_complete", "slo_ms": 100.0}, True),
    ],
)
def test_pages_are_computed_where_the_settings_let_them(
    settings: dict[str, object], may_compute: bool
) -> None:
    cost = CostModel(1.0)
    for _ in range(8):
        cost.note_prefill([(1000, 0)], 0.1)
    assert cost.prefill_s(1000, 0) is not None
    found = text_time(HierKVConfig(**settings), cost)(1000, 0)  # type: ignore[arg-type]
    assert found == (cost.prefill_s(1000, 0) if may_compute else None)
