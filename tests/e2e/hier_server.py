"""What the end-to-end tests share: server arguments, the event log, prompts of real text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testkit import requests
from testkit.requests import num_on_their_way
from testkit.server import Server
from testkit.workload import Reply, load_texts, load_tokenizer, reply_of

PAGE = 64
# Of an answer: the first token is computed in a prefill and each other one in a decode step, all
# over the same prefix. A step takes as long as a short prompt, and more of them show nothing else.
NUM_TOKENS = 3
# A page of tinylm in DRAM or on disk: 8 layers, K and V, 2 heads of 64 in bfloat16, and a header.
SLOT_BYTES = 266_240
GIB = 1 << 30
# Of a log-probability: 0.03 was seen; KV of other tokens makes ten times that, and more.
ROUNDING = 0.1
# Between two looks at a server's state, which costs 12 ms of a core: the first ones, as most saves
# take less, and the last ones.
_FIRST_LOOK_S, _LOOK_S, _SECOND_LOOK_S = 0.03, 0.2, 0.02


def host_gb(num_pages: int) -> str:
    """Value of --hier-kv-host-size for a number of pages of tinylm."""
    return f"{(num_pages + 0.5) * SLOT_BYTES / GIB:.9f}"


def hier_args(
    folder: Path, *, host_pages: int = 400, disk_gb: float = 2.0, policy: str = "timeout"
) -> list[str]:
    """Arguments of a server with DRAM, disk and the event log under `folder`.

    What is stored is loaded whatever it costs, unless `policy` is another one: a busy machine may
    well compute a short prefix sooner than its disk tier's threads get to run, or wait for them for
    longer than a server does of itself.
    """
    args = ["--enable-hier-kv", "--hier-kv-host-size", host_gb(host_pages)]
    args += ["--hier-kv-event-log", str(folder / "events.jsonl")]
    args += ["--hier-kv-prefetch-policy", policy]
    if disk_gb:
        args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", str(disk_gb)]
        args += ["--hier-kv-disk-segment-size", "0.03"]
    if disk_gb and policy == "timeout":
        args += ["--hier-kv-prefetch-timeout-ms", "60000"]
    return args


def events(folder: Path) -> list[dict[str, Any]]:
    """The event log, oldest first, as far as its lines are whole; `settled` waits for all."""
    text, _, _ = (folder / "events.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in text.splitlines()]


def state(server: Server) -> dict[str, Any]:
    """The plugin's counters, from /server_info; of the first of several data parallel ranks."""
    return states(server)[0]


def states(server: Server) -> list[dict[str, Any]]:
    """The plugin's counters of each data parallel rank, in their order."""
    found = [one["hier_kv"] for one in server.get("/server_info")["internal_states"]]
    assert all(isinstance(one, dict) for one in found)
    return sorted(found, key=lambda one: one.get("dp_rank") or 0)


def ranks_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each tensor parallel rank of a data parallel one."""
    ranks: list[dict[str, Any]] = found.get("tp_ranks") or [found]
    return ranks


def every_rank(server: Server) -> list[dict[str, Any]]:
    """The state of each rank of a server."""
    return [rank for found in states(server) for rank in ranks_of(found)]


def by_tier(answer: dict[str, Any]) -> dict[str, int]:
    """Reused prompt tokens by tier, as the answer reports them."""
    return requests.by_tier(answer["meta_info"])


def missed(answer: dict[str, Any]) -> dict[str, int]:
    """Tokens that were stored once and computed again, by reason, as the answer reports them."""
    return requests.missed(answer["meta_info"])


def ask(
    server: Server, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **fields: Any
) -> dict[str, Any]:
    """One greedy request of a fixed answer length, with the log-probabilities of the answer."""
    return server.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": num_tokens, "ignore_eos": True},
        return_logprob=True,
        **fields,
    )


def tokens_and_logprobs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What must be bit-equal."""
    logprobs = answer["meta_info"]["output_token_logprobs"]
    return answer["output_ids"], [entry[0] for entry in logprobs]


def answers_as_computed(found: dict[str, Any], computed: dict[str, Any]) -> bool:
    """Whether an answer is that to the same prompt computed as a whole.

    What was computed is so bit for bit. Behind what was reused fewer tokens are computed at once,
    of which some processors make other roundings: a first token is as likely but for these.
    """
    (tokens, ours), (expected, theirs) = map(tokens_and_logprobs, (found, computed))
    if not found["meta_info"]["cached_tokens"]:
        return (tokens, ours) == (expected, theirs)
    return abs(ours[0] - theirs[0]) < ROUNDING


def send_to(server: Server, rid_prefix: str) -> Any:
    """A `Send` for `testkit.workload.drive`."""

    def send(name: str, prompt: list[int], num_tokens: int) -> Reply:
        started_s = time.monotonic()
        answer = server.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": num_tokens, "ignore_eos": True},
            rid=f"{rid_prefix}-{name}",
        )
        return reply_of(answer, time.monotonic() - started_s)

    return send


def real_prompts(lengths: Sequence[int], seed: int = 0) -> Iterator[list[int]]:
    """Excerpts of the bundled texts with these lengths, each from a place of its own."""
    rng = random.Random(seed)
    texts = load_texts(load_tokenizer())
    for length in lengths:
        text = rng.choice(texts)
        at = rng.randrange(len(text) - length)
        yield text[at : at + length]


def settled(server: Server, timeout_s: float = 300.0) -> dict[str, Any]:
    """Waits until each rank has all in DRAM, and has offered it to the disk.

    Returns:
        The state then; of several data parallel ranks the first one's.
    """
    deadline = time.monotonic() + timeout_s
    last: list[dict[str, Any]] = []
    look_s = _FIRST_LOOK_S
    while time.monotonic() < deadline:
        groups = states(server)
        ranks = [rank for group in groups for rank in ranks_of(group)]
        for each in (*groups, *ranks):
            each.pop("agreements", None)  # of several ranks, one a step
        # Twice the same: a remote store's threads count what they do when they have done it.
        # Without one the second look comes at once.
        on_their_way = sum(num_on_their_way(rank["host"]) for rank in ranks)
        on_their_way += sum((rank.get("remote") or {}).get("upload_queue", 0) for rank in ranks)
        if not on_their_way and groups == last:
            return groups[0]
        last = groups
        if on_their_way:
            time.sleep(look_s)
            look_s = min(1.6 * look_s, _LOOK_S)
        else:
            time.sleep(_LOOK_S if any(rank.get("remote") for rank in ranks) else _SECOND_LOOK_S)
    raise AssertionError(f"the store did not settle in {timeout_s:.0f} s: {last}")


def clear_tiers(server: Server) -> None:
    """Leaves nothing but what is in a remote store, with all in it that was saved."""
    settled(server)
    server.post("/hicache/storage-backend/clear")
    requests.flush_device(server)


def send_in_halves(server: Server, send: Callable[[Any], Any], what: Sequence[Any]) -> list[Any]:
    """What `send` returns of each of `what`, several at a time.

    With an empty device behind half of them, so that the others load, whoever came first.
    """
    half, found = len(what) // 2, []
    for part in (what[:half], what[half:]):
        with ThreadPoolExecutor(6) as pool:
            found += list(pool.map(send, part))
        settled(server)
        requests.flush_device(server)
    return found


def check_agreed(log: str, num_ranks: int) -> None:
    """SGLang's consensus checker was on in every rank of a server, and found none that differs."""
    assert log.count("Rank consensus checker is enabled") == num_ranks
    assert "Found rank divergence" not in log


def in_dram(server: Server, timeout_s: float = 300.0) -> None:
    """Waits until all that was computed is in DRAM; the disk may lag behind (see `settled`)."""
    deadline = time.monotonic() + timeout_s
    while any(rank["host"]["save_queue"] for rank in every_rank(server)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def connected(server: Server, timeout_s: float = 300.0) -> Server:
    """The server itself, once every rank with a remote store has found it: none is sent before."""
    deadline = time.monotonic() + timeout_s
    while True:
        remotes = [rank.get("remote") for rank in every_rank(server)]
        if all(remote["breaker_state"] == 0 for remote in remotes if remote):
            return server
        assert time.monotonic() < deadline, remotes
        time.sleep(0.05)
