"""Names of lineages, who may be cut, and what the front process lets through."""

from __future__ import annotations

import os
import stat
import tracemalloc
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.seam.hooks.front import around_validate, check_num_chars
from sglang_ext.truncation.cut import Cut
from sglang_ext.truncation.lineage import (
    CutLineage,
    attach_lineage,
    lineage_of,
    names_of,
    quote_name,
)
from sglang_ext.truncation.modes import STATED, mode_of, why_not_cut
from sglang_ext.truncation.quotes import StoredRun, StoredText
from sglang_ext.truncation.secret import lineage_secret, secret_problem
from tests.other_user import ANOTHER_USER, as_another_user

TOKENS = array("q", range(100))
CUT = Cut(100, 4, (30, 60))
BASE: dict[str, Any] = {"extra_key": None, "salt": None}


def names(tokens: array[int] = TOKENS, cut: Cut = CUT, secret: bytes = b"s", **of: Any) -> Any:
    return names_of(secret, tokens, cut, **{**BASE, **of})


def test_a_name_stands_for_all_that_its_kv_rests_on() -> None:
    one = names()
    assert set(one) == {30, 60}
    assert one == names(array("q", [*range(80), *range(900, 920)]))  # the tail may go on otherwise
    for at in (0, 5, 29):
        other = array("q", TOKENS)
        other[at] += 1000
        assert not set(names(other).values()) & set(one.values()), at
    late = array("q", TOKENS)
    late[45] += 1000  # dropped by the second cut only
    assert names(late)[30] == one[30]
    assert names(late)[60] != one[60]
    for changed in (
        names(extra_key=""), names(salt=""), names(extra_key="a"), names(secret=b"t"),
        names(cut=Cut(100, 5, (30, 60))), names(cut=Cut(100, 4, (60,))),
    ):  # fmt: skip
        assert changed[60] != one[60]
    assert names(extra_key="ab", salt="c")[30] != names(extra_key="a", salt="bc")[30]


def test_a_request_of_a_lineage_is_what_is_kept_in_a_namespace_of_its_own() -> None:
    asked: list[tuple[list[int], str | None, str | None]] = []

    def hash_of(tokens: array[int], extra_key: str | None, salt: str | None) -> Any:
        asked.append((list(tokens), extra_key, salt))
        return np.zeros((len(tokens) // 4, 32), np.uint8)

    named = names(extra_key="team-adapter", salt="salt")
    lineage = CutLineage(TOKENS, CUT, "team-adapter", "salt", named, hash_of)
    req = SimpleNamespace(origin_input_ids=TOKENS, extra_key="team-adapter")
    assert lineage_of(req) is None
    attach_lineage(req, lineage)
    assert lineage_of(req) is lineage
    assert list(req.origin_input_ids) == [*range(4), *range(60, 100)]
    assert req.origin_input_ids is req.origin_input_ids_unpadded
    assert req.extra_key == named[60] + "team-adapter"
    sources = lineage.sources(44, lambda hashes: np.ones(len(hashes), np.bool_))
    assert [source.shift for source in sources] == [30, 56, 0]
    assert asked == [
        ([*range(4), *range(30, 100)], named[30] + "team-adapter", "salt"),
        (list(TOKENS), "team-adapter", "salt"),
    ]


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("off", {"off"}),
        ("overflow", {"off", "overflow"}),
        ("match", {"off", "match"}),
        ("all", {"off", "overflow", "match", "all"}),
    ],
)
def test_a_request_chooses_no_more_than_the_flag_allows(flag: str, allowed: set[str]) -> None:
    assert mode_of(None, flag) == mode_of({}, flag) == mode_of("all", flag) == flag
    for mode in ("off", "overflow", "match", "all"):
        if mode in allowed:
            assert mode_of({"hier_kv_truncation": mode}, flag) == mode
        else:
            with pytest.raises(ValueError, match=f"runs with --hier-kv-truncation {flag}"):
                mode_of({"hier_kv_truncation": mode}, flag)
    with pytest.raises(ValueError, match="must be one of"):
        mode_of({"hier_kv_truncation": ["all"]}, flag)


def test_names_of_quotes_keep_groups_and_places_apart() -> None:
    runs = [StoredRun(4, 64, at, np.full((2, 32), fill, np.uint8), np.zeros((1, 32), np.uint8))
            for at in (20, 36) for fill in (1, 2)]  # fmt: skip
    named = {
        quote_name(key, whose, run) for key in (b"a", b"b") for whose in (1, 2) for run in runs
    }
    assert len(named) == 16


@pytest.mark.parametrize(
    "field",
    [
        {"input_embeds": [[0.0]]},
        {"image_data": ["x"]},
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_hidden_states": True},
    ],
)
def test_what_indexes_the_prompt_is_not_cut(field: dict[str, Any]) -> None:
    assert why_not_cut(SimpleNamespace(**field))
    assert not why_not_cut(SimpleNamespace(**dict.fromkeys(field)))
    assert not why_not_cut(SimpleNamespace(return_logprob=True, logprob_start_len=-1))


@pytest.mark.parametrize(
    ("num", "params", "checked", "marked"),
    [
        (90, {}, 90, False),
        (99, {}, 99, False),
        (99, {"max_new_tokens": 2}, 98, True),
        (100, {}, 99, False),
        (500, {"max_new_tokens": 40}, 60, True),
        (500, {"max_new_tokens": 51}, 500, False),
        (800, {}, 99, False),
        (500, {"custom_params": {"hier_kv_truncation": "off"}}, 500, False),
    ],
)
def test_the_front_process_checks_the_length_after_the_cut(
    num: int, params: dict[str, Any], checked: int, marked: bool
) -> None:
    seen: list[int] = []
    manager = SimpleNamespace(
        context_len=100, num_reserved_tokens=0, is_generation=True,
        server_args=SimpleNamespace(_hier_kv={"truncation": "overflow", "truncation_longest": 8}),
    )  # fmt: skip
    obj, ids = SimpleNamespace(sampling_params=dict(params)), list(range(num))
    around_validate(lambda self, obj, ids: seen.append(len(ids)), manager, obj, ids)
    assert seen == [checked]
    assert len(ids) == num
    assert (obj.sampling_params.get("custom_params") or {}).get(STATED, False) == marked


def refusal(num: int, flag: str = "overflow", /, **custom: Any) -> str:
    """Why the front process refuses a prompt; empty where it lets it through."""
    settings = {"truncation": flag, "truncation_longest": 8}
    manager = SimpleNamespace(
        context_len=100,
        num_reserved_tokens=0,
        is_generation=True,
        server_args=SimpleNamespace(_hier_kv=settings),
    )
    obj = SimpleNamespace(sampling_params={"custom_params": custom})
    try:
        around_validate(lambda self, obj, ids: None, manager, obj, [1] * num)
        check_num_chars(manager, 16 * num)
    except ValueError as error:
        return str(error)
    return ""


def test_the_front_process_refuses_what_is_too_long_and_what_is_not_allowed() -> None:
    assert not refusal(800)
    assert "800 tokens on this server (8 contexts" in refusal(801)
    assert "12800 characters on this server" in refusal(801, hier_kv_truncation="off")
    assert not refusal(801, "off")  # SGLang refuses it
    assert not refusal(801, "match")
    assert "must be off on this server" in refusal(10, "off", hier_kv_truncation="overflow")
    assert "must be a text of 1 to 256 bytes" in refusal(10, hier_kv_owner="")
    assert not refusal(10, hier_kv_owner="me")


@pytest.mark.parametrize("name", ["hier_kv_hint", "hier_kv_", "hier_kv_Exact", "hier_kv_truncate"])
def test_a_mistyped_wish_is_refused_by_the_names_that_there_are(name: str) -> None:
    known = "hier_kv_exact, hier_kv_hints, hier_kv_owner and hier_kv_truncation"
    assert refusal(10, "off", **{name: True}) == (
        f"custom_params may have {known} of the names that begin with hier_kv_, got {name!r}."
    )


def test_other_names_are_not_the_plugins_business() -> None:
    assert not refusal(10, thinking_budget=5, hier_kv=1, hier_cache_hint=True)
    assert not refusal(10, "off", **dict.fromkeys(["", "hierkv_hints"], 1))


def test_prompts_of_a_batch_may_have_one_object_of_parameters() -> None:
    """As SGLang hands it: what the front process noted for the first is there for the second."""
    manager = SimpleNamespace(
        context_len=100, num_reserved_tokens=0, is_generation=True,
        server_args=SimpleNamespace(_hier_kv={"truncation": "overflow", "truncation_longest": 8}),
    )  # fmt: skip
    params: dict[str, Any] = {"max_new_tokens": 2, "custom_params": {"hier_kv_exact": True}}
    seen: list[int] = []
    for _ in range(2):
        obj = SimpleNamespace(sampling_params=params)
        around_validate(lambda self, obj, ids: seen.append(len(ids)), manager, obj, [1] * 500)
    assert seen == [98, 98]
    assert params["custom_params"] == {"hier_kv_exact": True, STATED: True}


def test_the_secret_outlives_the_process_where_pages_do(tmp_path: Path) -> None:
    folder = str(tmp_path / "disk")
    first = lineage_secret(folder)
    assert len(bytes.fromhex(first)) == 32
    assert lineage_secret(folder) == first
    assert lineage_secret("") != lineage_secret("")
    (path,) = Path(folder).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("half a sec")
    assert lineage_secret(folder) != first


def test_stored_text_is_found_behind_the_head_and_the_oldest_goes_first() -> None:
    text = StoredText(4, 16)
    random = np.random.default_rng(1)
    talks = [random.integers(0, 50_000, 40).astype(np.int32) for _ in range(3)]
    hashes = [random.integers(0, 256, (10, 32), np.uint8) for _ in talks]
    text.add(7, talks[0][:20], hashes[0][:5], 1)
    text.add(7, talks[0], hashes[0], 1)  # it went on
    assert len(text) == 10
    prompt = np.concatenate([talks[0][:3], talks[0][13:], talks[1][:5]])
    run = text.find(7, prompt, 3, 8)
    assert run is not None
    assert (run.start, run.length, run.position) == (3, 27, 13)
    assert (run.hashes == hashes[0][3:]).all()
    assert (run.head_hashes == hashes[0][:1]).all()
    assert text.find(8, prompt, 3, 8) is None
    assert text.find(7, prompt, 3, 28) is None
    assert text.find(7, prompt[:1], 1, 8) is None
    gap = np.concatenate([prompt[:3], [1, 2], prompt[3:]]).astype(np.int32)
    assert text.find(7, gap, 3, 8) is None
    assert text.find(7, talks[0], 3, 8) is None, "it stands where it was stored"
    for talk, digests in zip(talks[1:], hashes[1:], strict=True):
        text.add(7, talk, digests, 1)
        assert len(text) <= 16
    assert text.find(7, prompt, 3, 8) is None
    last = np.concatenate([talks[2][:3], talks[2][20:]])
    assert text.find(7, last, 3, 8) is not None


def test_conversations_under_one_long_system_prompt_keep_its_pages_once() -> None:
    """Each turn brings it: kept with each, a hundred thousand turns would take gigabytes."""
    num_head, num_talks = 1000, 50
    text, random = StoredText(4, 2048), np.random.default_rng(1)
    prompt = np.arange(4 * num_head - 2, dtype=np.int32)  # its last page has text behind it
    chain = random.integers(0, 256, (num_head - 1, 32), np.uint8)
    rests = [np.arange(10, dtype=np.int32) + 10_000 * (i + 1) for i in range(num_talks)]
    ends = [random.integers(0, 256, (3, 32), np.uint8) for _ in rests]

    def add(number: int) -> None:
        tokens = np.concatenate([prompt, rests[number]])
        text.add(7, tokens, np.concatenate([chain, ends[number]]), num_head)

    add(0)
    tracemalloc.start()
    for number in range(1, num_talks):
        add(number)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) == num_head - 1 + 3 * num_talks
    assert taken < num_talks * 32 * num_head / 4, taken
    for rest, pages in zip(rests, ends, strict=True):
        run = text.find(7, np.concatenate([prompt, rest[2:]]), len(prompt), 8)
        assert run is not None
        assert run.position == len(prompt) + 2
        assert (run.head_hashes == np.concatenate([chain, pages[:1]])).all(), "its own last page"


def test_a_pipe_in_the_place_of_the_secret_holds_no_start_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "truncation.key")
    assert lineage_secret(str(tmp_path)) != lineage_secret(str(tmp_path))
    assert "truncation.key holds no key: what was" in secret_problem(str(tmp_path))


def test_a_secret_that_is_of_no_use_is_told_of_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "truncation.key"
    assert secret_problem(str(tmp_path)) == "", "a start makes it"
    kept = lineage_secret(str(tmp_path))
    assert secret_problem(str(tmp_path)) == ""
    path.chmod(0o640)
    assert "may be read or written by others (mode 0640)" in secret_problem(str(tmp_path))
    assert lineage_secret(str(tmp_path)) == kept
    for content in ("", kept[:-2], "no key"):
        path.write_text(content)
        assert lineage_secret(str(tmp_path)) not in (kept, lineage_secret(str(tmp_path)))
        assert "holds no key" in secret_problem(str(tmp_path))
        assert "remove it and a start makes a new one" in secret_problem(str(tmp_path))
        assert path.read_text() == content


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o600), (1, 0o600), (1, 0o644)])
def test_the_secret_of_another_user_is_told_of_and_stays(
    tmp_path: Path, owner: int, mode: int
) -> None:
    """Closed, or known to somebody who may not name lineages; not root's, who may do all."""
    path = tmp_path / "truncation.key"
    kept = lineage_secret(str(tmp_path))
    os.chown(path, owner, owner)
    path.chmod(mode)
    assert lineage_secret(str(tmp_path)) == kept, "root may use everybody's"
    taken = as_another_user(tmp_path, lambda: lineage_secret("."))
    assert len(bytes.fromhex(taken)) == 32
    assert taken != kept
    said = as_another_user(tmp_path, lambda: secret_problem("."))
    assert f"is user {owner}'s (mode {mode:04o}) and no key for user {ANOTHER_USER}" in said
    status = path.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode), path.read_text()) == (owner, mode, kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_secret_that_root_made_for_all_to_read_is_used(tmp_path: Path) -> None:
    kept = lineage_secret(str(tmp_path))
    (tmp_path / "truncation.key").chmod(0o644)
    assert as_another_user(tmp_path, lambda: lineage_secret(".")) == kept
