"""How shares of tenants are written, and what is refused."""

from __future__ import annotations

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.quotas import MAX_TENANTS, Quotas, parse_quotas
from sglang_ext.tiers.policy import config as policy_config


def test_shares_are_read_and_requests_are_told_apart() -> None:
    quotas = parse_quotas("cache_salt:acme=0.3, extra_key:web%2Cold%3D1=0.2,extra_key:a:b=0.5")
    assert quotas.shares == (0.3, 0.2, 0.5)
    assert quotas.tenant_of("acme", None) == 1
    assert quotas.tenant_of("acme", "a:b") == 1  # the salt says whose
    assert quotas.tenant_of(None, "web,old=1") == 2
    assert quotas.tenant_of("other", "a:b") == 3
    assert quotas.tenant_of(None, "acme") == quotas.tenant_of(None, None) == 0
    assert parse_quotas("") == Quotas()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("acme=0.3", "must be a list such as"),
        ("salt:acme=0.3", "must be a list such as"),
        ("cache_salt:=0.3", "must be a list such as"),
        ("cache_salt:acme", "must be a list such as"),
        ("cache_salt:acme=0.3,", "must be a list such as"),
        ("cache_salt:acme=much", "shares above 0 and up to 1, got 'much' for 'cache_salt:acme'"),
        ("cache_salt:acme=0", "shares above 0"),
        ("cache_salt:acme=nan", "shares above 0"),
        ("cache_salt:acme=30", "shares above 0"),
        ("cache_salt:a=0.1,cache_salt:a=0.2", "each tenant once"),
        ("cache_salt:a=0.6,cache_salt:b=0.6", "at most 1 together, got 1.2"),
        (",".join(f"cache_salt:{n}=0.01" for n in range(16)), "may have 15 tenants, got 16"),
    ],
)
def test_what_are_no_shares_is_refused_at_start(text: str, refusal: str) -> None:
    with pytest.raises(HierKVConfigError, match=refusal):
        HierKVConfig.from_dict({"quotas": text})


def test_without_look_ahead_they_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="needs --hier-kv-lookahead on"):
        HierKVConfig.from_dict({"quotas": "cache_salt:a=0.5", "lookahead": "off"})


def test_a_policy_takes_as_many() -> None:
    assert policy_config.MAX_TENANTS == MAX_TENANTS
