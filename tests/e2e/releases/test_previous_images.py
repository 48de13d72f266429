"""Requests with images on the release of SGLang before: served, and neither stored nor loaded.

That release has no digests of images, which these requests are named by.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testkit.images.vision_model import write_vision_model
from testkit.releases.wheels import unpacked, wheel_of
from testkit.server import Server
from tests.e2e.hier_server import by_tier, settled, state, tokens_and_logprobs
from tests.e2e.images.image_prompts import BASE, LARGE, PLUGIN, ask, host_size, prompts
from tests.e2e.releases.test_previous_release import PATIENCE_S, RELEASE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        wheel_of(RELEASE) is None and os.environ.get("CI") != "true",
        reason=f"no wheel of {RELEASE}: make contract",
    ),
]


def test_requests_with_images_are_served_and_not_stored(tmp_path: Path) -> None:
    tiers = ["--hier-kv-host-size", host_size(100), "--enable-cache-report"]
    tiers += ["--hier-kv-disk-dir", str(tmp_path / "disk")]
    with Server(
        [*BASE, *PLUGIN, *LARGE, *tiers],
        model=str(write_vision_model(tmp_path / "model")),
        release=unpacked(RELEASE),
        log_path=tmp_path / "log",
        stop="kill",
        start_timeout_s=PATIENCE_S,
    ) as server:
        found = [ask(server, prompt) for prompt in prompts()]
        again = [ask(server, prompt) for prompt in prompts()]
        for answer, before in zip(again, found, strict=True):
            assert tokens_and_logprobs(answer)[0] == tokens_and_logprobs(before)[0]
            assert not by_tier(answer).get("host")
        settled(server)
        host = state(server)["host"]
        assert host["unnamed_image_requests"] == 2 * len(found)
        assert not host.get("saved_pages")
    assert "no digests of them" in (tmp_path / "log").read_text()
