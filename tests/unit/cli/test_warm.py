"""`hier-kv warm`: the lines that it takes and refuses, and servers that refuse, wait or go away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import __version__
from sglang_ext.cli import main
from sglang_ext.cli.warm.command import Summary
from sglang_ext.cli.warm.documents import read_documents
from sglang_ext.cli.warm.server import Keys, Served, WarmedServer, WarmError
from sglang_ext.hints.steering_request import parse_body

PAGE = 64


class Peer(ThreadingHTTPServer):
    """Says what SGLang would; the real one is asked in tests/e2e/reuse/test_hints.py.

    Attributes:
        bodies: that came, by path.
        is_stored: whether the pages of a prompt are said to be stored.
        ends_after: prompts after which it hangs up on everybody; 0: none.
        drains_after: prompts after which it says that it is about to end; 0: none.
        at_once: requests that it answers only when so many are there.
        num_begun: requests that came until now.
        most: requests that were there at once.
        priorities: what it says of them.
        admin_key: without which the steering endpoint refuses.
        saves: that are queued, and that have ended. Each time it is asked one more ends, unless it
            `stalls`, and another one is queued.
        is_older: whether it is of a release that does not say how many ended.
        state: what its scheduler says of itself besides.
        strange: answers by path, in place of its own.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        self.is_stored, self.ends_after, self.admin_key = True, 0, ""
        self.drains_after = 0
        self.num_begun, self.most, self.now = 0, 0, 0
        self.changed = threading.Condition()
        self.at_once = threading.Barrier(1)
        self.priorities: dict[str, Any] = {}
        self.saves, self.stalls, self.is_older = (0, 0), False, False
        self.state: dict[str, Any] = {}
        self.strange: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[dict[str, Any]]:
        return self.bodies.get("/generate", []) + self.bodies.get("/v1/chat/completions", [])


class _Handler(BaseHTTPRequestHandler):
    server: Peer

    def do_GET(self) -> None:
        if self._hangs_up():
            return
        if self.path == "/ready":
            is_ready = not 0 < self.server.drains_after <= len(self.server.prompts())
            self.send_response(200 if is_ready else 503)
            self.end_headers()
            return
        queued, ended = self.server.saves
        if not self.server.stalls:
            self.server.saves = queued, ended + 1
        host = {"save_queue": queued, "saves_ended": ended, "pinned_now_pages": 3}
        if self.server.is_older:
            del host["saves_ended"]
        state = {"page_size": PAGE, "host": host, **self.server.state}
        self._say(200, {"internal_states": [{"hier_kv": state}], **self.server.priorities})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        peer = self.server
        with peer.changed:
            peer.bodies.setdefault(self.path, []).append(body)
        if self._hangs_up():
            return
        if self.path in self.server.strange:
            self._say(200, self.server.strange[self.path])
            return
        if self.path == "/hier_kv/steer":
            parse_body(body)  # what the real one would refuse
            if self.headers.get("Authorization", "") != peer.admin_key:
                self._say(401, {"error": "Unauthorized"})
                return
            num_pages = len(body["input_ids"]) // PAGE
            kept = num_pages if peer.is_stored else 0
            other = {"pages": num_pages, "host": 0, "disk": 0}
            self._say(200, {"schedulers": [other, {"pages": num_pages, "host": kept, "disk": 0}]})
            return
        with peer.changed:
            peer.num_begun += 1
            peer.now += 1
            peer.most = max(peer.most, peer.now)
            peer.changed.notify_all()
        with contextlib.suppress(threading.BrokenBarrierError):
            peer.at_once.wait(300)
        with peer.changed:
            peer.now -= 1
            peer.changed.notify_all()
        self._say(*_answer(body))

    def _hangs_up(self) -> bool:
        peer = self.server
        return bool(peer.ends_after) and len(peer.prompts()) > peer.ends_after

    def _say(self, status: int, content: Any) -> None:
        with contextlib.suppress(ConnectionError):  # who asked has given up
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None: ...


def _answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if body.get("text") == "bad":
        return 400, {"error": {"message": "it is longer than the context"}}
    if body.get("text") == "strange":
        return 200, {"meta_info": {}}
    report: dict[str, Any] = {"device": 0, "host": PAGE, "disk": 0, "remote": 0}
    if body.get("text") == "cut":
        report["dropped"] = 5
    aborted = {"type": "abort", "message": "no room"} if body.get("text") == "aborted" else None
    if body.get("text") == "short":
        short = {"prompt_tokens": 1, "cached_tokens": 0, "finish_reason": None}
        return 200, {"prompt_token_ids": [1], "meta_info": short}
    meta: dict[str, Any] = {
        "prompt_tokens": PAGE + 10, "cached_tokens": PAGE, "finish_reason": aborted,
        "cached_tokens_details": {"hier_kv": report},
    }  # fmt: skip
    said = {"prompt_token_ids": [1] * (PAGE + 10), "meta_info": meta}
    return 200, {"choices": [said]} if "messages" in body else said


@pytest.fixture
def peer() -> Iterator[Peer]:
    server = Peer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of lines; its name."""

    def make(*lines: Any, name: str = "p.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return str(path)

    return make


def test_a_document_is_sent_as_the_prompt_that_it_is(tmp_path: Path, write: Write) -> None:
    text = tmp_path / "handbook.txt"
    text.write_text("chapter one")
    chat = {"messages": [{"role": "system", "content": [{"type": "text", "text": "be kind"}]}]}
    lines = write({"text": "a", "cache_salt": "mine"}, {"input_ids": [1, 2]}, {**chat, "tools": []})
    found = list(read_documents([str(text), lines], {"cache_salt": "all", "extra_key": "k"}))
    assert [each.where for each in found] == [str(text), *(f"{lines}:{n}" for n in (1, 2, 3))]
    assert sum(each.num_bytes for each in found) == os.path.getsize(text) + os.path.getsize(lines)
    plain = {
        "extra_key": "k", "sampling_params": {"max_new_tokens": 0}, "return_prompt_token_ids": True
    }  # fmt: skip
    assert [(each.path, each.body) for each in found] == [
        ("/generate", {"text": "chapter one", "cache_salt": "all", **plain}),
        ("/generate", {"text": "a", "cache_salt": "mine", **plain}),
        ("/generate", {"input_ids": [1, 2], "cache_salt": "all", **plain}),
        (
            "/v1/chat/completions",
            {
                **chat, "tools": [], "cache_salt": "all", "extra_key": "k", "max_tokens": 0,
                "return_prompt_token_ids": True, "return_meta_info": True,
            },
        ),
    ]  # fmt: skip
    assert found[1].tenant == {"cache_salt": "mine", "extra_key": "k"}


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("{", "expected a JSON object in one line (Expecting property name"),
        ("[" * 100_000, "expected a JSON object in one line ("),
        ('{"input_ids": [' + "1" * 5000 + "]}", "expected a JSON object in one line (Exceeds"),
        ("[1]", "expected a JSON object, got '[1]'."),
        ("{}", "expected one of text, input_ids, messages, got none of them."),
        ('{"text": "a", "input_ids": [1]}',
         "expected one of text, input_ids, messages, got text and input_ids."),
        ('{"text": "a", "tools": []}',
         "expected some of text, cache_salt, extra_key, got 'tools'."),
        ('{"text": "a", "lora_path": "l"}',
         "expected some of text, cache_salt, extra_key, got 'lora_path'."),
        ('{"messages": [{"role": "user", "content": "a"}], "model": "m:l"}', "got 'model'."),
        ('{"text": ""}', "text must be a text that is not empty."),
        ('{"text": "a", "cache_salt": 3}', "cache_salt must be a text."),
        ('{"input_ids": []}', "input_ids must be a list of token ids that is not empty."),
        ('{"input_ids": [1, true]}', "input_ids must be a list of token ids that is not empty."),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
         "messages must be a list of a chat's messages that is not empty, all of text."),
        ("\udcff", "expected text in UTF-8 ("),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_by_its_number_before_anything_is_sent(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, refusal: str
) -> None:
    path = tmp_path / "bad.jsonl"
    content = f'{{"text": "good"}}\n\n{line}\n'
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert main(["warm", peer.url, str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hier-kv: {path}:3: ")
    assert refusal in said
    assert peer.bodies == {}


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--concurrency", "0"], "--concurrency must be 1 to 64, got 0"),
        (["--concurrency", "65"], "--concurrency must be 1 to 64, got 65"),
        (["--timeout-s", "0"], "--timeout-s must be above 0, at most 86400 s, got 0"),
        (["--timeout-s", "nan"], "--timeout-s must be above 0, at most 86400 s, got nan"),
        (["--pin-s", "86401"], "--pin-s must be above 0, at most 86400 s, got 86401"),
    ],
)
def test_flags_out_of_range_are_one_sentence(
    peer: Peer,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    refusal: str,
) -> None:
    assert main(["warm", peer.url, write({"text": "a"}), *flags]) == 2
    assert refusal in capsys.readouterr().err
    assert peer.prompts() == []


def test_nothing_to_send_is_one_sentence(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", peer.url, write()]) == 1
    assert "expected documents, found none in " in capsys.readouterr().err


def test_all_is_said_of_documents_that_are_stored(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.priorities = {"enable_priority_scheduling": True}
    chat = {"messages": [{"role": "user", "content": "b"}], "cache_salt": "s"}
    assert main(["warm", peer.url, write({"text": "a"}, chat), "--pin-s", "60"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "3 pages are pinned now; 0 found no room in --hier-kv-pin-share",
        "2 documents are stored, 2 of them were there already; 0 failed",
    ]
    assert [body["priority"] for body in peer.prompts()] == [-(2**63)] * 2
    pins = [body for body in peer.bodies["/hier_kv/steer"] if "pin_s" in body]
    assert len(pins) == 2
    assert [body.get("cache_salt") for body in pins].count("s") == 1


def test_a_document_of_less_than_a_page_is_not_counted_as_stored(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write({"text": "a"}, {"text": "short"})
    assert main(["warm", peer.url, path, "--pin-s", "60"]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [
        f"too short: {path}:2: 1 token, and a page has 64; nothing of it is stored",
        "1 document is stored, 1 of them was there already; 1 is too short; 0 failed",
    ]
    pins = [body for body in peer.bodies["/hier_kv/steer"] if "pin_s" in body]
    assert len(pins) == 1
    assert main(["warm", peer.url, path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["too_short"] == [{"where": f"{path}:2", "tokens": 1}]
    assert (found["documents"], found["tokens"], found["computed_tokens"]) == (1, PAGE + 10, 10)


def test_a_document_that_fails_does_not_stop_the_others(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["bad", "a", "cut", "aborted", "strange"]
    path = write(*({"text": text} for text in texts))
    assert main(["warm", peer.url, path, "--json", "--concurrency", "1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["where"] for each in found["failures"]] == [f"{path}:{n}" for n in (1, 3, 4, 5)]
    assert [each["reason"] for each in found["failures"]] == [
        "/generate answers 400: it is longer than the context",
        "it is over the context length: 5 tokens were cut",
        "the server ended the request: no room",
        "the answer lacks what SGLang's have (KeyError('prompt_token_ids'))",
    ]
    assert (found["documents"], found["tokens"], found["computed_tokens"]) == (1, PAGE + 10, 10)
    assert not found["is_cut_short"]


@pytest.mark.parametrize(
    "said",
    [{}, [], None, {"schedulers": None}, {"schedulers": []}, {"schedulers": [{"pages": "1"}]}],
)
def test_a_steering_endpoint_of_somebody_else_is_a_failure(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str], said: Any
) -> None:
    peer.strange = {"/hier_kv/steer": said}
    assert main(["warm", peer.url, write({"text": "a"}), "--json"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert "the answer of /hier_kv/steer lacks what SGLang's have" in failure["reason"]


@pytest.mark.parametrize(
    "state", [{"page_size": None}, {"page_size": "64"}, {"host": None}, {"host": [1]}]
)
def test_a_state_that_is_none_is_one_sentence(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str], state: dict[str, Any]
) -> None:
    peer.state = state
    assert main(["warm", peer.url, write({"text": "a"})]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hier-kv: the state of {peer.url} lacks what SGLang's have")
    assert error.count("\n") == 1


@pytest.mark.parametrize("tokens", [None, "64", 1.5, float("nan"), []])
def test_numbers_that_are_none_are_a_failure(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str], tokens: Any
) -> None:
    meta = {"prompt_tokens": tokens, "cached_tokens": 0, "finish_reason": None}
    peer.strange = {"/generate": {"prompt_token_ids": [1], "meta_info": meta}}
    assert main(["warm", peer.url, write({"text": "a"}), "--json"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert "a whole number is expected" in failure["reason"]


def test_what_the_server_does_not_keep_is_a_failure(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.is_stored = False
    assert main(["warm", peer.url, write({"text": "a"})]) == 1
    said = capsys.readouterr().out
    assert "1 of its pages is neither in DRAM nor on disk: there was no room for them" in said
    assert "0 documents are stored, 0 of them were there already; 1 failed" in said


def test_nobody_waits_for_saves_of_others(peer: Peer, write: Write) -> None:
    """Of a server under traffic some are queued at any time."""
    (document,) = read_documents([write({"text": "a"})], {})
    peer.is_stored, peer.saves = False, (4, 100)
    server = WarmedServer(peer.url, Keys(), timeout_s=86_400.0)
    before = peer.saves[1]
    with pytest.raises(WarmError, match="there was no room for them; see --hier-kv-host-size"):
        server.warm(document, None)
    assert peer.saves[1] - before == 1 + 4  # asked for once, and until those have ended
    peer.stalls = True
    with pytest.raises(WarmError, match="they were not saved in 3 s; run this again"):
        WarmedServer(peer.url, Keys(), timeout_s=3.0).warm(document, None)


def test_a_server_that_does_not_say_which_saves_ended_is_said_to_be_of_another_release(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.is_stored, peer.is_older = False, True
    path = write({"text": "a"}, {"text": "b"})
    assert main(["warm", peer.url, path]) == 1
    said = capsys.readouterr().out
    assert said.count("lacks 'saves_ended'") == 2
    assert "use the hier-kv of the server's own release" in said
    peer.is_stored = True
    assert main(["warm", peer.url, path]) == 0


def test_a_server_that_goes_away_is_not_asked_again(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.ends_after = 2
    path = write(*({"text": f"document {n}"} for n in range(20)))
    assert main(["warm", peer.url, path, "--concurrency", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_cut_short"]
    assert found["documents"] == 2
    assert [each["where"] for each in found["failures"]] == [f"{path}:3"]
    assert "/generate gives no answer (" in found["failures"][0]["reason"]
    assert len(peer.prompts()) == 3


def test_a_server_that_is_about_to_end_is_not_held_up(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang takes requests then, too, and waits for each."""
    peer.drains_after = 2
    path = write(*({"text": f"document {n}"} for n in range(20)))
    assert main(["warm", peer.url, path, "--concurrency", "1"]) == 1
    said = capsys.readouterr().out
    assert f"failed: {path}:3: /ready answers 503: the server is about to end" in said
    assert "documents behind the last that is counted were not sent" in said
    assert "2 documents are stored" in said
    assert len(peer.prompts()) == 2


def test_pages_are_not_waited_for_where_the_server_is_about_to_end(
    peer: Peer, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scheduler may be gone by then, and the question would hold it up."""
    peer.drains_after, peer.is_stored, peer.stalls = 1, False, True
    assert main(["warm", peer.url, write({"text": "a"}, {"text": "b"}), "--concurrency", "1"]) == 1
    said = capsys.readouterr().out
    assert ":1: /ready answers 503: the server is about to end" in said
    assert len(peer.prompts()) == 1


def test_an_interrupt_waits_for_no_document_and_says_what_was_done(
    peer: Peer, write: Write
) -> None:
    peer.at_once = threading.Barrier(2)  # two of three are answered, and one has to wait
    program = (
        "import signal, sys; from sglang_ext.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["warm", peer.url, write({"text": "a"}, {"text": "b"}, {"text": "c"})]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        try:
            with peer.changed:
                assert peer.changed.wait_for(lambda: peer.num_begun == 3 and peer.now == 1, 300)
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=120)
        finally:
            command.kill()
            peer.at_once.abort()
    assert command.returncode == 130
    assert out.startswith("interrupted; only documents that were stored by then are counted")
    assert "Traceback" not in err


def test_so_many_documents_are_under_way_and_no_more(peer: Peer, write: Write) -> None:
    peer.at_once = threading.Barrier(3)
    path = write(*({"text": f"document {n}"} for n in range(9)))
    assert main(["warm", peer.url, path, "--concurrency", "3"]) == 0
    assert peer.most == 3


def test_without_the_admin_key_nothing_is_computed(
    peer: Peer,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer.admin_key = "Bearer of-the-admin"
    path = write({"text": "a"})
    assert main(["warm", peer.url, path, "--api-key", "of-clients"]) == 1
    assert "/hier_kv/steer answers 401: Unauthorized" in capsys.readouterr().err
    assert peer.prompts() == []
    monkeypatch.setenv("SGLANG_HIER_KV_ADMIN_API_KEY", "of-the-admin")
    assert main(["warm", peer.url, path, "--api-key", "of-clients"]) == 0
    ids = write([1] * PAGE, name="ids.json")
    assert main(["steer", peer.url, "--ids", ids, "--locate", "--api-key", "of-clients"]) == 0
    admin = ["--admin-api-key", "of-nobody"]
    assert main(["steer", peer.url, "--ids", ids, "--locate", *admin]) == 1


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hier-kv {__version__}\n"


def test_a_server_that_is_not_done_in_time_is_said_to_be_so(peer: Peer, write: Write) -> None:
    peer.at_once = threading.Barrier(2)  # nobody else comes
    (document,) = read_documents([write({"text": "a"})], {})
    server = WarmedServer(peer.url, Keys(), timeout_s=0.2)
    with pytest.raises(WarmError, match=r"/generate did not answer in 0\.2 s"):
        server.warm(document, None)
    peer.at_once.abort()


def test_the_summary_says_what_is_missing_of_many() -> None:
    summary = Summary(PAGE, seconds=2.0, lost_pages=1200, is_cut_short=True)
    summary.add("p.jsonl:99", Served([], PAGE - 1, 0, _tiers()))
    summary.add("p.jsonl:100", Served([], PAGE, 0, _tiers()))  # a page, computed just now
    summary.add(
        "p.jsonl:101", Served([], 10 * PAGE + 5, 10 * PAGE, _tiers(host=9 * PAGE, disk=PAGE))
    )
    summary.failures = [(f"p.jsonl:{n}", "no") for n in range(22)]
    assert summary.status == 1
    lines = summary.lines()
    assert lines[23].startswith("1,200 pages left the last tier meanwhile: ")
    assert [*lines[19:21], lines[22], lines[21], *lines[24:]] == [
        "failed: p.jsonl:19: no",
        "... and 2 more (--json has all)",
        (
            "the server is gone or about to end; documents behind the last that is counted were "
            "not sent: run this again when it is back"
        ),
        "too short: p.jsonl:99: 63 tokens, and a page has 64; nothing of it is stored",
        "2 documents are stored, 1 of them was there already; 1 is too short; 22 failed",
        "709 tokens: 69 computed, host 576, disk 64; 2.0 s",
    ]
    assert Summary(PAGE).status == 0


def _tiers(**tokens: int) -> Counter[str]:
    return Counter(tokens)
