"""How shares of tenants are written, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.quotas import MAX_TENANTS, Quotas, parse_quotas
from sglang_ext.tiers.policy import config as policy_config


def test_shares_are_read_and_requests_are_told_apart() -> None:
    quotas = parse_quotas("cache_salt:acme=0.3, extra_key:web%2Cold%3D1=0.2,extra_key:a:b=0.5")
    assert quotas.shares == (0.3, 0.2, 0.5)
    assert quotas.number_of("acme", None) == 1
    assert quotas.number_of("acme", "a:b") == 1  # the salt says whose
    assert quotas.number_of(None, "web,old=1") == 2
    assert quotas.number_of("other", "a:b") == 3
    assert quotas.number_of(None, "acme") == quotas.number_of(None, None) == 0
    assert parse_quotas("") == Quotas()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("acme=0.3", "must be a list such as"),
        ("salt:acme=0.3", "must be a list such as"),
        ("cache_salt:=0.3", "must be a list such as"),
        ("cache_salt:acme", "must be a list such as"),
        ("cache_salt:acme=0.3,", "must be a list such as"),
        ("cache_salt:acme=0.3=0.2", "must be a list such as"),
        ("cache_salt:acme=much", "shares above 0 and up to 1, got 'cache_salt:acme=much'"),
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


def test_a_file_gives_them_and_keeps_the_salts_out_of_sight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quotas"
    path.write_text(
        "# who pays\n\ncache_salt: acme%2Cwest = 0.3\n extra_key:web=0.2,extra_key:b=.1"
    )
    path.chmod(0o600)
    config = HierKVConfig.from_dict({"quotas": f"@{path}"})
    quotas = parse_quotas(config.quotas)
    assert quotas.shares == (0.3, 0.2, 0.1)
    assert quotas.number_of("acme,west", None) == 1
    assert quotas.number_of(None, "b") == 3
    assert "acme" not in repr(config)
    assert not caplog.text
    path.write_text("cache_salt:other=0.9")
    assert parse_quotas(config.quotas) == quotas  # or shares and numbers might not agree
    open_to_all = tmp_path / "open"
    open_to_all.write_text("cache_salt:acme=0.3")
    open_to_all.chmod(0o644)
    for _ in range(2):
        parse_quotas(f"@{open_to_all}")
    assert caplog.text.count("mode 0644") == 1


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (b"", "must name a text"),
        (b"# nobody\n", "must name a text"),
        (b"\xff=0.1", "must name a text"),
        (b"#" * 65_530 + b"\ncache_salt:secret=0.1", "must name a text of at most 65,536 bytes"),
        (b"\nsecret=0.1", "must be a list such as .*, got what stands in line 2 of "),
        (b"cache_salt:a=0.1\ncache_salt:secret=2", "up to 1, got what stands in line 2 of"),
        (b"cache_salt:secret=0.1\ncache_salt:secret=0.1", "once, got what stands in line 2 of"),
        (b"cache_salt:secret=0.1=0.2", "must be a list such as .*, got what stands in line 1 of"),
    ],
)
def test_what_a_file_holds_is_in_no_refusal(tmp_path: Path, text: bytes, refusal: str) -> None:
    path = tmp_path / "quotas"
    path.write_bytes(text)
    with pytest.raises(HierKVConfigError, match=refusal) as refused:
        HierKVConfig.from_dict({"quotas": f"@{path}"})
    assert "secret" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    for path in ("", tmp_path, tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(HierKVConfigError, match="must name a text"):
            HierKVConfig.from_dict({"quotas": f"@{path}"})


def test_without_look_ahead_they_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="needs --hier-kv-lookahead on"):
        HierKVConfig.from_dict({"quotas": "cache_salt:a=0.5", "lookahead": "off"})


def test_a_policy_takes_as_many() -> None:
    assert policy_config.MAX_TENANTS == MAX_TENANTS
