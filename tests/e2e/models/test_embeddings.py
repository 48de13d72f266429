"""A server that embeds: prompts are stored and reused, and one that is too long is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from testkit.requests import flush_device
from testkit.server import Server, ServerError
from tests.e2e.hier_server import hier_args, real_prompts, settled, state

pytestmark = pytest.mark.e2e

PAGE, CHUNK, CONTEXT = 16, 64, 256
# Of a vector of length 1: other roundings make 0.02 of it, KV of other tokens several times that.
ROUNDING = 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    args = [*hier_args(folder, host_pages=60, disk_gb=0), "--is-embedding"]
    args += ["--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK)]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "1024"]
    args += ["--hier-kv-truncation", "overflow"]
    with Server(args, log_path=folder / "server.log", stop="kill") as running:
        yield running


def embed(server: Server, prompt: list[int]) -> npt.NDArray[np.float64]:
    return np.array(server.post("/encode", {"input_ids": prompt})["embedding"])


def test_what_is_loaded_embeds_as_what_is_computed(server: Server) -> None:
    """Within a chunk, over several chunks, of whole pages, and with less than one."""
    prompts = list(real_prompts([60, 160, 128, 5]))
    computed = [embed(server, prompt) for prompt in prompts]
    settled(server)
    flush_device(server)
    for prompt, expected in zip(prompts, computed, strict=True):
        assert np.linalg.norm(embed(server, prompt) - expected) < ROUNDING
    reused = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
    assert state(server)["host"]["reused_host_tokens"] == reused


def test_a_prompt_over_the_context_is_refused(server: Server) -> None:
    """The flag lets those through that are cut before they run, and none of these is."""
    (prompt,) = real_prompts([CONTEXT + 40], seed=3)
    with pytest.raises(ServerError, match="longer than the model's context length") as refused:
        embed(server, prompt)
    assert refused.value.status == 400
    assert embed(server, prompt[: CONTEXT - 20]).any()
