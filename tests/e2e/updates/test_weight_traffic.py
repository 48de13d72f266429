"""New weights under traffic: six clients go on, saves are pending, and no tier is cleared.

Two models, so far apart that KV of one is noise to the other, come in turns on the server with the
plugin. What each is to answer comes from a plain server. Pages are computed in batches here and one
at a time there, so answers are compared up to rounding; a first test shows that KV of the wrong
weights is off by many times that.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testkit.requests import flush_device
from testkit.server import TINYLM, Server
from tests.e2e.hier_server import PAGE, by_tier, events, hier_args, real_prompts, settled
from tests.e2e.updates import weight_models
from tests.e2e.updates.weight_answers import NOISE, ROUNDING, Answer, distance, hit, request
from tests.e2e.updates.weight_ways import (
    IPC_ENVIRONMENT,
    Update,
    from_disk,
    from_distributed,
    from_ipc,
    from_tensor,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 6
PROMPTS = list(real_prompts([200 + 37 * (n % 9) for n in range(16)], seed=8))
COMMON = ["--max-total-tokens", "16384", "--page-size", str(PAGE), "--sleep-on-idle"]
# The other model and the bundled one in turns, by each way that takes requests meanwhile.
UPDATES: list[tuple[Update, str]] = [
    (from_disk, "other"),
    (from_disk, "first"),
    (from_tensor, "other"),
    (from_disk, "first"),
    (from_distributed, "other"),
    (from_disk, "first"),
    (from_ipc, "other"),
]


@dataclass
class Sent:
    """One request of the traffic; times are seconds of `time.time`."""

    prompt: int
    start_s: float
    end_s: float
    answer: Answer


@dataclass
class Traffic:
    """Clients that send prompts at random, without a pause."""

    server: Server
    sent: list[Sent] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        clients = [
            threading.Thread(target=self._run, args=(seed, stop), daemon=True)
            for seed in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stop.set()
            for client in clients:
                client.join(300)
        assert not self.errors, self.errors

    def wait_for(self, num: int) -> None:
        """Waits until as many more requests were answered."""
        enough = len(self.sent) + num
        while len(self.sent) < enough and not self.errors:
            time.sleep(0.01)

    def _run(self, seed: int, stop: threading.Event) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            prompt = rng.randrange(len(PROMPTS))
            start_s = time.time()
            try:
                answer, _ = request(self.server, PROMPTS[prompt])
            except Exception as error:
                self.errors.append(error)
                return
            self.sent.append(Sent(prompt, start_s, time.time(), answer))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "first": TINYLM,
        "other": weight_models.variant(folder / "other", weight_models.strange(1)),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server(COMMON, log_path=log, stop="kill") as server:
        yield server


@pytest.fixture(scope="module")
def wanted(plain: Server, models: dict[str, Path]) -> dict[str, list[Answer]]:
    """What plain SGLang answers on a device hit, by model."""
    answers: dict[str, list[Answer]] = {}
    for name, path in models.items():
        assert from_disk(plain, path, True) == [(True, 200)]
        answers[name] = [hit(plain, prompt) for prompt in PROMPTS]
    return answers


def test_kv_of_the_wrong_weights_is_seen(
    plain: Server, models: dict[str, Path], wanted: dict[str, list[Answer]]
) -> None:
    """Plain SGLang keeps the device's KV when it is told to: that is what a mistake looks like."""
    for old, new in (("first", "other"), ("other", "first")):
        assert from_disk(plain, models[old], True) == [(True, 200)]
        for prompt in PROMPTS[::2]:
            request(plain, prompt)
        assert from_disk(plain, models[new], False) == [(True, 200)]
        stale = [request(plain, prompt)[0] for prompt in PROMPTS[::2]]
        distances = [distance(*pair) for pair in zip(stale, wanted[new][::2], strict=True)]
        assert min(distances) > NOISE, distances


def test_updates_under_traffic(
    models: dict[str, Path], wanted: dict[str, list[Answer]], tmp_path: Path
) -> None:
    args = [*COMMON, *hier_args(tmp_path, host_pages=200)]
    with Server(args, log_path=tmp_path / "hier.log", env=IPC_ENVIRONMENT, stop="kill") as server:
        traffic = Traffic(server)
        spans = [(0.0, "first")]  # since when which weights are there; "" while they change
        with traffic.running():
            traffic.wait_for(2 * NUM_CLIENTS)
            wait_for_save(tmp_path, spans[-1][0])
            for number, (update, name) in enumerate(UPDATES):
                answer = one_that_is_long(server, seed=30 + number)
                next(answer)
                spans.append((time.time(), ""))
                until_flushed(update, server, models[name])
                spans.append((time.time(), name))
                list(answer)
                traffic.wait_for(2 * NUM_CLIENTS)
                if number == 0:  # later ones may find all of it stored
                    wait_for_save(tmp_path, spans[-1][0])
        spans.append((time.time(), ""))

        check_traffic(traffic.sent, spans, wanted)
        settled(server)  # what was saved is in the log
        check_saves(tmp_path, spans)
        used = {name: answered_under(name, traffic.sent, spans) for name in models}
        assert min(map(len, used.values())) > len(PROMPTS) // 2
        check_tiers(server, used["other"], wanted["other"])
        assert from_disk(server, models["first"], True) == [(True, 200)]
        check_tiers(server, used["first"], wanted["first"])


def one_that_is_long(server: Server, seed: int) -> Iterator[dict[str, Any]]:
    """A request whose last pages are new and are saved as it ends; a change waits for that."""
    (prompt,) = real_prompts([PAGE], seed=seed)
    sampling = {"max_new_tokens": 2 * PAGE, "ignore_eos": True}
    return server.stream(input_ids=prompt, sampling_params=sampling)


def until_flushed(update: Update, server: Server, model: Path) -> None:
    """Changes the weights, again where SGLang had not let go of the batch of its last answer."""
    deadline_s = time.monotonic() + 300
    while not all(ok for ok, _ in update(server, model, True)):
        assert time.monotonic() < deadline_s


def weights_of(sent: Sent, spans: list[tuple[float, str]]) -> str:
    """The weights under which a request began and ended; nothing where they changed meanwhile."""
    at_start, at_end = (
        max(span for span in spans if span[0] <= time_s) for time_s in (sent.start_s, sent.end_s)
    )
    return at_start[1] if at_start == at_end else ""


def answered_under(name: str, sent: list[Sent], spans: list[tuple[float, str]]) -> list[int]:
    """The prompts that were answered under some weights."""
    return sorted({each.prompt for each in sent if weights_of(each, spans) == name})


def check_traffic(
    sent: list[Sent], spans: list[tuple[float, str]], wanted: dict[str, list[Answer]]
) -> None:
    """Answers that began and ended under the same weights are those of these weights."""
    checked = dict.fromkeys(wanted, 0)
    for each in sent:
        if name := weights_of(each, spans):
            assert distance(each.answer, wanted[name][each.prompt]) < ROUNDING, (name, each)
            checked[name] += 1
    assert min(checked.values()) > 2 * NUM_CLIENTS, checked


def saves(folder: Path) -> list[tuple[float, int]]:
    """When how many pages were saved."""
    return [(event["t"], len(event["pages"])) for event in events(folder) if event["e"] == "saved"]


def wait_for_save(folder: Path, since_s: float) -> None:
    """Waits until pages were saved after a time."""
    deadline_s = time.monotonic() + 300
    while not any(time_s >= since_s for time_s, _ in saves(folder)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def check_saves(folder: Path, spans: list[tuple[float, str]]) -> None:
    """Pages were saved before, between and after the updates, and while updates drained them."""
    num: dict[bool, list[int]] = {True: [], False: []}
    saved = saves(folder)
    for (start_s, name), (end_s, _) in pairwise(spans):
        num[bool(name)].append(sum(n for t, n in saved if start_s <= t < end_s))
    assert min(num[True][0], num[True][1]) > 0, num
    assert sum(num[False]) > 0, num


def check_tiers(server: Server, prompts: list[int], wanted: list[Answer]) -> None:
    """Every prompt, from what the tiers have of it: right, and most of them reused there."""
    from_tiers = 0
    for prompt in prompts:
        flush_device(server)
        answer, reply = request(server, PROMPTS[prompt])
        assert distance(answer, wanted[prompt]) < ROUNDING, (prompt, reply["meta_info"])
        tiers = by_tier(reply)
        from_tiers += tiers.get("host", 0) + tiers.get("disk", 0) > 0
    assert from_tiers > len(prompts) // 2
