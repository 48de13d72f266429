"""A server whose remote store is behind a link that becomes slow, and fast again.

What is fetched follows the link, and what is too slow to fetch is computed: no request fails.
`python -m bench stream` has the times.

Of the long form: `tests/tiers/remote/test_streams.py` has a real link without a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from testkit.remote.proxy import Network, Proxy
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.server import Server
from tests.e2e.hier_server import NUM_TOKENS, ask, by_tier, real_prompts
from tests.e2e.remote.test_remote_coded import PROFILE, host, quality, start, upload
from tests.e2e.updates.weight_models import slower

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed"),
]

FIRST_TOKENS, ANSWER_TOKENS, SECOND_TOKENS = 1500, 10, 60
FINEST = 4
# The finest level of a conversation takes three seconds at this speed, the coarsest a fifth of one.
SLOW_BYTES_PER_S = 0.35e6
# Computing a conversation takes longer than this on any machine with an MLP as wide as this.
SLO_MS = 1000
INTERMEDIATE = 16384
NUM_SLOW, MOST_FAST = 3, 40


class Fetched(NamedTuple):
    """What one request fetched.

    Attributes:
        num_bytes: of the store.
        num_finest: pages at the finest level.
        num_pages: pages at any level.
    """

    num_bytes: int
    num_finest: int
    num_pages: int


def counts(server: Server) -> Fetched:
    found = host(server)
    levels = [found.get(f"remote_level_{level}_pages", 0) for level in range(FINEST + 1)]
    return Fetched(found.get("remote_bytes_in", 0), levels[-1], sum(levels))


def fetched(server: Server, prompt: list[int]) -> Fetched:
    """Asks, and checks that the answer says where its KV came from."""
    before = counts(server)
    answer = ask(server, prompt)
    found = Fetched(*(now - then for now, then in zip(counts(server), before, strict=True)))
    assert len(answer["output_ids"]) == NUM_TOKENS
    assert (by_tier(answer).get("remote", 0) > 0) == (found.num_pages > 0)
    assert quality(answer) == ("lossy" if found.num_pages else "")
    return found


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.mark.long
def test_levels_follow_the_link(tmp_path: Path, redis: RedisServer) -> None:
    firsts = real_prompts([FIRST_TOKENS] * (NUM_SLOW + MOST_FAST), seed=21)
    seconds = real_prompts([SECOND_TOKENS] * (NUM_SLOW + MOST_FAST), seed=22)
    model = slower(tmp_path / "model", INTERMEDIATE)
    # SGLang's own CPU attention computes a cached prefix again, which would take all of the time.
    args = ["--hier-kv-level", f"remote={FINEST}", "--attention-backend", "cpu_extend"]
    proxy = Proxy(redis.port, Network(bytes_per_s=SLOW_BYTES_PER_S))
    slo = ["--hier-kv-slo-ms", str(SLO_MS)]
    try:
        with (
            start(tmp_path / "one", redis.port, "hier", *PROFILE, *args, model=model) as one,
            start(tmp_path / "two", proxy.port, "hier", *args, *slo, model=model) as two,
        ):

            def follow_up() -> tuple[Fetched, int]:
                """What the second server fetches of a conversation, of how many pages."""
                so_far, whole = upload(one, next(firsts), ANSWER_TOKENS)
                return fetched(two, [*so_far, *next(seconds)]), whole

            slow = [follow_up()[0] for _ in range(NUM_SLOW)]
            proxy.set(bytes_per_s=0.0)
            fast: list[Fetched] = []
            for _ in range(MOST_FAST):
                one_fast, whole = follow_up()
                fast.append(one_fast)
                if one_fast.num_finest >= 0.95 * whole:
                    break
            found = host(two)
    finally:
        proxy.close()
    print(slow, fast, found)
    # It follows the link up: in the end everything comes as fine as it was stored.
    assert fast[-1].num_finest >= 0.95 * whole, (slow, fast)
    # Behind the slow link nothing of the kind would have been there in time.
    for one_slow in slow[1:]:
        assert one_slow.num_finest == 0, slow
        assert one_slow.num_bytes < 0.7 * fast[-1].num_bytes, (slow, fast)
    assert found.get("remote_failed_pages", 0) == found.get("remote_failures", 0) == 0
