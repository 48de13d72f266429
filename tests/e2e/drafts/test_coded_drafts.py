"""Pages that hold a draft model's layers, too, with codecs, on the real server.

With a codec that loses nothing, what comes back from DRAM, from disk after a kill, and at another
server from the remote store is compared with a device hit bit for bit, as is how many guesses are
right. With `hier` the model's layers lose something and the draft's nothing: as many guesses are
right as after a device hit, but for two in a hundred.

By default drafts beside window layers and beside rows of an index run by one rank, and a third kind
where prompts are cut, without what loses something; the long form has all, and two ranks, whose
consensus SGLang checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.drafts.eagle import DRAFTS, write_eagle3_config, write_eagle_draft
from testkit.drafts.eagle3 import write_drafted_oss_model, write_oss_draft
from testkit.drafts.nextn import NEXTN, write_nextn_model
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import TINYLM, Server
from testkit.slow import ENV_JITTER
from testkit.workload import ASSETS
from tests.e2e.drafts import test_latent_drafts as latent
from tests.e2e.drafts import test_speculation as speculation
from tests.e2e.drafts.restored import check_restored, check_same, codecs_on_disk, device_hits
from tests.e2e.drafts.test_speculation import guesses, share, turns
from tests.e2e.hier_server import (
    GIB,
    PAGE,
    ask,
    by_tier,
    check_agreed,
    connected,
    every_rank,
    real_prompts,
    settled,
    state,
)
from tests.e2e.models.test_cut_hybrids import CONTEXT, check_new_cuts
from tests.tiers.remote.remote_cases import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LATENT = ("deepseek_v3", "glm")
WINDOWS = "gpt_oss"
BY_TWO = "-by-two-ranks"
PROFILE = ["--hier-kv-profile", str(ASSETS / "tinylm.hkp")]
# Prompts and answers whose guesses are counted where KV has lost something.
MANY, LONG = [436, 512, 577, 700, 390, 460, 640, 530, 436, 577, 390, 640], 48
# Of several ranks, whose stores are late.
RANKS = {**ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}


def written(name: str, folder: Path) -> tuple[Path, list[str], Sequence[int]]:
    """Writes a model and its draft: where it lies, its servers' arguments, lengths of prompts.

    The first one's answer fills a page.
    """
    model, few = folder / "model", ["--max-running-requests", "6"]
    if name in LATENT:
        return write_nextn_model(model, name), [*NEXTN, *few], latent.LENGTHS
    if name == WINDOWS:
        write_oss_draft(folder / "draft", write_drafted_oss_model(model))
        args = ["--speculative-algorithm", "EAGLE3", *DRAFTS, *few]
        args += ["--speculative-draft-model-path", str(folder / "draft")]
        return model, args, latent.LENGTHS
    drafts = {
        "eagle": lambda: write_eagle_draft(folder / "draft"),
        "eagle3": lambda: write_eagle3_config(folder / "draft"),
        "standalone": lambda: TINYLM,
    }
    return TINYLM, speculation.args_of(name, {name: drafts[name]()}), speculation.LENGTHS


class Kind:
    """Servers of one kind of model and draft, each with a folder of its own and one store."""

    def __init__(self, name: str, folder: Path, codec: str) -> None:
        self.folder = folder
        (folder / "store").mkdir()
        self.num_ranks = 2 if name.endswith(BY_TWO) else 1
        name, _, how = name.removesuffix(BY_TWO).partition("-in-")
        self._model, args, self.lengths = written(name, folder)
        self._args = [*speculation.BASE, *args, *(speculation.FP8 if how else [])]
        self._args += ["--enable-hier-kv", *WAITING, "--tp-size", str(self.num_ranks)]
        self._codec = codec
        self._args += ["--hier-kv-remote-url", f"file://{folder}/store?size=1GB"]

    def server(self, name: str, *more: str, disk: bool = True, mib: float = 400) -> Server:
        """One with a disk of its own, which another one of this name left, or with none."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        args = [*self._args, "--hier-kv-host-size", f"{mib * (1 << 20) / GIB:.9f}", *more]
        # Nothing is coded on a disk that is not there.
        of_tiers = [each for each in self._codec.split(",") if disk or "disk=" not in each]
        args += ["--hier-kv-codec", ",".join(of_tiers)]
        if disk:
            args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
            args += ["--hier-kv-disk-segment-size", "0.03", *THROUGH]
        return Server(
            args,
            model=self._model,
            log_path=folder / "server.log",
            env=RANKS if self.num_ranks > 1 else {},
            stop="kill",
            start_timeout_s=400,
        )

    def turns(self, server: Server) -> list[dict[str, Any]]:
        return turns(server, self.lengths)


THROUGH = ["--hier-kv-write-policy", "write_through"]
WAITING = ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]


def uploaded(server: Server) -> None:
    """Waits until all that each rank of a server has saved is in the remote store."""

    def has_sent(host: dict[str, int]) -> bool:
        sent = host.get("remote_written_pages", 0) + host.get("remote_duplicate_pages", 0)
        return sent >= host.get("saved_pages", 0)  # with one copy for all a rank saves none

    def all_sent() -> bool:
        return all(has_sent(rank["host"]) for rank in every_rank(server))

    settled(server)
    assert until(all_sent, 120.0), state(server)["host"]


@pytest.mark.sampled(WINDOWS, "glm")
@pytest.mark.parametrize(
    "name",
    [
        *("eagle", "eagle3", "standalone", "eagle-in-fp8", *LATENT),
        *(WINDOWS, f"{WINDOWS}-in-fp8"),
        *(name + BY_TWO for name in ("eagle", "eagle3", "standalone", *LATENT, WINDOWS)),
    ],
)
def test_codecs_that_lose_nothing_give_back_what_a_device_hit_has(
    name: str, tmp_path: Path
) -> None:
    kind = Kind(name, tmp_path, "disk=lossless,remote=lossless")
    with kind.server("one") as server:
        connected(server)
        hits = device_hits(server, kind.turns)
        flush_device(server)
        check_restored(kind.turns(server), hits, "host")
        uploaded(server)
        coded = state(server)["host"]
        if kind.num_ranks > 1:
            check_agreed(server.log(), kind.num_ranks)
    assert coded["remote_coded_pages"] > 0
    assert codecs_on_disk(tmp_path / "one" / "disk") == {"lossless"}
    with kind.server("one") as server:  # after a kill -9
        check_restored(kind.turns(server), hits, "disk")
    with kind.server("two", disk=False) as server:
        connected(server)
        check_restored(kind.turns(server), hits, "remote")
        settled(server)
        found = state(server)["host"]
        assert found.get("remote_failed_pages", 0) == found.get("remote_failures", 0) == 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), [("eagle", 24), ("deepseek_v3", 1.5), (WINDOWS, 2)])
def test_pages_that_are_coded_in_dram_come_back(name: str, size: float, tmp_path: Path) -> None:
    """DRAM as pages are has room for few of them."""
    kind = Kind(name, tmp_path, "host=lossless")
    more = ["--hier-kv-host-coded-share", "0.7"]
    with kind.server("one", *more, disk=False, mib=size) as server:
        for _ in range(2):
            kind.turns(server)
            settled(server)
            flush_device(server)
        hits = kind.turns(server)
        settled(server)
        flush_device(server)
        found = kind.turns(server)
        counts = settled(server)["disk"]["codec"]
    check_same(found, hits)
    assert counts["pages_decoded"] > 0


def many_turns(server: Server) -> list[dict[str, Any]]:
    """Answers to prompts; only guesses behind what was stored before them are counted."""
    return [ask(server, prompt, LONG) for prompt in real_prompts(MANY, seed=11)]


def of_quality(answers: Sequence[dict[str, Any]], quality: str) -> bool:
    found = [a["meta_info"]["cached_tokens_details"]["hier_kv"]["quality"] for a in answers]
    return set(found) == {quality}


def num_guessed(answers: Sequence[dict[str, Any]]) -> int:
    return sum(guesses(answer)[1] for answer in answers)


@pytest.mark.long
def test_a_draft_guesses_as_well_behind_kv_that_lost_something(tmp_path: Path) -> None:
    """From disk, and at another server from the store, at the codec's default level."""
    kind = Kind("eagle", tmp_path, "disk=hier,remote=hier")
    with kind.server("one", *PROFILE) as server:
        connected(server)
        many_turns(server)
        uploaded(server)
        hits = many_turns(server)  # from the device and, as it was computed, from DRAM
        settled(server)
        flush_device(server)
    assert codecs_on_disk(tmp_path / "one" / "disk") == {"hier"}
    with kind.server("one", *PROFILE) as server:  # after a kill -9
        from_disk = many_turns(server)
        settled(server)
        exact = ask_exact(server, next(real_prompts(MANY, seed=11)))
        log = server.log()
    assert "self-check: the rotation of 8 of 17 layers is understood" in log
    assert "K stored before rotary embedding" in log
    with kind.server("two", *PROFILE, disk=False) as server:
        connected(server)
        from_store = many_turns(server)
    for found, tier in ((from_disk, "disk"), (from_store, "remote")):
        assert [by_tier(a)[tier] for a in found] == [sum(by_tier(a).values()) for a in hits]
        assert of_quality(found, "lossy")
        print(tier, share(found), share(hits), num_guessed(found), num_guessed(hits))
        same = [a["output_ids"] == hit["output_ids"] for a, hit in zip(found, hits, strict=True)]
        print(tier, sum(same), "of", len(same), "the same")
        # Two points, and as much as chance makes of so many guesses.
        assert abs(share(found) - share(hits)) < 0.06
        assert num_guessed(found) > 300
    assert share(hits) > 0.5
    # Nobody who wants exact KV gets any of it, nor of what was computed over it.
    assert sum(by_tier(exact).values()) == 0
    np.testing.assert_array_equal(exact["output_ids"], hits[0]["output_ids"])


def ask_exact(server: Server, prompt: list[int]) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": LONG, "ignore_eos": True}
    params["custom_params"] = {"hier_kv_exact": True}
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True)


@pytest.mark.sampled("eagle")
@pytest.mark.parametrize(
    "name", ["eagle", "standalone", "deepseek_v3", "eagle" + BY_TWO, "deepseek_v3" + BY_TWO]
)
def test_prompts_that_are_cut_are_computed_anew_behind_each_new_cut(
    name: str, tmp_path: Path
) -> None:
    """And then reused. A page's last row of a draft has seen what follows it, which a cut changes:

    no page of one cut is taken for that of another one, nor for that of a prompt like any other.
    """
    kind = Kind(name, tmp_path, "disk=lossless")
    short = ["--context-length", str(CONTEXT), "--hier-kv-truncation", "overflow"]
    with kind.server("one", *short) as server:
        check_new_cuts(server, PAGE, lambda again, answer: check_same([again], [answer]))
        if kind.num_ranks > 1:
            check_agreed(server.log(), kind.num_ranks)
