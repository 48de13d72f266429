"""Conversations over the context length, on the running server, through each of its interfaces."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sglang as sgl

from testkit.requests import flush_device
from testkit.server import Server, ServerError
from testkit.workload import load_tokenizer
from tests.e2e.hier_server import (
    ROUNDING,
    hier_args,
    in_dram,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.openai_client import SYSTEM, WAYS, chat_about, connect, seen, text_of, through

pytestmark = pytest.mark.e2e

PAGE, CONTEXT = 16, 512
NEW_TOKENS = 8
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("truncation")
    args = [*hier_args(folder, host_pages=600, disk_gb=0.2), "--page-size", str(PAGE)]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "4096"]
    args += ["--hier-kv-truncation", "overflow", "--enable-response-store"]
    with Server(args, log_path=folder / "server.log", stop="kill", start_timeout_s=400) as running:
        yield running


def ask(
    server: Server, prompt: list[int], mode: str = "", *, cache_salt: str = "", **params: Any
) -> Answer:
    custom = params.pop("custom", {}) | ({"hier_kv_truncation": mode} if mode else {})
    return server.generate(
        input_ids=prompt,
        sampling_params={
            "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "custom_params": custom, **params
        },
        return_logprob=True,
        cache_salt=cache_salt,
    )  # fmt: skip


def report(answer: Answer) -> dict[str, Any]:
    found = answer["meta_info"]["cached_tokens_details"]["hier_kv"]
    assert isinstance(found, dict)
    return found


def test_a_conversation_that_overflows_again_and_again_keeps_its_kv(server: Server) -> None:
    (text,) = real_prompts([40 * 36], seed=3)
    history: list[int] = []
    dropped, shares, asked_alone = [], [], []
    for turn in range(40):
        history = history + text[36 * turn : 36 * (turn + 1)]
        answer = ask(server, history)
        meta, old = answer["meta_info"], len(history) - 36
        assert meta["completion_tokens"] == NEW_TOKENS
        if turn and "dropped" in report(answer):
            cut = report(answer)["dropped"]
            assert meta["prompt_tokens"] == len(history) - cut < CONTEXT
            kept = (old - 1 - cut) // PAGE * PAGE  # the last token of an answer is not computed
            shares.append(meta["cached_tokens"] / kept)
            dropped.append(cut)
            if cut not in dropped[:-1]:
                # What a client would do without it: the same prompt, cut before it is sent.
                alone = ask(server, history[:4] + history[4 + cut :], "off")
                asked_alone.append(alone["meta_info"]["cached_tokens"] / kept)
        history = history + answer["output_ids"]
        in_dram(server)  # where the next turn's text is moved from
        if turn % 2:
            flush_device(server)
    assert len(set(dropped)) >= 5, dropped
    assert sorted(dropped) == dropped, "the cut goes back"
    assert min(shares) >= 0.9, shares
    assert max(asked_alone) < 0.1, asked_alone
    counts = settled(server)["host"]
    assert counts["aliased_pages"] > 0
    assert counts["left_behind_pages"] > 0
    assert counts["moved_tokens"] > 0


@pytest.mark.long
def test_kv_in_8_bits_is_reused_behind_the_same_cut_and_never_moved(tmp_path: Path) -> None:
    """Its K has positions in it: moved, it would be that of others."""
    args = [*hier_args(tmp_path, host_pages=600, disk_gb=0.2), "--page-size", str(PAGE)]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "4096"]
    args += ["--attention-backend", "cpu_extend", "--kv-cache-dtype", "fp8_e4m3"]
    args += ["--hier-kv-truncation", "all"]
    found: dict[int, list[int]] = {}
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        assert "K of this model cannot be moved" in server.log()
        (history,) = real_prompts([480], seed=3)
        for turn, more in enumerate(real_prompts([60] * 6, seed=4)):
            history = [*history, *more]
            answer = ask(server, history, cache_salt="a")
            cut = report(answer)["dropped"]
            found.setdefault(cut, []).append(answer["meta_info"]["cached_tokens"])
            # Nothing is stored under this salt: all of it is computed, each K where it is wanted.
            kept = history[:4] + history[4 + cut :]
            alone = ask(server, kept, "off", cache_salt=f"alone {turn}")
            assert alone["meta_info"]["cached_tokens"] == 0
            assert report(answer)["moved"] == 0
            (tokens, ours), (wanted, theirs) = map(tokens_and_logprobs, (answer, alone))
            assert tokens[0] == wanted[0]
            assert abs(ours[0] - theirs[0]) < ROUNDING
            on_device = ask(server, history, cache_salt="a")
            in_dram(server)
            flush_device(server)
            restored = ask(server, history, cache_salt="a")
            assert report(restored)["host"] == report(on_device)["device"] > 0
            assert tokens_and_logprobs(restored) == tokens_and_logprobs(on_device)
            history = [*history, *answer["output_ids"]]
            in_dram(server)
            flush_device(server)
        quoting = [*history[:4], *history[300:500]]
        assert ask(server, quoting, "all", cache_salt="a")["meta_info"]["cached_tokens"] == 0
        counts = settled(server)["host"]
    assert len(found) >= 2
    assert all(first == 0 and min(later, default=1) > 0 for first, *later in found.values())
    assert not counts.keys() & {"moved_tokens", "quote_searches", "saved_pre_pages"}


def test_who_asks_for_exact_kv_gets_what_the_cut_prompt_alone_gives(server: Server) -> None:
    (prompt,) = real_prompts([700], seed=5)
    ask(server, prompt[:500])
    in_dram(server)
    cut = ask(server, prompt)
    assert report(cut)["quality"] == "approximated"
    assert report(cut)["moved"] > 0
    exact = ask(server, prompt, custom={"hier_kv_exact": True})
    assert exact["meta_info"]["cached_tokens"] == 0
    assert report(exact)["quality"] == "exact"
    kept = prompt[:4] + prompt[4 + report(cut)["dropped"] :]
    plain = ask(server, kept, "off")
    assert plain["meta_info"]["cached_tokens"] == 0, "an exact request met a truncated one's KV"
    assert tokens_and_logprobs(exact) == tokens_and_logprobs(plain)


def test_equal_kept_text_is_not_shared_when_what_was_dropped_differs(server: Server) -> None:
    one, other = real_prompts([700, 700], seed=6)
    cut = report(ask(server, one))["dropped"]
    twin = one[:4] + other[4 : 4 + cut] + one[4 + cut :]
    before = state(server)["host"]["moved_tokens"]
    answer = ask(server, twin)
    assert report(answer)["dropped"] == cut
    assert answer["meta_info"]["cached_tokens"] == 0
    assert state(server)["host"]["moved_tokens"] == before
    again = ask(server, one)
    assert again["meta_info"]["cached_tokens"] > 0


def test_what_cannot_be_cut_is_refused_as_without_it(server: Server) -> None:
    (prompt,) = real_prompts([600], seed=7)
    with pytest.raises(ServerError, match="longer than the model's context") as refused:
        ask(server, prompt, "off")
    assert refused.value.status == 400
    with pytest.raises(ServerError, match="longer than the model's context"):
        server.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 2}, return_logprob=True,
            logprob_start_len=0,
        )  # fmt: skip
    with pytest.raises(ServerError, match="longer than the model's context"):
        ask(server, prompt, max_new_tokens=400)
    # A prompt that fits is cut only where SGLang would refuse it for the answer that it wants.
    wide = ask(server, prompt[:490], max_new_tokens=40)
    assert wide["meta_info"]["completion_tokens"] == 40
    assert report(wide)["dropped"] > 0
    default = server.generate(input_ids=prompt[:490], sampling_params={"ignore_eos": True})
    assert default["meta_info"]["prompt_tokens"] == 490


def ask_for_match(server: Server, prompt: list[int]) -> Answer:
    """A request for more than the flag allows; a client that is refused asks without."""
    try:
        return ask(server, prompt, "match")
    except ServerError:
        return ask(server, prompt)


def test_who_asks_for_more_than_the_flag_gets_nobodys_text(server: Server) -> None:
    """B learns nothing of what A wrote before a text that both have."""
    head, secret, public, question = real_prompts([4, 90, 200, 20], seed=8)
    for probe in range(8):
        ask_for_match(server, [*head, probe, *question, *public[100:]])
    ask(server, [*head, *secret, *public, *question])
    settled(server)
    for first in range(6):
        prompt = [*head, *public[first:], *question]
        honest = ask(server, prompt, cache_salt=f"nobody else's {first}")
        answer = ask_for_match(server, prompt)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert tokens_and_logprobs(answer) == tokens_and_logprobs(honest)
    assert "quote_searches" not in state(server)["host"]


@pytest.mark.parametrize(
    ("custom", "refusal"),
    [
        ({"hier_kv_truncation": "match"}, "must be off or overflow on this server"),
        ({"hier_kv_truncation": "all"}, "must be off or overflow on this server"),
        ({"hier_kv_truncation": "sometimes"}, "must be one of off, overflow, match, all"),
        ({"hier_kv_owner": 7}, "must be a text of 1 to 256 bytes"),
    ],
)
def test_wishes_that_are_refused(server: Server, custom: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ServerError, match=refusal) as refused:
        ask(server, [1, 2, 3], custom=custom)
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_half_a_character_in_a_key_is_refused_and_hurts_nobody(server: Server, name: str) -> None:
    with pytest.raises(ServerError) as refused:
        server.generate(
            input_ids=[5] * 40, sampling_params={"max_new_tokens": 1}, **{name: "\ud800"}
        )
    assert 400 <= refused.value.status < 500
    assert ask(server, [5] * 40)["meta_info"]["completion_tokens"] == NEW_TOKENS


def test_a_prompt_of_very_many_contexts_is_refused_before_anything_is_done(server: Server) -> None:
    with pytest.raises(ServerError, match="may have 4096 tokens on this server") as refused:
        server.generate(text="a " * 30_000, sampling_params={"max_new_tokens": 1})
    assert refused.value.status == 400
    with pytest.raises(ServerError, match="may have 4096 of them on this server") as refused:
        ask(server, [5] * 4097)
    assert refused.value.status == 413
    with pytest.raises(ServerError, match="may have 65536 characters on this server") as refused:
        server.generate(text="a " * 40_000, sampling_params={"max_new_tokens": 1})
    assert refused.value.status == 400
    with pytest.raises(ServerError, match="may have 4096 of them on this server") as refused:
        ask(server, [5] * 100_000)
    assert refused.value.status == 413, "it is refused while it is read"
    chat = {"model": "m", "messages": [{"role": "user", "content": "a " * 40_000}]}
    with pytest.raises(ServerError, match="may have 65536 characters on this server") as refused:
        server.post("/v1/chat/completions", chat)
    assert refused.value.status == 400
    assert ask(server, [5] * 4096)["meta_info"]["completion_tokens"] == NEW_TOKENS


def test_chat_completions_keep_the_system_prompt_and_cut_between_messages(server: Server) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    cuts = []
    for turn in range(12):
        messages.append({"role": "user", "content": text_of(50 + 3 * turn, seed=50 + turn)})
        answer = server.post(
            "/v1/chat/completions",
            {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0,
             "return_cached_tokens_details": True},
        )  # fmt: skip
        assert answer["usage"]["prompt_tokens"] <= CONTEXT - 12
        said = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
        cuts.append(answer["usage"]["prompt_tokens"])
    shrunk = [after for before, after in itertools.pairwise(cuts) if after < before]
    assert len(shrunk) >= 2, cuts
    tokenizer = load_tokenizer()
    said = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages[:-1])
    whole = tokenizer.encode(f"{said}<|assistant|>", add_special_tokens=False).ids
    in_dram(server)
    last = server.generate(input_ids=whole, sampling_params={"max_new_tokens": 12})
    found = report(last)
    assert found["dropped"] > 0
    assert last["meta_info"]["cached_tokens"] > 0
    system = f"<|system|>{SYSTEM}<|end|>"
    head = len(tokenizer.encode(system, add_special_tokens=False).ids)
    opened = tokenizer.token_to_id("<|user|>")
    assert whole[head] == opened
    assert whole[head + found["dropped"]] == opened


# ---- what a client of the OpenAI endpoints sees ----


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


@pytest.mark.parametrize("way", WAYS)
def test_an_openai_client_sees_reuse_by_tier(
    server: Server, client: openai.OpenAI, way: str
) -> None:
    seed = 200 + WAYS.index(way)
    usage, header = through(client, way, 200, seed)
    cached, report = seen(usage)
    assert cached == sum(report.get(tier, 0) for tier in ("device", "host", "disk", "remote"))
    settled(server)
    flush_device(server)
    usage, header = through(client, way, 200, seed)
    cached, report = seen(usage)
    assert report == header == {"device": 0, "host": cached, "disk": 0, "remote": 0}
    assert cached == (usage.prompt_tokens - 1) // PAGE * PAGE > 0


@pytest.mark.parametrize("way", WAYS)
def test_an_openai_client_sees_what_was_dropped(client: openai.OpenAI, way: str) -> None:
    seed = 210 + WAYS.index(way)
    fits, _ = through(client, way, 400, seed)
    usage, header = through(client, way, 700, seed)
    _, report = seen(usage)
    assert report == header
    assert report["cut_prompts"] == 1
    assert 700 * 0.9 < usage.prompt_tokens + report["dropped"] - (fits.prompt_tokens - 400) < 770
    # Again: now what is kept comes from where it lay, at another place than it was computed at.
    usage, _ = through(client, way, 700, seed)
    cached, report = seen(usage)
    assert cached > 0
    assert report["dropped"] > 0


def test_a_stream_without_usage_says_in_its_header_that_prompts_were_cut(
    client: openai.OpenAI,
) -> None:
    prompts = [text_of(700, 220), text_of(100, 221), text_of(700, 222)]
    create = client.completions.with_streaming_response.create
    with create(model="m", prompt=prompts, max_tokens=4, stream=True) as raw:
        header = json.loads(raw.headers["x-hier-kv"])
        assert "prompt_tokens_details" not in "".join(raw.iter_text())
    assert header["cut_prompts"] == 2


def test_several_answers_to_one_prompt_count_it_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=text_of(700, 223), max_tokens=4, n=3)
    assert len(answer.choices) == 3
    cached, report = seen(answer.usage)
    assert report["cut_prompts"] == 1
    assert 0 < report["dropped"] < 700
    assert cached == sum(report[tier] for tier in ("device", "host", "disk", "remote"))


def responded(client: openai.OpenAI, num_tokens: int, seed: int, *, is_streamed: bool) -> Any:
    """One question to `/v1/responses`: the details of its prompt's usage, and the header."""
    system, user = chat_about(num_tokens, seed)
    raw = client.responses.with_raw_response.create(
        model=client.models.list().data[0].id,  # any other is refused here
        instructions=system["content"],
        input=[user],
        max_output_tokens=4,
        temperature=0,
        stream=is_streamed,
    )
    parsed: Any = raw.parse()
    answer = list(parsed)[-1].response if is_streamed else parsed
    return answer.usage.input_tokens_details, json.loads(raw.headers.get("x-hier-kv", "{}"))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_of_responses_sees_reuse_and_what_was_dropped(
    server: Server, client: openai.OpenAI, is_streamed: bool
) -> None:
    pytest.importorskip("openai_harmony", reason="SGLang has no /v1/responses without it")

    def ask(num_tokens: int) -> Any:
        return responded(client, num_tokens, 240 + is_streamed, is_streamed=is_streamed)

    ask(200)
    settled(server)
    flush_device(server)
    details, header = ask(200)
    assert details.hier_kv == {"device": 0, "host": details.cached_tokens, "disk": 0, "remote": 0}
    assert details.cached_tokens > 0
    details, cut_header = ask(700)
    assert details.hier_kv["cut_prompts"] == 1
    assert details.hier_kv["dropped"] > 0
    if is_streamed:  # it begins before the prompt is looked at
        assert header == cut_header == {}
    else:
        assert header["host"] > 0
        assert cut_header == details.hier_kv


def test_an_answer_made_in_the_background_is_kept_with_its_report(
    server: Server, client: openai.OpenAI
) -> None:
    pytest.importorskip("openai_harmony", reason="SGLang has no /v1/responses without it")

    def ask(num_tokens: int) -> Any:
        system, user = chat_about(num_tokens, 250)
        queued = client.responses.create(
            model=client.models.list().data[0].id,
            instructions=system["content"],
            input=[user],
            max_output_tokens=4,
            temperature=0,
            background=True,
            store=True,
        )
        assert queued.usage is None
        while (answer := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
            time.sleep(0.05)
        assert answer.status in ("completed", "incomplete"), answer
        raw = client.responses.with_raw_response.retrieve(queued.id)
        assert "x-hier-kv" not in raw.headers  # of another HTTP request, which had no prompt
        assert raw.parse().usage == answer.usage
        assert answer.usage is not None
        return answer.usage.input_tokens_details

    ask(200)
    settled(server)
    flush_device(server)
    details = ask(200)
    assert details.hier_kv == {"device": 0, "host": details.cached_tokens, "disk": 0, "remote": 0}
    assert details.cached_tokens > 0
    details = ask(700)
    assert details.hier_kv["cut_prompts"] == 1
    assert details.hier_kv["dropped"] > 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_of_anthropics_endpoint_sees_it_in_the_header(
    server: Server, is_streamed: bool
) -> None:
    def ask(num_tokens: int) -> tuple[dict[str, Any], int]:
        system, user = chat_about(num_tokens, 230 + is_streamed)
        body = {"model": "m", "max_tokens": 4, "temperature": 0, "stream": is_streamed}
        body |= {"system": system["content"], "messages": [user]}
        raw = httpx.post(f"{server.url}/v1/messages", json=body, timeout=600.0)
        raw.raise_for_status()
        cached = re.findall(r'"cache_read_input_tokens":(\d+)', raw.text)
        return json.loads(raw.headers.get("x-hier-kv", "{}")), max(map(int, cached), default=0)

    ask(200)
    settled(server)
    flush_device(server)
    header, cached = ask(200)
    assert header == {"device": 0, "host": cached, "disk": 0, "remote": 0}
    assert cached > 0
    header, _ = ask(700)
    assert header["cut_prompts"] == 1
    assert header["dropped"] > 0


def test_a_prompt_of_which_nothing_is_known_has_no_report(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="m", prompt="a", max_tokens=1)
    assert "x-hier-kv" not in raw.headers
    assert seen(raw.parse().usage) == (0, {})


def test_a_session_goes_through_an_overflow(server: Server) -> None:
    session = server.post("/open_session", {"capacity_of_str_len": 1 << 20})
    rid, seen = None, []
    for turn in range(8):
        (tokens,) = real_prompts([90], seed=80 + turn)
        answer = server.generate(
            input_ids=tokens,
            sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            session_params={"id": session, "rid": rid},
        )
        rid = answer["meta_info"]["id"]
        assert answer["meta_info"]["completion_tokens"] == NEW_TOKENS
        details = answer["meta_info"]["cached_tokens_details"] or {}
        seen.append((answer["meta_info"], details.get("hier_kv", {}).get("dropped", 0)))
        in_dram(server)
        if turn == 4:
            flush_device(server)
    server.post("/close_session", {"session_id": session})
    assert seen[-1][1] > 0
    for turn, (meta, dropped) in enumerate(seen):
        assert meta["prompt_tokens"] == 90 * (turn + 1) + NEW_TOKENS * turn - dropped
        if dropped:
            assert meta["cached_tokens"] > 0.8 * (meta["prompt_tokens"] - 90)


@sgl.function  # type: ignore[untyped-decorator]
def program(s: Any, turns: list[str]) -> None:
    """A conversation written as a program of SGLang's frontend."""
    s += sgl.system(SYSTEM)
    for number, said in enumerate(turns):
        s += sgl.user(said)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=8, temperature=0))


def test_a_frontend_program_goes_through_an_overflow(server: Server) -> None:
    before = state(server)["host"]
    backend = sgl.RuntimeEndpoint(server.url)
    try:
        for seed in range(100, 300, 10):  # until a turn came when the one before it was in DRAM
            done = program.run([text_of(90, seed + turn) for turn in range(7)], backend=backend)
            assert all(isinstance(done[f"answer_{turn}"], str) for turn in range(7))
            after = state(server)["host"]
            assert after["truncated_requests"] > before["truncated_requests"]
            if after["moved_tokens"] > before["moved_tokens"]:
                break
    finally:
        backend.shutdown()
    assert after["moved_tokens"] > before["moved_tokens"]
    assert "Traceback" not in server.log().split("The server is fired up")[-1]
