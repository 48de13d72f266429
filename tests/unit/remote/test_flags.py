"""Settings of coded pages in a remote store: what is understood, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig

URL = "redis://127.0.0.1"


def config(**values: Any) -> HierKVConfig:
    return HierKVConfig.from_dict({"remote_url": URL, **values})


@pytest.mark.parametrize(
    ("values", "remote", "level", "record"),
    [
        ({"codec": "remote=hier"}, "hier", "", "none"),
        ({"codec": "remote=hier", "level": "remote=4"}, "hier", "4", "none"),
        ({"codec": "remote=hier", "level": "3", "profile": "p.hkp"}, "hier", "3", "none"),
        ({"codec": "remote=cachegen-paper,disk=lossless", "disk_dir": "d"}, "cachegen-paper", "",
         "lossless"),
        ({"codec": "hier", "disk_dir": "d"}, "none", "", "hier"),
        ({"codec": "host=hier,remote=hier", "level": "host=2,remote=3"}, "hier", "3", "hier"),
        ({}, "none", "", "none"),
    ],
)  # fmt: skip
def test_each_tier_has_its_codec(
    values: dict[str, Any], remote: str, level: str, record: str
) -> None:
    found = config(**values)
    assert (found.of_tier("codec", "remote"), found.record_codec) == (remote, record)
    assert found.of_tier("level", "remote") == level


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"codec": "remote=hier", "remote_url": ""}, "there is none"),
        ({"codec": "remote=best"}, "must be one of"),
        ({"codec": "remote=hier", "slo_ms": -1.0}, "0 or more"),
        ({"slo_ms": 500.0}, "remote=hier"),
        ({"codec": "hier", "disk_dir": "d", "slo_ms": 500.0}, "remote=hier"),
        ({"codec": "remote=hier", "coding": "cost"}, "need a codec"),
        ({"level": "remote=3"}, "need a codec"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(HierKVConfigError, match=match):
        config(**values)
