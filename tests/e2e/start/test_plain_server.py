"""SGLang as it is on the CPU runtime, with the plugin installed and off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.requests import flush_device
from testkit.server import Server, ServerError

pytestmark = pytest.mark.e2e

RECALL = (
    "<|user|>register alpha: 321\nregister gamma: 845\nWhat is register gamma?<|end|><|assistant|>"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    args = ["--max-total-tokens", "8192", "--sleep-on-idle"]
    with Server(args, log_path=log, stop="kill") as running:
        yield running


def test_answers_a_recall_question(server: Server) -> None:
    answer = server.generate(text=RECALL, sampling_params={"max_new_tokens": 8})
    assert answer["text"] == "845"
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_greedy_output_repeats_with_its_log_probabilities(server: Server) -> None:
    def run() -> tuple[list[int], list[list[float]]]:
        answer = server.generate(
            input_ids=list(range(100, 164)),
            sampling_params={"max_new_tokens": 16},
            return_logprob=True,
        )
        return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]

    run()  # fills the device cache: a cached prefix changes the rounding
    assert run() == run()


def test_a_second_request_hits_the_device_cache(server: Server) -> None:
    prompt = list(range(200, 500))
    first = server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2})
    again = server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2})
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] >= len(prompt) - 1
    flush_device(server)
    flushed = server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2})
    assert flushed["meta_info"]["cached_tokens"] == 0


def test_streams_its_tokens(server: Server) -> None:
    events = list(server.stream(text=RECALL, sampling_params={"max_new_tokens": 8}))
    assert len(events) > 1
    assert events[-1]["text"] == "845"


def test_an_http_error_has_its_status_and_body(server: Server) -> None:
    with pytest.raises(ServerError) as caught:
        server.generate(input_ids=[1] * 4000)
    assert caught.value.status == 400
    assert "context length" in caught.value.body


def test_the_plugin_is_off(server: Server) -> None:
    assert "impl=UnifiedRadixCache" in server.log()
    assert "Failed to load plugin" not in server.log()
    assert server.scheduler_pid != server.pid


def test_sigterm_ends_it_and_leaves_nothing(server: Server) -> None:
    """The last test of the server that all share."""
    server.generate(text=RECALL, sampling_params={"max_new_tokens": 2})
    left = server.terminate()
    assert left.exit_code == 0, server.log()[-2000:]
    assert left.clean, left


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = Server(["--no-such-flag"], log_path=tmp_path / "server.log")
    with pytest.raises(ServerError, match="no-such-flag"), server:
        pass
    assert not server.alive()
