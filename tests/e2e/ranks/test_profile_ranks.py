"""A calibrated profile on two tensor parallel ranks: each codes its heads with its part of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.calibration.hf_capture import CausalLm
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.hier.profile import Profile
from testkit.rank_requests import ENVIRONMENT
from testkit.requests import flush_device
from testkit.server import TINYLM, Server
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

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTH, NUM_PROMPTS = 1000, 3
HEAD_DIM = 64  # of the two heads of tinylm, one for each rank


class Run(NamedTuple):
    """Answers to prompts that were computed, and then loaded from coded pages."""

    whole: Profile
    fresh: list[dict[str, Any]]
    coded: list[dict[str, Any]]
    ranks: list[dict[str, int]]
    profiles: list[set[str]]  # names of the files of each rank


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("profile-ranks")
    model = CausalLm(str(TINYLM))
    texts = real_prompts([1500] * 2, seed=21)
    planes = [model.prefill(np.array(text)).planes for text in texts]
    options = CalibrationOptions(max_block_channels=HEAD_DIM)
    whole = profile_from_planes(planes, "bf16", head_dim=HEAD_DIM, options=options)
    whole.save(folder / "whole.hkp")
    args = hier_args(folder, host_pages=40, policy="wait_complete")
    args += ["--hier-kv-codec", "hier", "--hier-kv-profile", str(folder / "whole.hkp")]
    args += ["--tp-size", "2"]
    prompts = list(real_prompts([LENGTH] * (NUM_PROMPTS + 4), seed=22))
    log = folder / "server.log"
    with Server(args, env=ENVIRONMENT, log_path=log, stop="kill", start_timeout_s=300.0) as server:
        fresh = []
        for prompt in prompts:
            fresh.append(ask(server, prompt))
            settled(server)
        flush_device(server)
        coded = [ask(server, prompt) for prompt in prompts[:NUM_PROMPTS]]
        ranks = [rank["host"] for rank in state(server)["tp_ranks"]]
    folders = [folder / "disk" / f"dp0-tp{rank}-of-2" / "profiles" for rank in range(2)]
    names = [{path.stem for path in own.glob("*.hkp")} for own in folders]
    return Run(whole, fresh[:NUM_PROMPTS], coded, ranks, names)


def test_each_rank_codes_with_its_part_from_the_first_page_on(run: Run) -> None:
    for rank, names in enumerate(run.profiles):
        assert names == {run.whole.of_rank(HEAD_DIM, rank, 2).digest.hex()}
    for counts in run.ranks:
        assert counts["coded_pages"] == counts["written_pages"] > 0
        assert not counts.get("rejected_codec", 0)


def test_what_ranks_decode_is_what_the_level_promises(run: Run) -> None:
    """The first token is as likely as with exact KV, but for what the level leaves out."""
    differences = []
    for fresh, coded in zip(run.fresh, run.coded, strict=True):
        assert by_tier(coded)["disk"] == LENGTH // PAGE * PAGE
        assert coded["meta_info"]["cached_tokens_details"]["hier_kv"]["quality"] == "lossy"
        (exact, others), (lossy, theirs) = tokens_and_logprobs(fresh), tokens_and_logprobs(coded)
        assert exact[0] == lossy[0]
        differences.append(abs(others[0] - theirs[0]))
    print(differences)
    assert 0 < max(differences) < 0.2
