"""Models with states on two tensor parallel ranks, with a remote store that servers share.

What another server restores from the store is compared with the first one's device hits bit for
bit. Where one rank's records of a prompt are lost or bad, both go on from one place before that.
SGLang's rank consensus checker is on: it ends the server when ranks decide differently.

By default one model; the long form has `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.device.states.snapshots import part_hashes
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, ask, clear_tiers, connected, real_prompts, settled, state
from tests.e2e.models.hybrid_answers import NUM_TOKENS, answers, cached, check_hits, values
from tests.e2e.remote.test_remote_latent_ranks import page_hashes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAMES = ("qwen3_next", "qwen3_5", "kimi_linear", "kimi_k3", "nemotron_h")
PAGE, CHUNK, HEADER_BYTES = 64, 256, 4096
LENGTHS = [130, 702, 1000]
NEAR = 768  # of the last prompt: the state before its furthest one
BASE = ["--tp-size", "2", "--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", str(CHUNK), "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--max-mamba-cache-size", "60"]
BASE += ["--enable-hier-kv", "--hier-kv-prefetch-timeout-ms", "60000"]


def server_of(name: str, folder: Path, log: str, codec: str) -> Server:
    """A server with much DRAM and no disk, its stores late, each by its own chance."""
    kind = STATE_MODELS[name]
    host_gib = 2 * 400 * (kind.page_bytes + HEADER_BYTES) / GIB
    args = [*BASE, *kind.server_args, "--dtype", kind.dtype_name]
    args += ["--hier-kv-host-size", f"{host_gib:.9f}"]
    args += ["--hier-kv-codec", codec] if codec else []
    args += ["--hier-kv-remote-url", f"file://{folder / 'shared'}?size=1GB"]
    env = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS), "SGLANG_MAMBA_CONV_DTYPE": kind.dtype_name}
    return Server(
        args, model=folder / "model", log_path=folder / log, env=env, stop="kill",
        start_timeout_s=300,
    )  # fmt: skip


def of_rank(folder: Path, number: int, page_hash: np.ndarray, *, of_state: bool) -> Path:
    """A value of one of the ranks: a page, or the second part of the state behind it, or its one.

    Args:
        folder: of the store.
        number: of the rank's namespace, by their order.
        page_hash: u8 `[1, 32]`.
        of_state: whether it is the state's.
    """
    parts = [part_hashes(page_hash, part) for part in (1, 0)] if of_state else [page_hash]
    found = [sorted(folder.rglob(f"{key.tobytes().hex()}.*.hkv")) for key in parts]
    one_of_each = next(values for values in found if values)
    assert len(one_of_each) == 2
    return one_of_each[number]


def lose(value: Path) -> None:
    value.unlink()


def damage(value: Path) -> None:
    """Its header is right."""
    content = bytearray(value.read_bytes())
    content[-64:] = bytes(byte ^ 0xFF for byte in content[-64:])
    value.write_bytes(content)


class Harm(NamedTuple):
    """What is done to one value of one rank.

    Attributes:
        do: to its file.
        space: whose it is, by the order of the ranks' namespaces.
        of_state: whether it is a part of the furthest state, or a page between the two.
        counted: of the store's counters of its rank; "" where nothing is there that could be bad.
    """

    do: Callable[[Path], None]
    space: int
    of_state: bool
    counted: str


HARMS = [
    Harm(lose, 0, True, ""),
    Harm(damage, 1, True, "error_rejected_bad_checksum"),
    Harm(damage, 0, False, "error_rejected_bad_checksum"),
]


def counts(server: Server, part: str, name: str) -> list[int]:
    """A counter of both ranks."""
    return [rank[part].get(name, 0) for rank in state(server)["tp_ranks"]]


@pytest.mark.sampled("qwen3_next-raw")
@pytest.mark.parametrize("codec", ["", "remote=lossless"], ids=["raw", "coded"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_restore_what_the_store_has_for_all_of_them(
    name: str, codec: str, tmp_path: Path
) -> None:
    write_state_model(tmp_path / "model", name)
    (tmp_path / "shared").mkdir()
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(name, tmp_path, "first.log", codec) as server:
        connected(server)
        first, repeat = answers(server, prompts), answers(server, prompts)
        assert cached(first) == [0] * len(LENGTHS)
        settled(server)
    page = page_hashes(prompts[-1])[cached(repeat)[-1] // PAGE - 1 :][:1]
    for rank in range(2):  # parts are coded as pages are
        assert (".lossless." in of_rank(tmp_path / "shared", rank, page, of_state=True).name) == (
            bool(codec)
        )
    with server_of(name, tmp_path, "second.log", codec) as server:
        connected(server)
        check_hits(answers(server, prompts), repeat, "remote", above=20 * PAGE)
        # A stream of coded parts has counters of its own for what is bad.
        for harm in HARMS if not codec else HARMS[:1]:
            check_harmed(server, tmp_path, harm, prompts[-1], first[-1], repeat[-1])
        for rank in state(server)["tp_ranks"]:
            host = rank["host"]
            assert host.get("load_failures", 0) == host.get("save_failures", 0) == 0


def check_harmed(
    server: Server, folder: Path, harm: Harm, prompt: list[int], computed: Any, repeat: Any
) -> None:
    """The prompt goes on from the nearer state; what is computed behind it mends the store."""
    (far,) = cached([repeat])
    assert far > NEAR + PAGE
    clear_tiers(server)
    end = far if harm.of_state else NEAR + 2 * PAGE
    page_hash = page_hashes(prompt)[end // PAGE - 1 :][:1]
    harm.do(of_rank(folder / "shared", harm.space, page_hash, of_state=harm.of_state))
    rejected = counts(server, "remote", harm.counted)
    asked = counts(server, "host", "remote_lookups_nearer")
    answer = ask(server, prompt, NUM_TOKENS)
    assert cached([answer]) == [NEAR], harm
    assert values([answer]) == values([computed])
    more = np.subtract(counts(server, "remote", harm.counted), rejected).tolist()
    assert sorted(more) == [0, bool(harm.counted)]
    more = np.subtract(counts(server, "host", "remote_lookups_nearer"), asked).tolist()
    assert not harm.counted or all(more), more
    clear_tiers(server)
    again = ask(server, prompt, NUM_TOKENS)
    assert cached([again]) == [far]
    assert values([again]) == values([repeat])
