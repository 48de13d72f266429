"""What an operator may not change on a running server, as SGLang's calls meet it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from fastapi import HTTPException  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    SetInternalStateReq,
    SetInternalStateReqOutput,
)

from sglang_ext.seam.cache import HierKVRadixCache  # noqa: E402
from sglang_ext.seam.hooks.admin import changes  # noqa: E402
from sglang_ext.seam.hooks.admin.refused_changes import REFUSED, around_asking  # noqa: E402

SINGLE, ACC = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"


class Cache(HierKVRadixCache):
    """As far as it is asked here."""

    def __init__(self, *, stores_images: bool) -> None:
        self.media: Any = SimpleNamespace(stores_images=stores_images)


class Controller:
    """SGLang's part of a scheduler, with what it was had done."""

    def __init__(self, cache: Any) -> None:
        args = SimpleNamespace(speculative_algorithm="EAGLE3", **{SINGLE: 1.0, ACC: 1.0})
        self.scheduler = SimpleNamespace(
            tree_cache=cache, server_args=args, model_config=SimpleNamespace()
        )
        self.done: list[dict[str, Any]] = []

    def ask(self, **values: float) -> Any:
        """An answer to a call, as the hook gives it."""

        def do(_: Any, request: Any) -> Any:
            self.done.append(request.server_args)
            return SetInternalStateReqOutput(updated=True)

        return changes.around(do, self, SetInternalStateReq(server_args=values))


@pytest.fixture(autouse=True)
def _of_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "model_kind", lambda config: "mha")


@pytest.mark.parametrize("name", [SINGLE, ACC])
def test_a_refused_change_changes_nothing_and_says_why(name: str) -> None:
    controller = Controller(Cache(stores_images=True))
    answer = controller.ask(pp_max_micro_batch_size=2, **{name: 0.5})
    assert not answer.updated
    assert answer.rid.startswith(f"{REFUSED}--enable-hier-kv needs --{name.replace('_', '-')} of")
    assert len(answer.rid) < 700
    assert controller.done == []


def test_other_changes_are_sglangs() -> None:
    controller = Controller(Cache(stores_images=True))
    assert controller.ask(pp_max_micro_batch_size=2).updated
    assert controller.ask(**{SINGLE: 1.0, ACC: 1}).updated
    for cache in (Cache(stores_images=False), None):
        assert Controller(cache).ask(**{SINGLE: 0.5}).updated
    assert controller.done == [{"pp_max_micro_batch_size": 2}, {SINGLE: 1.0, ACC: 1}]


def asked(*answers: SetInternalStateReqOutput) -> list[bool]:
    """What SGLang's front process answers, where its schedulers answer this."""

    async def ask(_: Any) -> list[SetInternalStateReqOutput]:
        return list(answers)

    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None, set_internal_state_communicator=ask
    )
    return asyncio.run(around_asking(None, manager, SetInternalStateReq(server_args={})))


def test_the_front_process_tells_what_a_scheduler_refused() -> None:
    done, not_done = (SetInternalStateReqOutput(updated=updated) for updated in (True, False))
    assert asked(done, not_done) == [True, False]
    refused = SetInternalStateReqOutput(updated=False, rid=f"{REFUSED}a sentence.")
    with pytest.raises(HTTPException) as error:
        asked(refused, refused)
    assert (error.value.status_code, error.value.detail) == (400, "a sentence.")
