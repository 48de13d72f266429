"""Whom a request belongs to, and that no two clients come to one key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.identity.tenancy import (
    Tenant,
    note_tenant,
    owner_of,
    tenant_of,
    tree_key,
)
from sglang_ext.truncation.keyed_names import encode_parts

# Few letters, so that many texts are parts of one another.
WORDS = st.lists(
    st.sampled_from(["a", ":", "1", "-", "+", "hier-kv-", "adapter:", "client:", "truncated:00:"]),
    max_size=5,
).map("".join)
IDS = st.one_of(st.none(), WORDS.filter(bool))
PARTS = st.lists(
    st.one_of(st.none(), WORDS, WORDS.map(str.encode), st.integers(-(2**62), 2**62)), max_size=4
)


@given(WORDS, IDS, WORDS, IDS)
def test_no_two_pairs_of_key_and_adapter_have_one_tree_key(
    one: str, adapter: str | None, other: str, another: str | None
) -> None:
    if (one, adapter) != (other, another):
        assert tree_key(one, adapter) != tree_key(other, another)
    else:
        assert tree_key(one, adapter) == tree_key(other, another)


@given(WORDS, IDS)
def test_no_client_can_name_a_lineage(key: str, adapter: str | None) -> None:
    assert not (tree_key(key, adapter) or "").startswith("hier-kv-truncated:")


def test_keys_of_most_clients_stay_what_they_were() -> None:
    assert tree_key(None, None) is None
    assert tree_key("", None) is None
    assert tree_key("tenant", None) == "tenant"


@given(PARTS, PARTS)
def test_no_two_lists_of_parts_give_the_same_bytes(one: list[Any], other: list[Any]) -> None:
    assert (encode_parts(*one) == encode_parts(*other)) == (one == other)


def noted(lora_id: str | None = None, custom: Any = None, **fields: Any) -> Any:
    req = SimpleNamespace(
        lora_id=lora_id, extra_key="joined", sampling_params=SimpleNamespace(custom_params=custom)
    )
    names = ("extra_key", "cache_salt", "session_id", "session_params")
    note_tenant(req, SimpleNamespace(**{**dict.fromkeys(names), **fields}))
    return req


def test_an_adapter_names_no_tenant() -> None:
    assert tenant_of(noted()) == tenant_of(noted("adapter")) == Tenant()
    assert not Tenant().is_named
    assert not Tenant(owner="me", session="s").is_named
    for named in (noted(extra_key="k"), noted("adapter", cache_salt="s")):
        tenant = tenant_of(named)
        assert tenant is not None
        assert tenant.is_named
    assert noted("adapter").extra_key != noted(extra_key="adapter").extra_key == "adapter"


def test_owners_and_sessions_are_noted() -> None:
    params = SimpleNamespace(id="s")
    assert tenant_of(noted(session_params=params)) == Tenant(session="s")
    assert tenant_of(noted(session_id="t", custom={"hier_kv_owner": "me"})) == Tenant(
        owner="me", session="t"
    )
    assert tenant_of(noted(custom={"hier_kv_owner": 1})) is None, "it shares nothing by content"


@pytest.mark.parametrize("owner", ["", 1, ["me"], "x" * 257, "\u00e9" * 129])
def test_what_is_no_owner_is_refused_in_one_sentence(owner: Any) -> None:
    with pytest.raises(ValueError, match="must be a text of 1 to 256 bytes") as refused:
        owner_of({"hier_kv_owner": owner})
    assert len(str(refused.value)) < 200
