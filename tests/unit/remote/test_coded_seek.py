"""The first page that a coded store has, where some are damaged: the one that `ask` finds alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.device.layout import HEADER_BYTES
from sglang_ext.tiers.records.quality import ANY, Quality
from sglang_ext.tiers.remote.staged import START_BYTES
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from tests.long_form import count
from tests.tiers.remote.remote_cases import until
from tests.unit.codec.test_page_codec import page
from tests.unit.remote.remote_world import Host, body, codec_of, hashes_of

SEEDS = count(2, 20)
PAGES = 100  # more than are asked for at once
LENGTHS = (0, HEADER_BYTES - 1, HEADER_BYTES, START_BYTES - 1, START_BYTES, START_BYTES + 32)


class Store:
    """A folder that servers share, and those."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hosts: list[Host] = []

    def host(self, codec_id: str = "lossless") -> Host:
        """A server; one that has learned nothing leaves pages as they are."""
        url = f"file://{self.folder}?size=1GB"
        self._hosts.append(Host(url, codec_of(codec_id, learns=False)))
        return self._hosts[-1]

    def close(self) -> None:
        for host in self._hosts:
            host.close()

    def fill(self, rng: random.Random) -> None:
        """Some pages coded, some as they are, some both."""
        for codec_id in ("lossless", "hier"):
            host = self.host(codec_id)
            numbers = [number for number in range(PAGES) if rng.random() < 0.12]
            for number in numbers:
                host.save(range(number, number + 1))
            assert host.uploaded(len(numbers))

    def damage(self, rng: random.Random) -> None:
        """Half of what is there is cut, another's, has a bit changed, or the other kind's name."""
        files = sorted(self.folder.rglob("*.hkv"))
        for file in rng.sample(files, len(files) // 2):
            content, kind = bytearray(file.read_bytes()), rng.randrange(4)
            if kind == 0:
                content = content[: rng.choice(LENGTHS)]
            elif kind == 1:
                content = bytearray(rng.choice(files).read_bytes())
            elif kind == 2:
                content[rng.randrange(min(START_BYTES, len(content)))] ^= 1 << rng.randrange(8)
            else:
                same = [one for one in files if one.name.startswith(file.name.split(".")[0])]
                content = bytearray(rng.choice(same).read_bytes())
            file.write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store").mkdir()
    made = Store(tmp_path / "store")
    yield made
    made.close()


def answered(host: Host, hashes: np.ndarray, *, seeks: bool) -> RemoteLookup:
    lookup = RemoteLookup(host.space, hashes, 0, ANY, seeks=seeks)
    assert host.store.ask_remote(lookup)
    assert until(lambda: lookup.done)
    return lookup


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_first_page_is_the_first_that_is_found_alone(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    store.fill(rng)
    store.damage(rng)
    order = rng.sample(range(PAGES), PAGES)
    hashes = hashes_of(range(PAGES))[order]
    # A server remembers what was bad: one asks for each, and another one seeks.
    one, other = store.host(), store.host()
    alone = [
        at for at in range(PAGES) if len(answered(one, hashes[at : at + 1], seeks=False).sizes)
    ]
    assert alone
    found: list[int] = []
    while len(found) <= PAGES:
        begin = found[-1] + 1 if found else 0
        first = answered(other, hashes[begin:], seeks=True).first if begin < PAGES else None
        if first is None:
            break
        found.append(begin + first)
    assert found == alone
    assert not other.count("remote_failures")
    for number in [order[at] for at in found]:
        numbers = range(number, number + 1)
        for _ in range(2):  # where what was coded proves bad, the page may be there as it is
            other.fetch(numbers, Quality.EXACT)
        if other.ready(numbers):
            assert body(other.slots(numbers)[0]) == body(page(number))
    assert other.count("remote_promoted_pages")
