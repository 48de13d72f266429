"""Models with states and the draft layer of their checkpoint (MTP), on the real server.

A page holds the draft layer's K and V behind those of the model's full layers, and the states
beside them are those behind tokens that were verified. What is restored is compared with a device
hit bit for bit, as is how many guesses are right, and with what transformers computes for the same
tokens, or SGLang, of prompts with images, where nothing is reused; without the draft layer's rows
fewer guesses are right, and with those of a shared store as many again. Of two ranks the stores are
late, each by its own chance, and SGLang's rank consensus checker is on: it ends the server when
ranks decide differently. With a KV cache in fp8 the store has pages that are coded without loss;
the disk has them, too, where nothing is lost.

By default Qwen3-Next runs by two ranks, and a Qwen3.5 with experts and images by one in fp8; the
long form has all, and compares with plain SGLang's own device hits, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_ext.device.layout import HEADER_BYTES
from sglang_ext.tiers.records.record import parse_header
from testkit.drafts.nextn import NEXTN
from testkit.drafts.state_nextn import DRAFTED_MODELS, DraftedModel, write_drafted_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.drafts import image_guesses
from tests.e2e.drafts.restored import check_same, check_thresholds_stay, codecs_on_disk
from tests.e2e.drafts.test_speculation import (
    lose_part,
    page_keys,
    records,
    share,
)
from tests.e2e.hier_server import (
    GIB,
    by_tier,
    check_agreed,
    clear_tiers,
    connected,
    ranks_of,
    real_prompts,
    settled,
)
from tests.e2e.models.hybrid_answers import Computed, answers, cached, drop_device
from tests.long_form import FACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE, FLOAT_BYTES = 64, 4
ANSWER = 24
# An answer to them fills a page, so SGLang keeps a state that a verification came to; what is asked
# behind it fills none, so it goes on behind that state whenever it is asked.
LENGTHS, MORE = [436, 620], 20
ENDS = [[384, 576], [448, 640]]  # whole pages of the first and the second turns
LEAST = 0.2  # guesses that are right, so that one sees where fewer are
TOLERANCE = 5e-4  # of a log-probability in float32
# The same of 3 and 2 bits of mantissa, of which transformers knows nothing.
OF_FP8, OF_E5M2 = 0.5, 1.0
BY_TWO, IN_FP8, IN_E5M2, CODED = "-by-two-ranks", "-in-fp8", "-in-e5m2", "-coded"
# Of the draft layer's rows, too.
NARROW = {
    IN_FP8: ["--kv-cache-dtype", "fp8_e4m3"],
    IN_E5M2: ["--kv-cache-dtype", "fp8_e5m2"],
}
CODECS = {IN_FP8: ["--hier-kv-codec", "remote=lossless"]}
CODECS[CODED] = ["--hier-kv-codec", "disk=lossless,remote=lossless"]
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", *NEXTN]
BASE += ["--dtype", "float32", "--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--max-mamba-cache-size", "100"]
PLUGIN = ["--enable-hier-kv", "--hier-kv-write-policy", "write_through"]
PLUGIN += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
PLUGIN += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]


class Setup:
    """A model on disk, with how many ranks it is served, and where its servers keep pages."""

    def __init__(self, name: str, folder: Path) -> None:
        self.num_ranks = 2 if name.endswith(BY_TWO) else 1
        self.folder = folder
        name, dash, how = name.removesuffix(BY_TWO).partition("-")
        self._narrow, self.is_coded = NARROW.get(dash + how, []), dash + how == CODED
        self.is_narrow = bool(self._narrow)
        self.tolerance = {IN_FP8: OF_FP8, IN_E5M2: OF_E5M2}.get(dash + how, TOLERANCE)
        self._codec = CODECS.get(dash + how, [])
        self.model: DraftedModel = write_drafted_model(folder / "model", name)
        (folder / "store").mkdir()

    def server(self, *, is_plain: bool = False) -> Server:
        """One with the disk that the one before it left, and a store that several have."""
        env = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
        args = [*BASE, "--tp-size", str(self.num_ranks), *self._narrow]
        args += ["--mamba-track-interval", str(self.model.kind.grid)]
        if self.model.takes_images:
            args += ["--image-processor-backend", "pil"]
        if self.num_ranks > 1:
            env |= {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
        if not is_plain:
            host_gib = 300.5 * (self.page_bytes + HEADER_BYTES) * self.num_ranks / GIB
            args += [*PLUGIN, *self._codec, "--hier-kv-host-size", f"{host_gib:.9f}"]
            args += ["--hier-kv-disk-dir", str(self.folder / "disk")]
            args += ["--hier-kv-remote-url", f"file://{self.folder / 'store'}?size=1GB"]
        return Server(
            args,
            model=self.folder / "model",
            log_path=self.folder / "server.log",
            stop="kill",
            start_timeout_s=600,
            env=env,
        )

    @property
    def has_coded_store(self) -> bool:
        """Whether a codec codes what the store gets."""
        return bool(self._codec)

    @property
    def page_bytes(self) -> int:
        """K and V of a page of one rank, the draft layer's behind the model's."""
        return self._of_rank(self.model.page_bytes)

    def _of_rank(self, num_bytes: int) -> int:
        return num_bytes // self.num_ranks // (FLOAT_BYTES if self.is_narrow else 1)

    @property
    def places(self) -> list[list[int]]:
        """Where the first and the second turns go on: at the last state that SGLang keeps."""
        grid = self.model.kind.grid
        return [[end // grid * grid for end in ends] for ends in ENDS]

    def lose_draft_rows(self, names: set[bytes], num_pages: int) -> None:
        """Zeros in the place of the draft layer's rows in pages of these names, which stay sound.

        A state fills less of its record than the pages of the model alone do.

        Args:
            names: of pages, and of states.
            num_pages: so many of them at least are pages.
        """
        end = HEADER_BYTES + self.page_bytes
        first, num = end - self._of_rank(self.model.draft_bytes), 0
        for path, start, record in list(records(self.folder / "disk")):
            if parse_header(record)[0].page_hash in names and record[first:end].any():
                lose_part(path, start, record, first, end)
                num += 1
        assert num >= self.num_ranks * num_pages

    def check(self, server: Server) -> None:
        """Every rank has saved and loaded whole pages and states, and all decided alike."""
        for rank in ranks_of(settled(server)):
            assert rank["kv_bytes_per_page"] == self.page_bytes
            assert rank["host"]["loaded_pages"] > 0
            for failures in ("save_failures", "load_failures", "remote_failed_pages"):
                assert rank["host"].get(failures, 0) == 0
            for unnamed in ("unnamed_image_requests", "image_name_conflicts"):
                assert rank["host"].get(unnamed, 0) == 0
        if self.num_ranks > 1:
            check_agreed(server.log(), self.num_ranks)


class Told(NamedTuple):
    """What was asked, and answers behind what the device has.

    Attributes:
        second: the second turns.
        hits: answers to the first ones.
        more_hits: answers to the second ones.
        images: those to prompts with images; None of a model that takes none.
    """

    second: list[list[int]]
    hits: list[Any]
    more_hits: list[Any]
    images: image_guesses.Pictured | None


def first_turns() -> list[list[int]]:
    return list(real_prompts(LENGTHS, seed=3))


def second_turns(found: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What is asked behind the answers to the first ones."""
    more = real_prompts([MORE] * len(LENGTHS), seed=4)
    told = zip(first_turns(), found, more, strict=True)
    return [[*prompt, *answer["output_ids"], *text] for prompt, answer, text in told]


def check_tier(found: Sequence[dict[str, Any]], tier: str, places: list[int]) -> None:
    """Answers went on behind these places, all of which was in a tier."""
    assert [by_tier(answer).get(tier, 0) for answer in found] == places
    assert cached(found) == places


def device_hits(
    server: Server, places: list[list[int]]
) -> tuple[list[list[int]], list[Any], list[Any]]:
    """The second turns, and answers behind what the device has: to the first ones, to these."""
    first = first_turns()
    answers(server, first, ANSWER)
    hits = answers(server, first, ANSWER)
    second = second_turns(hits)
    more_hits = answers(server, second, ANSWER)
    assert [cached(hits), cached(more_hits)] == places
    return second, hits, more_hits


@pytest.mark.sampled("qwen3_next-by-two-ranks", "qwen3_5_moe-in-fp8")
@pytest.mark.parametrize(
    "name",
    [
        *(name + ranks for name in DRAFTED_MODELS for ranks in ("", BY_TWO)),
        *(name + IN_FP8 for name in ("qwen3_5_moe", "nemotron_h", "qwen3_next")),
        *(f"qwen3_next{IN_FP8}{BY_TWO}", f"qwen3_next{CODED}", f"qwen3_next{CODED}{BY_TWO}"),
        f"qwen3_next{IN_E5M2}",
    ],
)
def test_what_is_restored_answers_and_guesses_as_a_device_hit(name: str, tmp_path: Path) -> None:
    setup = Setup(name, tmp_path)
    with setup.server() as server:
        connected(server)
        check_thresholds_stay(server)
        told = from_device_and_dram(setup, server)
    second, hits, more_hits, images = told
    assert min(share(hits), share(more_hits)) > LEAST
    assert max(share(hits), share(more_hits)) < 1  # some were wrong, and left nothing behind
    check_computed(setup, [(first_turns(), hits), (second, more_hits)])
    if FACTOR:
        with setup.server(is_plain=True) as server:
            _, plain_hits, more_plain = device_hits(server, setup.places)
            if images is not None:
                images.check_plain(server)
        check_same([*hits, *more_hits], [*plain_hits, *more_plain])
    text = second[1][:-MORE]
    if not setup.is_coded:
        setup.lose_draft_rows({*page_keys(text, of_pairs=False)}, len(text) // PAGE)
        if images is not None:
            setup.lose_draft_rows(images.names, 1)
    with setup.server() as server:  # after a kill -9
        connected(server)
        from_disk(server, told, setup)
        clear_tiers(server)
        found = answers(server, second, ANSWER)  # what the first server put into the store
        check_tier(found, "remote", setup.places[1])
        check_same(found, more_hits)
        if images is not None:
            images.check(server, "remote")
        setup.check(server)


def from_device_and_dram(setup: Setup, server: Server) -> Told:
    """What the device has, and DRAM has the same."""
    second, hits, more_hits = device_hits(server, setup.places)
    drop_device(server)
    found = answers(server, second, ANSWER)
    check_tier(found, "host", setup.places[1])
    check_same(found, more_hits)
    drop_device(server)
    found = answers(server, first_turns(), ANSWER)
    check_tier(found, "host", setup.places[0])
    check_same(found, hits)
    sent = settled(server)["host"]
    assert sent["saved_states"] > 0
    assert setup.has_coded_store == (sent.get("remote_coded_pages", 0) > 0)
    images = None
    if setup.model.takes_images:
        images = image_guesses.device_hits(server, setup.folder / "disk", ANSWER)
        drop_device(server)
        images.check(server, "host")
        image_guesses.check_another_image(server, ANSWER)
    setup.check(server)
    return Told(second, hits, more_hits, images)


def from_disk(server: Server, told: Told, setup: Setup) -> None:
    """All of it where records are coded; else one text's and one image's pages lack draft rows."""
    found = answers(server, told.second, ANSWER)
    check_tier(found, "disk", setup.places[1])
    if setup.is_coded:
        check_same(found, told.more_hits)
        assert "lossless" in codecs_on_disk(setup.folder / "disk")
    else:
        check_lost(found, told.more_hits)
    if told.images is not None:
        lost = 0 if setup.is_coded else 1
        told.images.check(server, "disk", lost, is_narrow=setup.is_narrow)


def check_lost(found: Sequence[dict[str, Any]], hits: Sequence[dict[str, Any]]) -> None:
    """The first answer is that of a device hit; the second draft lacked its rows, and is bad."""
    (kept, without), (kept_hit, hit) = found, hits
    check_same([kept], [kept_hit])
    assert without["output_ids"] == hit["output_ids"]
    print(f"{share([hit]):.3f} of guesses right, {share([without]):.3f} without KV")
    assert share([without]) < share([hit]) - 0.1


def check_computed(setup: Setup, told: Sequence[tuple[list[list[int]], list[Any]]]) -> None:
    """Answers are those that transformers computes, but for rounding."""
    opened = setup.model.kind.open(setup.folder / "model")
    computed = Computed(lambda tokens: opened(tokens).logits[0])
    for prompts, found in told:
        assert computed.furthest(prompts, found) < setup.tolerance
