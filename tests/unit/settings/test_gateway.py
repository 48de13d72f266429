"""What is refused behind SGLang's gateway, which sends requests over gRPC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.images import why_not_images
from sglang_ext.settings.refusals import Resolved, check_arguments, check_resolved

QWEN = ("Qwen2VLForConditionalGeneration", "plain")
# Of the two names SGLang makes the older one the newer when it resolves its arguments.
FLAGS = ("smg_grpc_mode", "grpc_mode")


@pytest.mark.parametrize("flag", FLAGS)
def test_one_scheduler_with_its_defaults_is_served(flag: str) -> None:
    check_arguments(SimpleNamespace(**{flag: True}), HierKVConfig())


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    ("arguments", "settings", "refusal"),
    [
        ({"dp_size": 2}, {}, "--dp-size 1 with --smg-grpc-mode, got 2"),
        ({"pp_size": 2}, {}, "--pp-size 1"),
        ({"disaggregation_mode": "prefill"}, {}, "--disaggregation-mode null"),
        ({"enable_lora": True}, {}, "no --enable-lora with --smg-grpc-mode"),
        ({}, {"truncation": "overflow"}, "--hier-kv-truncation off with --smg-grpc-mode"),
        ({}, {"quotas": "cache_salt:acme=0.3"}, "no --hier-kv-quotas with --smg-grpc-mode"),
    ],
)
def test_what_was_not_tried_there_is_refused(
    flag: str, arguments: dict[str, Any], settings: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(HierKVConfigError, match=refusal):
        check_arguments(SimpleNamespace(**{flag: True}, **arguments), HierKVConfig(**settings))


def test_the_release_before_is_refused() -> None:
    values = {"smg_grpc_mode": True}
    check_resolved(Resolved(values, values, {}, "mha", "0.5.23"), HierKVConfig())
    with pytest.raises(
        HierKVConfigError, match=r"SGLang 0\.5\.23 with --smg-grpc-mode, got 0.5.22"
    ):
        check_resolved(Resolved(values, values, {}, "mha", "0.5.22"), HierKVConfig())


def test_who_tells_of_a_disk_is_told_that_the_gateway_passes_over_it() -> None:
    values = {"smg_grpc_mode": True, "kv_events_config": "{}"}
    release = Resolved(values, values, {}, "mha", "0.5.23")
    (advice,) = check_resolved(release, HierKVConfig(disk_dir="/kv"))
    assert "with --hier-kv-kv-events-disk host it does" in advice
    served = HierKVConfig(disk_dir="/kv", kv_events_disk="host")
    assert check_resolved(release, served) == check_resolved(release, HierKVConfig()) == []
    silent = Resolved({"smg_grpc_mode": True}, values, {}, "mha", "0.5.23")
    assert check_resolved(silent, HierKVConfig(disk_dir="/kv")) == []


def test_images_that_come_from_there_are_served_only() -> None:
    args = SimpleNamespace(
        enable_lora=False, lora_paths=None, speculative_algorithm=None, disaggregation_mode="null"
    )
    assert why_not_images(SimpleNamespace(**vars(args), smg_grpc_mode=True), *QWEN) == (
        "SGLang's gateway"
    )
