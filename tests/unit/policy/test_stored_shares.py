"""Shares of tenants in the page store, over DRAM and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.store.store_rig import Make, check_content, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_flood_leaves_a_tenant_its_share_of_dram_and_disk(make: Make, policy: str) -> None:
    rig = make(
        slots=32, lookahead=True, policy=policy, max_bytes=80 * 8192, segment_bytes=16 * 8192,
        shares=(0.4,),
    )  # fmt: skip
    tenant = rig.space._replace(tenant_number=1)
    mine = pages("mine", 10)
    rig.save(mine, space=tenant)
    for number in range(12):
        rig.save(pages(f"others-{number}", 16))
        rig.settle()
    stats = rig.store.stats()
    assert stats["quota_tenant_1_host_pages"] == rig.ready(mine) == 10
    assert stats["quota_others_host_pages"] <= 22
    if policy == "write_through":
        assert stats["quota_tenant_1_disk_pages"] == rig.on_disk(mine) == 10
    check_content(rig, mine)


def test_it_is_lost_without_a_share(make: Make) -> None:
    rig = make(slots=32, disk=False, lookahead=True)
    mine = pages("mine", 10)
    rig.save(mine, space=rig.space._replace(tenant_number=1))
    for number in range(4):
        rig.save(pages(f"others-{number}", 16))
    assert rig.ready(mine) == 0
    assert not [name for name in rig.store.stats() if name.startswith("quota_")]
    rig.settle()


def test_on_a_full_disk_a_tenant_below_its_share_takes_what_others_have_above_theirs(
    make: Make,
) -> None:
    rig = make(
        slots=32, lookahead=True, max_bytes=80 * 8192, segment_bytes=16 * 8192, shares=(0.4,),
        policy="write_back",
    )  # fmt: skip
    lookahead = rig.store.lookahead
    assert lookahead is not None
    for number in range(12):
        chat = pages(f"others-{number}", 16)
        rig.save(chat)
        lookahead.used(rig.space, chat, None)
        rig.settle()
    tenant = rig.space._replace(tenant_number=1)
    for number in range(2):
        rig.save(pages(f"mine-{number}", 16), space=tenant)
        rig.settle()
    rig.store.flush(20.0)
    rig.settle()
    assert rig.store.stats()["quota_tenant_1_disk_pages"] >= 10


def test_pages_of_a_former_run_become_a_tenants_when_its_request_waits(
    make: Make, tmp_path: Path
) -> None:
    rig = make(slots=32, lookahead=True, shares=(0.4,))
    mine = pages("mine", 10)
    rig.save(mine, space=rig.space._replace(tenant_number=1))
    rig.settle()
    rig.store.close()
    rig = make(slots=32, lookahead=True, shares=(0.4,))
    assert rig.found == 10
    assert rig.store.stats()["quota_others_disk_pages"] == 10
    lookahead = rig.store.lookahead
    assert lookahead is not None
    found = lookahead.expect("request", rig.space._replace(tenant_number=1), mine, 0)
    assert found.disk == 10
    assert rig.store.stats()["quota_tenant_1_disk_pages"] == 10
    lookahead.leave("request")
    rig.settle()
