"""Each codec on the disk tier of the running server: what comes back, and how good it is.

Chats go through a server whose DRAM holds a part of them, so their history comes back from coded
pages. With a lossless codec every answer is bit-equal to that of plain SGLang. With a lossy one
the server's own log-probabilities, over prefixes that lie coded on disk, are compared with exact
ones; the same comparison is made with the codec alone (`sglang_ext.codec.calibration.hf_capture`).

By default one codec that loses and one that does not; the long form has all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.codec.calibration.hf_capture import CausalLm
from sglang_ext.codec.registry import create_codec, kind_of
from testkit.requests import flush_device
from testkit.server import Server
from testkit.workload import ASSETS
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LOSSLESS = ["zstd", "lossless"]
LOSSY = ["hier", "cachegen-paper", "cachegen-released"]
# The baselines are slow, and this is not about time.
WAIT = ["--hier-kv-prefetch-policy", "wait_complete"]
POOL = ["--max-total-tokens", "2048", "--page-size", str(PAGE)]
PREFIX, FOLLOWING, NUM_WINDOWS, NUM_TOP = 20 * PAGE, 200, 2, 256
NUM_CHATS, NUM_TURNS, TURN = 5, either(3, 4), 3 * PAGE + 10
LOSSY_HOST_PAGES = 48


Answer = tuple[list[int], list[float]]
Top = list[dict[int, float]]  # for each token of a window, the likeliest and their logarithms


class Plain(NamedTuple):
    """What plain SGLang answers, its pool being large enough to hit everything on the device."""

    chats: list[Answer]
    reused: list[int]
    windows: list[Top]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server(
        ["--max-total-tokens", "65536", "--page-size", str(PAGE)], log_path=log, stop="kill"
    ) as server:
        answers = list(talk(server, has_tiers=False))
        for window in windows():
            ask(server, window[:PREFIX], 1)
        tops = [top_logprobs(server, window) for window in windows()]
    chats = [tokens_and_logprobs(answer) for answer in answers]
    return Plain(chats, [int(a["meta_info"]["cached_tokens"]) for a in answers], tops)


def talk(server: Server, *, has_tiers: bool = True) -> Iterator[dict[str, Any]]:
    """Answers to every turn of every chat, all chats between two turns of one, one at a time.

    DRAM is small, and what is not on disk yet when the next one is saved would find no room.
    """
    histories = list(real_prompts([4 * PAGE + 7 * n for n in range(NUM_CHATS)], seed=3))
    messages = real_prompts([TURN] * NUM_TURNS * NUM_CHATS, seed=5)
    for _ in range(NUM_TURNS):
        for history in histories:
            history += next(messages)
            answer = ask(server, history)
            history += answer["output_ids"]
            yield answer
            if has_tiers:
                settled(server)


def windows() -> list[list[int]]:
    return list(real_prompts([PREFIX + FOLLOWING] * NUM_WINDOWS, seed=4))


def top_logprobs(server: Server, window: list[int], tier: str = "device") -> Top:
    """The model's own distributions over a window's last tokens, its prefix being cached."""
    answer = server.generate(
        input_ids=window,
        sampling_params={"max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=PREFIX,
        top_logprobs_num=NUM_TOP,
    )
    meta = answer["meta_info"]
    assert meta["cached_tokens"] == PREFIX
    if tier != "device":
        assert by_tier(answer)[tier] == PREFIX
    return [{token: log for log, token, *_ in row} for row in meta["input_top_logprobs"] if row]


def mean_kl(reference: list[Top], other: list[Top]) -> float:
    """Mean KL divergence with all tokens but the likeliest of both taken together, in nats."""
    found = []
    for rows in zip(reference, other, strict=True):
        for ours, theirs in zip(*rows, strict=True):
            both = sorted(ours.keys() & theirs.keys())
            p, q = (np.exp([row[token] for token in both]) for row in (ours, theirs))
            p, q = (np.append(share, max(1e-9, 1 - share.sum())) for share in (p, q))
            found.append(float(np.sum(p * np.log(p / q))))
    return float(np.mean(found))


def push_out(server: Server) -> None:
    """Fills DRAM with other pages, until no page of a window is left there, and drops the device's.

    What lies on disk is then all that is left of the windows.
    """
    for prompt in real_prompts([24 * PAGE] * 3, seed=6):
        ask(server, prompt, 1)
        settled(server)
    flush_device(server)


def codec_args(folder: Path, codec: str, host_pages: int) -> list[str]:
    return [*hier_args(folder, host_pages=host_pages), *POOL, *WAIT, "--hier-kv-codec", codec]


@pytest.mark.sampled("lossless")
@pytest.mark.parametrize("codec", LOSSLESS)
def test_lossless_codecs_answer_bit_for_bit_as_plain(
    codec: str, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = codec_args(tmp_path, codec, NUM_CHATS * 5)
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        answers = list(talk(server))
        found = settled(server)
    tiers = [by_tier(answer) for answer in answers]
    assert [a["meta_info"]["cached_tokens"] for a in answers] == plain.reused
    assert sum(tier.get("disk", 0) for tier in tiers) > 0.3 * sum(plain.reused)
    assert [tokens_and_logprobs(answer) for answer in answers] == plain.chats
    assert not any(quality(answer) for answer in answers)
    report(capsys, codec, found)
    assert found["disk"]["codec"]["pages_decoded"] > 0


def test_coded_dram_without_a_disk_answers_bit_for_bit_as_plain(
    plain: Plain, tmp_path: Path
) -> None:
    """DRAM has room for a third of the chats as they are, and for all of them coded."""
    args = [*hier_args(tmp_path, host_pages=NUM_CHATS * 20, disk_gb=0), *POOL, *WAIT]
    args += ["--hier-kv-codec", "host=lossless", "--hier-kv-host-coded-share", "0.7"]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        answers = list(talk(server))
        found = settled(server)
    assert [a["meta_info"]["cached_tokens"] for a in answers] == plain.reused
    assert [tokens_and_logprobs(answer) for answer in answers] == plain.chats
    assert not any(by_tier(answer).get("disk") for answer in answers)
    assert found["disk"]["mode"] == "memory"
    assert found["disk"]["codec"]["pages_decoded"] > 0
    assert found["host"].get("promoted_pages", 0) > 0


def quality(answer: dict[str, Any]) -> str:
    """What the answer says of the KV that it reused; nothing when all was exact."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return str(details.get("hier_kv", {}).get("quality", ""))


def report(capsys: pytest.CaptureFixture[str], codec: str, found: dict[str, Any]) -> None:
    host, disk = found["host"], found["disk"]
    with capsys.disabled():
        print(
            f"\n{codec}: {host.get('written_pages', 0)} pages written to disk, "
            f"{host.get('coded_bytes', 0) / 1e6:.1f} MB of them coded; {disk['codec']}"
        )


@pytest.mark.long
def test_a_lossy_codec_of_kv_in_8_bits_says_so_and_stays_near(tmp_path: Path) -> None:
    """Smaller pages yet, near what they were; who wants exact KV is given none of them."""
    args = [*codec_args(tmp_path, "hier", LOSSY_HOST_PAGES // 2), "--kv-cache-dtype", "fp8_e4m3"]
    args += ["--attention-backend", "cpu_extend"]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        learn(server, "hier")
        asked = windows()
        for window in asked:
            ask(server, window[:PREFIX], 1)
            settled(server)
        hits = [top_logprobs(server, window) for window in asked]
        push_out(server)
        lossy = [top_logprobs(server, window, "disk") for window in asked]
        settled(server)
        wish = {"custom_params": {"hier_kv_exact": True}, "max_new_tokens": 1}
        exact = server.generate(input_ids=asked[0], sampling_params=wish)
        found = settled(server)
    assert exact["meta_info"]["cached_tokens"] == 0
    assert 0 < mean_kl(hits, lossy) < 0.02
    host = found["host"]
    raw_bytes = host["coded_pages"] * PAGE * 8 * 2 * 2 * 64
    assert 0 < host["coded_bytes"] < 0.5 * raw_bytes


class Exact(NamedTuple):
    """A window without a server and without a codec.

    Attributes:
        planes: KV of its prefix.
        following: tokens behind it.
        logprobs: of what comes behind each of these.
    """

    planes: Any
    following: Any
    logprobs: Any


@pytest.fixture(scope="module")
def model() -> CausalLm:
    return CausalLm(str(ASSETS / "tinylm"))


@pytest.fixture(scope="module")
def exact(model: CausalLm) -> list[Exact]:
    found = []
    for window in windows():
        planes = model.prefill(np.array(window[:PREFIX])).planes
        following = np.array(window[PREFIX:])
        found.append(Exact(planes, following, model.continuation(planes, following)[:-1]))
    return found


@pytest.mark.sampled("hier")
@pytest.mark.parametrize("codec", LOSSY)
def test_quality_through_the_server_is_the_codecs_own(
    codec: str,
    plain: Plain,
    model: CausalLm,
    exact: list[Exact],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Server(
        codec_args(tmp_path, codec, LOSSY_HOST_PAGES),
        log_path=tmp_path / "server.log",
        stop="kill",
    ) as server:
        learn(server, codec)
        answers = list(talk(server))
        for window in windows():
            ask(server, window[:PREFIX], 1)
            settled(server)
        push_out(server)
        lossy = [top_logprobs(server, window, "disk") for window in windows()]
        found = settled(server)
    # The chats go another way where their history came back lossy, and reuse as much of it.
    assert [a["meta_info"]["cached_tokens"] for a in answers] == plain.reused
    assert sum(quality(answer) == "lossy" for answer in answers) > len(answers) / either(4, 3)
    assert found["disk"]["codec"]["pages_decoded"] >= NUM_WINDOWS * PREFIX // PAGE
    served = mean_kl(plain.windows, lossy)
    alone = kl_of_codec_alone(codec, tmp_path, model, exact)
    report(capsys, codec, found)
    with capsys.disabled():
        print(f"{codec}: KL {served:.5f} through the server, {alone:.5f} of the codec alone")
    assert 0.7 < served / alone < 1.4


def learn(server: Server, codec: str) -> None:
    """Shows the codec enough text to learn from, if it has to, and waits until it has."""
    if codec == "cachegen-released":
        return
    for prompt in real_prompts([28 * PAGE] * 3, seed=7):
        ask(server, prompt, 1)
    deadline = time.monotonic() + 300
    for prompt in real_prompts([8 * PAGE] * 100, seed=8):
        if state(server)["disk"]["codec"].get("pages_coded"):
            return
        assert time.monotonic() < deadline, state(server)
        ask(server, prompt, 1)
        settled(server)


def kl_of_codec_alone(codec_id: str, folder: Path, model: CausalLm, exact: list[Exact]) -> float:
    """The same windows without a server: KV of the model in float32, coded page by page."""
    files = list((folder / "disk" / "profiles").glob("*.hk*"))
    learned = None
    if codec_id != "cachegen-released":
        kind = kind_of(codec_id)
        assert kind is not None
        (file,) = (path for path in files if path.suffix == kind.suffix)
        learned = kind.load(file)
    codec = create_codec(codec_id, dtype="bf16", profile=learned)
    found = []
    for planes, following, p in exact:
        decoded = np.empty_like(planes)
        for start in range(0, PREFIX, PAGE):
            page = np.ascontiguousarray(planes[:, start : start + PAGE])
            out = np.empty_like(page)
            codec.decode(codec.encode(page, raw_tokens=None if start == 0 else 0), out)
            decoded[:, start : start + PAGE] = out
        q = model.continuation(decoded, following)[:-1]
        found.append(float((np.exp(p) * (p - q)).sum(-1).mean()))
    return float(np.mean(found))
