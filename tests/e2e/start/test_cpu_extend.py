"""The CPU runtime's own attention backend, which the benches of cache hits use, on the server."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import PAGE, ask, by_tier, hier_args, real_prompts, tokens_and_logprobs

pytestmark = pytest.mark.e2e

PROMPTS = list(real_prompts([130, 333, 700, 1029, 1500], seed=5))
COMMON = ["--max-total-tokens", "16384", "--page-size", str(PAGE)]
# Log-probabilities of a bfloat16 model: what another order of sums makes of them.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """SGLang on torch_native, and the plugin on cpu_extend."""
    folder = tmp_path_factory.mktemp("cpu-extend")
    native = Server([*COMMON, "--sleep-on-idle"], log_path=folder / "native.log", stop="kill")
    args = [*COMMON, *hier_args(folder), "--attention-backend", "cpu_extend", "--sleep-on-idle"]
    extend = Server(args, log_path=folder / "extend.log", stop="kill")
    try:
        native.start()
        extend.start()
        yield native.wait_ready(), extend.wait_ready()
    finally:
        native.kill()
        extend.kill()


def test_equals_torch_native_but_for_rounding(servers: tuple[Server, Server]) -> None:
    for prompt in PROMPTS:
        cold = [ask(server, prompt) for server in servers]
        assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0, 0]
        assert tokens_and_logprobs(cold[0]) == tokens_and_logprobs(cold[1])
        hits = [ask(server, prompt) for server in servers]
        assert hits[0]["meta_info"]["cached_tokens"] == hits[1]["meta_info"]["cached_tokens"] > 0
        (tokens, wanted), (found_tokens, found) = map(tokens_and_logprobs, hits)
        assert found_tokens == tokens
        assert all(
            math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(found, wanted, strict=True)
        )


def test_a_load_is_awaited_layer_by_layer(servers: tuple[Server, Server]) -> None:
    """Answers from DRAM are those of a device hit: attention read no row before it was there."""
    extend = servers[1]
    for prompt in PROMPTS:
        ask(extend, prompt)
        device = ask(extend, prompt)
        flush_device(extend)
        host = ask(extend, prompt)
        assert by_tier(host)["host"] == (len(prompt) - 1) // PAGE * PAGE
        assert tokens_and_logprobs(host) == tokens_and_logprobs(device)
