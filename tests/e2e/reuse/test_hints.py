"""Clients that say which of their chats come back, and DRAM for a third of these chats.

And the admin endpoint, which says so of prompts that nobody has sent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from testkit.requests import flush_device
from testkit.server import Server, ServerError
from testkit.workload import reply_of
from tests.e2e.hier_server import (
    PAGE,
    SLOT_BYTES,
    answers_as_computed,
    connected,
    hier_args,
    real_prompts,
    settled,
    tokens_and_logprobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHAT_PAGES = 4
RETURNING, ENDED, SILENT = 3, 8, 4
STORE_PAGES = 10 * CHAT_PAGES
HOST_CHATS = (RETURNING + ENDED + SILENT) // 3
SOON = {"hier_kv_hints": {"returns_in_s": 3600}}
OVER = {"hier_kv_hints": {"ends": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hints")
    args = hier_args(folder, host_pages=HOST_CHATS * CHAT_PAGES, disk_gb=0.5)
    args += ["--max-running-requests", "1", "--hier-kv-pin-share", "0.2"]
    (folder / "quotas").write_text("cache_salt:guarded=0.4\n")
    args += ["--hier-kv-quotas", f"@{folder}/quotas"]
    (folder / "shared").mkdir()
    args += ["--hier-kv-remote-url", f"file://{folder}/shared?size={STORE_PAGES * SLOT_BYTES}"]
    with Server(args, log_path=folder / "server.log", stop="kill") as server:
        yield connected(server)


def _ask(server: Server, prompt: Sequence[int], custom: dict[str, Any] | None = None) -> Any:
    params: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    if custom is not None:
        params["custom_params"] = custom
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True)


def test_whose_time_is_over_is_as_one_that_ended(server: Server) -> None:
    """Comes first: below ends are said that do not come true, and owners may share a record."""
    before = settled(server)["host"].get("ttl_ended_pages", 0)
    (prompt,) = real_prompts([CHAT_PAGES * PAGE + 20], seed=2)
    params = {"max_new_tokens": 4, "custom_params": {"hier_kv_hints": {"ttl_s": 0.5}}}
    server.generate(input_ids=prompt, sampling_params=params, cache_salt="in a hurry")

    def is_over() -> bool:
        ended = settled(server)["host"].get("ttl_ended_pages", 0)
        return bool(ended == before + CHAT_PAGES)

    deadline_s = time.monotonic() + 300
    while not is_over():
        assert time.monotonic() < deadline_s


def test_openai_clients_give_them_too(server: Server) -> None:
    """Comes before those below, too."""
    before = settled(server)["host"].get("hinted_ends_pages", 0)
    words = " ".join(f"word {number}" for number in range(200))
    chat = {
        "model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": 2,
        "custom_params": {"hier_kv_hints": {"ends": True}},
        "cache_salt": "whoever",  # who is judged by nothing yet
    }  # fmt: skip
    server.post("/v1/chat/completions", chat)
    assert settled(server)["host"]["hinted_ends_pages"] > before


def test_what_comes_back_is_kept_and_what_is_over_is_gone(server: Server) -> None:
    prompts = list(real_prompts([CHAT_PAGES * PAGE + 20] * (RETURNING + ENDED + SILENT), seed=1))
    returning, ended = prompts[:RETURNING], prompts[RETURNING : RETURNING + ENDED]
    before = settled(server)["host"]
    # Each is asked once: a prompt that came back at once would teach the server that those do.
    for prompt in returning:  # the oldest: without hints they leave first
        _ask(server, prompt, SOON)
        settled(server)
    for prompt in ended:
        _ask(server, prompt, OVER)
        settled(server)
    for prompt in prompts[RETURNING + ENDED :]:
        _ask(server, prompt)
        settled(server)
    counts = settled(server)["host"]
    new = {name: counts[name] - before.get(name, 0) for name in counts if "hinted" in name}
    assert new["hinted_return_pages"] == RETURNING * CHAT_PAGES
    assert new["hinted_ends_pages"] == ENDED * CHAT_PAGES
    flush_device(server)
    for prompt in returning:
        answer = _ask(server, prompt, SOON)
        assert reply_of(answer).by_tier["host"] == CHAT_PAGES * PAGE
        on_device = _ask(server, prompt, SOON)
        assert reply_of(on_device).by_tier["device"] == CHAT_PAGES * PAGE
        assert tokens_and_logprobs(answer) == tokens_and_logprobs(on_device)
    for prompt in ended:
        answer = _ask(server, prompt)
        assert reply_of(answer).by_tier["host"] == 0


def test_what_is_pinned_stays_while_many_come(server: Server) -> None:
    """A share of a small DRAM is two pages; without the pin they would leave with the others."""
    pinned, *others = real_prompts([CHAT_PAGES * PAGE + 20] * (HOST_CHATS + 2), seed=3)
    before = settled(server)["host"].get("pinned_pages", 0)
    expected = tokens_and_logprobs(_ask(server, pinned, {"hier_kv_hints": {"pin_s": 3600}}))
    counts = settled(server)["host"]
    assert counts["pinned_pages"] == before + CHAT_PAGES
    assert counts["pinned_now_pages"] >= CHAT_PAGES
    for prompt in others:
        _ask(server, prompt)
        settled(server)
    flush_device(server)
    answer = _ask(server, pinned)
    assert reply_of(answer).by_tier["host"] >= PAGE
    assert len(tokens_and_logprobs(answer)) == len(expected)


def test_a_tenant_keeps_its_share_while_many_others_come(server: Server) -> None:
    mine, *others = real_prompts([CHAT_PAGES * PAGE + 20] * (2 * HOST_CHATS + 1), seed=6)
    params: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    server.generate(input_ids=mine, cache_salt="guarded", sampling_params=params)
    for prompt in others:
        _ask(server, prompt)
        settled(server)
    counts = settled(server)["host"]
    assert counts["quota_tenant_1_host_pages"] == CHAT_PAGES
    told = json.dumps(server.get("/server_info"))
    assert "--hier-kv-quotas @" in told
    assert "guarded" not in told
    assert counts["quota_others_host_pages"] <= (HOST_CHATS - 1) * CHAT_PAGES
    flush_device(server)
    answer = server.generate(input_ids=mine, cache_salt="guarded", sampling_params=params)
    assert reply_of(answer).by_tier["host"] == CHAT_PAGES * PAGE
    counts = settled(server)["host"]
    assert counts["tenant_1_requested_tokens"] == 2 * len(mine)
    assert counts["tenant_1_reused_host_tokens"] == CHAT_PAGES * PAGE
    assert counts["requested_tokens"] == 2 * len(mine) + counts["tenant_others_requested_tokens"]
    server.get("/health_generate")  # SGLang's own request is nobody's
    assert settled(server)["host"]["requested_tokens"] == counts["requested_tokens"]


def _steer(server: Server, prompt: Sequence[int], **wishes: Any) -> dict[str, Any]:
    (done,) = server.post("/hier_kv/steer", {"input_ids": list(prompt), **wishes})["schedulers"]
    assert isinstance(done, dict)
    return done


def test_a_prompt_is_demoted_and_brought_back_before_its_request_comes(server: Server) -> None:
    prompt, *others = real_prompts([CHAT_PAGES * PAGE + 20] * (HOST_CHATS + 1), seed=4)
    ask: dict[str, Any] = {
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    expected = server.generate(input_ids=prompt, cache_salt="steered", **ask)
    settled(server)
    assert _steer(server, prompt, demote=True)["host"] == 0  # another salt's
    done = _steer(server, prompt, demote=True, cache_salt="steered")
    assert done == {"pages": CHAT_PAGES, "host": CHAT_PAGES, "disk": 0, "demoted": CHAT_PAGES}
    for other in others:
        _ask(server, other)
        settled(server)
    flush_device(server)
    done = _steer(server, prompt, prefetch=True, pin_s=600, cache_salt="steered")
    assert done == {"pages": CHAT_PAGES, "host": 0, "disk": CHAT_PAGES, "prefetching": True}
    deadline_s = time.monotonic() + 300
    while _steer(server, prompt, unpin=True, cache_salt="steered")["host"] < CHAT_PAGES:
        assert time.monotonic() < deadline_s
    answer = server.generate(input_ids=prompt, cache_salt="steered", **ask)
    assert reply_of(answer).by_tier["host"] == CHAT_PAGES * PAGE
    assert answers_as_computed(answer, expected)
    assert settled(server)["host"]["prefetched_pages"] == CHAT_PAGES


def test_a_text_that_nobody_sent_is_stored_nowhere(server: Server) -> None:
    text = "a text of a few words that nobody has sent. " * 40
    (done,) = server.post("/hier_kv/steer", {"text": text, "prefetch": True})["schedulers"]
    assert done["pages"] > 0
    assert done["host"] == done["disk"] == 0
    with pytest.raises(ServerError, match="expected something to do") as refused:
        server.post("/hier_kv/steer", {"text": text})
    assert refused.value.status == 400


def test_documents_are_stored_before_anybody_asks_for_them(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = "Of every traveller who came by, the keeper of the bridge asked a thing. " * 15
    (ids,) = real_prompts([CHAT_PAGES * PAGE], seed=8)
    chat = [
        {"role": "system", "content": "You answer from this handbook. " * 20},
        {"role": "user", "content": " ".join(f"rule {number}" for number in range(60))},
    ]
    asked = [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    documents = tmp_path / "documents.jsonl"
    lines: list[dict[str, Any]] = [{"text": story}, {"messages": chat}, {"input_ids": ids}]
    documents.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def warm() -> Any:
        tenant = ["--cache-salt", "warmed", "--extra-key", "k"]
        assert main(["warm", server.url, str(documents), "--json", *tenant]) == 0
        return json.loads(capsys.readouterr().out)

    before = settled(server)["host"].get("saved_pages", 0)
    found = warm()
    counts = settled(server)["host"]  # a page is counted a moment after it can be found
    num_pages = counts["saved_pages"] - before
    assert (found["documents"], found["there_already"], found["reused"]) == (3, 0, {})
    assert found["computed_tokens"] == found["tokens"]
    assert found["tokens"] - len(lines) * PAGE < num_pages * PAGE <= found["tokens"]
    flush_device(server)
    assert warm()["there_already"] == 3
    flush_device(server)
    tenant: dict[str, Any] = {"cache_salt": "warmed", "extra_key": "k"}
    answer = server.generate(
        text=story + "Who was it?", sampling_params={"max_new_tokens": 2}, **tenant
    )
    assert reply_of(answer).by_tier["host"] >= 2 * PAGE
    body = {"messages": asked, "max_tokens": 2, "return_meta_info": True, **tenant}
    (choice,) = server.post("/v1/chat/completions", body)["choices"]
    assert choice["meta_info"]["cached_tokens_details"]["hier_kv"]["host"] >= 2 * PAGE
    documents.write_text('{"text": "one"}\n{"txt": "two"}\n')
    before = settled(server)["host"]
    assert main(["warm", server.url, str(documents)]) == 1
    assert f"{documents}:2: expected one of text" in capsys.readouterr().err
    assert settled(server)["host"] == before


@pytest.mark.parametrize(
    ("hints", "refusal"),
    [
        ("soon", "must be an object with returns_in_s, ttl_s, pin_s or ends"),
        ({"returns_in_s": -3}, "must be a number of seconds above 0"),
        ({"returns_in_s": 5, "ends": True}, "got both"),
        ({"pinned": True}, "may have returns_in_s, ttl_s, pin_s or ends, got 'pinned'"),
    ],
)
def test_what_is_no_hint_is_refused(server: Server, hints: Any, refusal: str) -> None:
    with pytest.raises(ServerError, match=refusal) as refused:
        _ask(server, [5] * 40, {"hier_kv_hints": hints})
    assert refused.value.status == 400
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 2,
        "custom_params": {"hier_kv_hints": hints},
    }  # fmt: skip
    with pytest.raises(ServerError, match=refusal) as refused:
        server.post("/v1/chat/completions", chat)
    assert refused.value.status == 400


def test_a_mistyped_name_is_refused_and_others_pass(server: Server) -> None:
    refusal = "may have hier_kv_exact, .* of the names that begin with hier_kv_, got 'hier_kv_hint'"
    with pytest.raises(ServerError, match=refusal) as refused:
        _ask(server, [5] * 40, {"hier_kv_hint": {"ends": True}})
    assert refused.value.status == 400
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 2,
        "custom_params": {"hier_kv_hint": {"ends": True}},
    }  # fmt: skip
    with pytest.raises(ServerError, match=refusal) as refused:
        server.post("/v1/chat/completions", chat)
    assert refused.value.status == 400
    known = {"hier_kv_exact": True, "hier_kv_owner": "me", "hier_kv_truncation": "off"}
    assert _ask(server, [5] * 40, {**known, "thinking_budget": 5})["output_ids"]


def test_a_tenant_keeps_its_share_of_a_store_too(server: Server) -> None:
    """Its pages are the oldest there, and what others put is more than fits."""
    mine, *others = real_prompts([CHAT_PAGES * PAGE + 20] * 15, seed=18)
    params: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    computed = server.generate(
        input_ids=mine, cache_salt="guarded", sampling_params=params, return_logprob=True
    )
    deadline = time.monotonic() + 300
    before = settled(server)["host"]
    while before["quota_tenant_1_remote_bytes"] < CHAT_PAGES * SLOT_BYTES:  # put, and told of
        assert time.monotonic() < deadline
        before = settled(server)["host"]
    by_right = 0.4 * 0.9 * STORE_PAGES * SLOT_BYTES  # of what stays after a look
    assert before["quota_tenant_1_remote_bytes"] < by_right
    for path in (server.log_path.parent / "shared").rglob("*.hkv"):
        an_hour_ago_ns = path.stat().st_mtime_ns - 3600 * 10**9
        os.utime(path, ns=(an_hour_ago_ns, an_hour_ago_ns))
    for prompt in others:
        _ask(server, prompt)
        settled(server)
    counts = settled(server)["host"]
    assert counts["remote_written_pages"] >= STORE_PAGES, "less was put than fits"
    assert counts["quota_tenant_1_remote_bytes"] == before["quota_tenant_1_remote_bytes"]
    assert counts["quota_others_remote_bytes"] < 1.1 * STORE_PAGES * SLOT_BYTES
    flush_device(server)
    server.post("/hicache/storage-backend/clear")
    done = _steer(server, mine, prefetch=True, cache_salt="guarded")
    nowhere = {"pages": CHAT_PAGES, "host": 0, "disk": 0}
    assert done == {**nowhere, "prefetching": True, "asking_remote": True}
    deadline_s = time.monotonic() + 300
    while _steer(server, mine, locate=True, cache_salt="guarded")["host"] < CHAT_PAGES:
        assert time.monotonic() < deadline_s
    answer = server.generate(
        input_ids=mine, cache_salt="guarded", sampling_params=params, return_logprob=True
    )
    assert reply_of(answer).by_tier["host"] == CHAT_PAGES * PAGE
    assert answers_as_computed(answer, computed)
