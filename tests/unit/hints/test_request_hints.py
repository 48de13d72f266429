"""What a request may say of its conversation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sglang_ext.hints.request_hints import PARAM, RequestHints, hints_of, owner_slot
from sglang_ext.identity.tenancy import Tenant
from sglang_ext.tiers.policy.hints.hint_kernels import NUM_OWNERS


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"returns_in_s": 30}, RequestHints(30.0)),
        ({"returns_in_s": 0.25, "ends": False}, RequestHints(0.25)),
        ({"returns_in_s": None, "ends": True}, RequestHints(ends=True)),
        ({"ttl_s": 60}, RequestHints(ttl_s=60.0)),
        ({"pin_s": 86_400}, RequestHints(pin_s=86_400.0)),
        ({"pin_s": 5, "returns_in_s": 60, "ttl_s": 70}, RequestHints(60.0, False, 70.0, 5.0)),
        ({"ttl_s": 60, "returns_in_s": 60, "ends": False}, RequestHints(60.0, ttl_s=60.0)),
        ({"ends": False}, None),
        ({}, None),
        (None, None),
    ],
)
def test_hints_are_read(given: Any, found: RequestHints | None) -> None:
    assert hints_of({PARAM: given}) == found


@pytest.mark.parametrize("custom_params", [None, {}, "text", {"hier_kv_owner": "a"}])
def test_none_are_given(custom_params: Any) -> None:
    assert hints_of(custom_params) is None


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (30, "must be an object with returns_in_s, ttl_s, pin_s or ends"),
        ([1], "must be an object"),
        ({"return_in_s": 30}, "may have returns_in_s, ttl_s, pin_s or ends, got 'return_in_s'"),
        ({"returns_in_s": "30"}, "must be a number of seconds above 0 and up to 604800"),
        ({"returns_in_s": True}, "must be a number of seconds"),
        ({"returns_in_s": 0}, "must be a number of seconds"),
        ({"returns_in_s": -1.5}, "must be a number of seconds"),
        ({"returns_in_s": math.nan}, "must be a number of seconds"),
        ({"returns_in_s": math.inf}, "must be a number of seconds"),
        ({"returns_in_s": 604_801}, "must be a number of seconds"),
        ({"returns_in_s": 10**400}, "must be a number of seconds"),
        ({"ends": 1}, "must be true or false, got '1'"),
        ({"ends": "yes"}, "must be true or false"),
        ({"ends": True, "returns_in_s": 3}, "must have returns_in_s or ends, got both"),
        ({"ends": True, "ttl_s": 3}, "must have ttl_s or ends, got both"),
        ({"ttl_s": 0}, "'ttl_s'. must be a number of seconds above 0 and up to 604800"),
        ({"ends": True, "pin_s": 3}, "must have pin_s or ends, got both"),
        ({"pin_s": True}, "'pin_s'. must be a number of seconds above 0 and up to 86400"),
        ({"pin_s": 86_401}, "'pin_s'. must be a number of seconds above 0 and up to 86400"),
        ({"pin_s": 6, "ttl_s": 5}, "must be no less than pin_s, got 5 and 6"),
        ({"ttl_s": 5, "returns_in_s": 6}, "must be no less than returns_in_s, got 5 and 6"),
    ],
)
def test_what_is_no_hint_is_refused_with_what_was_expected(given: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        hints_of({PARAM: given})


@pytest.mark.parametrize("name", ["ends", "returns_in_s", "ttl_s", "pin_s", None])
def test_a_refusal_writes_out_nothing_that_is_long_or_deep(name: str | None) -> None:
    """It is written in the process that serves everybody, and Python ends at a depth of 1,000."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="got one of type list"):
        hints_of({PARAM: deep if name is None else {name: deep}})
    with pytest.raises(ValueError, match="got a number of ten or more digits"):
        hints_of({PARAM: 10**5000 if name is None else {name: 10**5000}})


def test_tenants_are_judged_apart_and_nobody_can_tell_under_which_record() -> None:
    tenants = [Tenant(extra_key=f"tenant-{number}") for number in range(200)]
    slots = [owner_slot(b"secret", tenant, NUM_OWNERS) for tenant in tenants]
    assert slots == [owner_slot(b"secret", tenant, NUM_OWNERS) for tenant in tenants]
    assert slots != [owner_slot(b"another", tenant, NUM_OWNERS) for tenant in tenants]
    assert all(0 <= slot < NUM_OWNERS for slot in slots)
    assert len(set(slots)) > 100
    named = [owner_slot(b"secret", who, 1 << 60) for who in (Tenant("a"), Tenant(None, "a"))]
    assert named[0] != named[1]
