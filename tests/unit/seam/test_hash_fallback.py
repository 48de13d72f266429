"""The page hash from hashlib is SGLang's native one, byte for byte."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache import utils  # noqa: E402
from sglang.srt.mem_cache.cpp_utils import native_hash  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from sglang_ext.seam import hash_fallback  # noqa: E402

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 5000), max_size=70)
WIDE = st.lists(st.integers(0, 2**40), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        native_hash.get_native_hash([1, 2, 3], None, page_size=1)
    except Exception as error:
        pytest.skip(f"SGLang's native hash does not build here: {error}")
    return native_hash.get_native_hash


@given(tokens=TOKENS | WIDE, page_size=st.sampled_from([None, 1, 4, 16]), prior=st.booleans())
@settings(max_examples=150)
def test_lists_of_tokens(
    native: Any, tokens: list[int], page_size: int | None, prior: bool
) -> None:
    digest = hashlib.sha256(b"before").digest() if prior else None
    assert hash_fallback.get_page_hash(tokens, digest, page_size) == native(
        tokens, digest, page_size=page_size
    )


@given(
    tokens=st.lists(st.integers(0, 2**34), min_size=1, max_size=70),
    extra_key=st.none() | st.text(max_size=5),
    salt=st.none() | st.text(max_size=5),
    bigram=st.booleans(),
    page_size=st.sampled_from([1, 4, 16]),
)
@settings(max_examples=150)
def test_whole_chains_salted_and_bigram(
    native: Any, tokens: list[int], extra_key: str | None, salt: str | None, bigram: bool,
    page_size: int,
) -> None:  # fmt: skip
    key = RadixKey(array("q", tokens), extra_key, is_bigram=bigram, cache_salt=salt)
    wanted = utils.get_storage_hash_str(key, None, page_size=page_size)
    # A chain continues from the middle as well.
    half = len(wanted) // 2
    tail = key[half * page_size :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_native_hash", hash_fallback.get_page_hash)
        assert utils.get_storage_hash_str(key, None, page_size=page_size) == wanted
        if half:
            prior = wanted[half - 1]
            assert utils.get_storage_hash_str(tail, prior, page_size=page_size) == wanted[half:]


def test_it_is_installed_only_where_the_native_one_does_not_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(native_hash, "get_native_hash", broken)
    monkeypatch.setattr(utils, "get_native_hash", broken)
    hash_fallback.ensure_page_hash()
    assert utils.get_native_hash is hash_fallback.get_page_hash
    assert "no compiler" in caplog.text
    monkeypatch.setattr(native_hash, "get_native_hash", lambda *args, **kwargs: ["00" * 32] * 3)
    hash_fallback.ensure_page_hash()
    assert native_hash.get_native_hash is not hash_fallback.get_page_hash


def test_salts_and_extra_keys_part_the_chains() -> None:
    tokens = array("q", range(32))
    keys = [
        RadixKey(tokens, None), RadixKey(tokens, "a"), RadixKey(tokens, "b"),
        RadixKey(tokens, None, cache_salt="a"), RadixKey(tokens, "a", cache_salt="b"),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_native_hash", hash_fallback.get_page_hash)
        chains = [tuple(utils.get_storage_hash_str(key, None, page_size=16)) for key in keys]
    assert len(set(chains)) == len(keys)
