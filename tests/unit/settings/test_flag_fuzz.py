"""Whatever is given, the start goes on or ends with one sentence: no other exception, no wait.

The long form has more; a failure names its seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.assembly import preflight
from sglang_ext.assembly.preflight import check_machine
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers import anonymous_memory
from tests.long_form import count

NUM_CASES = count(1500, 30000)
SENTENCE_CHARS = 700  # with a path of the test's own in it
SECRET = "hunter2"

NUMBERS = [
    "0",
    "-0",
    "1",
    "-1",
    "0.5",
    "1e308",
    "-1e308",
    "1e-308",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
]
NUMBERS += ["9" * 5000, "1_000", "0x10", "٣", "²", " 1", "1 ", "", "4GB", "1e", "--1", "true"]
TEXTS = ["", "\0", "a\0b", "\n", "a\nb", "\x1b[2J", "ü", "日本", "\udcff", "a" * 5000, "../" * 900]
TEXTS += [" ", ",", "=", "disk=", "=hier", "disk=hier,disk=hier", "host=1,remote=99999", "%00"]
TEXTS += [
    "hier",
    "cachegen-paper",
    "lossless",
    "remote=hier",
    "host=hier",
    "auto",
    "off",
    "9" * 5000,
]
OPTIONS = ["prefix", "ttl", "timeout", "part", "calls", "password-file", "cluster", "ca-file"]
OPTIONS += ["cert-file", "key-file", "verify", "metadata", "host", "protocol", "devices", "segment"]
OPTIONS += ["size", "free", "fsync", "group", "password", "\0", "ü", "", "a" * 300]
HOSTS = ["127.0.0.1", "127.0.0.1:1", "[::1]:1", "[", "h:x", "h:0", "h:" + "9" * 5000, ":1", "@", ""]
HOSTS += [
    "a" * 300,
    "a..b",
    "h\u2100",
    "u@h",
    f"u:{SECRET}@h",
    f":{SECRET}@h",
    "a,b",
    "h:1,",
    "h/x",
]
UNITS = ["", "s", "m", "h", "d", "KB", "MB", "GB", "TB", "PB", "%00", "ms"]


def _paths(folder: Path) -> list[str]:
    """Places of every kind, none of them harmful to write to."""
    names = (
        "file",
        "folder",
        "pipe",
        "link",
        "loop",
        "open",
        "no/such",
        "folder/new",
        "file/below",
    )
    return [*(str(folder / name) for name in names), "/dev/full", "/proc/x", "relative/\0", ""]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o1777)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _text(rng: random.Random, folder: Path) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(NUMBERS) + rng.choice(UNITS)
    if kind == 1:
        return rng.choice(_paths(folder))
    if kind == 2:
        alphabet = "abz019./:@?&=#%+-_ \n\0ü\udc80'\"\\"
        return "".join(rng.choice(alphabet) for _ in range(rng.randrange(30)))
    return rng.choice(TEXTS)


def _url(rng: random.Random, folder: Path) -> str:
    scheme = rng.choice(["redis", "rediss", "mooncake", "file", "http", "", "ü", "REDIS"])
    place = rng.choice(_paths(folder)) if scheme == "file" else rng.choice(HOSTS)
    if rng.random() < 0.2:
        place += "/" + _text(rng, folder)
    query = [f"size={rng.choice(['1GB', '64KB', '1', '9e9'])}"] if scheme == "file" else []
    query += [
        f"{rng.choice(OPTIONS)}={_text(rng, folder)}" for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))
    ]
    return f"{scheme}://{place}" + ("?" + "&".join(query) if query else "")


def _value(rng: random.Random, folder: Path, name: str, default: Any) -> Any:
    if name == "remote_url" and rng.random() < 0.9:
        return _url(rng, folder)
    if name in ("disk_dir", "event_log", "profile", "key_file") and rng.random() < 0.8:
        return rng.choice(_paths(folder))
    if rng.random() < 0.05:
        return rng.choice([None, True, [], {}, 10**400, -(10**400), b"x", [f"redis://:{SECRET}@h"]])
    if isinstance(default, (int, float)) and rng.random() < 0.5:
        return rng.choice([0, 1, -1, 0.5, 1e308, 10**20, float("nan"), float("inf"), 1e-9, 2])
    choices = next(item for item in fields(HierKVConfig) if item.name == name).metadata["choices"]
    if choices and rng.random() < 0.6:
        return rng.choice(choices)
    return _text(rng, folder)


def _assert_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.isprintable(), message
    assert len(message) <= SENTENCE_CHARS, message
    assert SECRET not in message


def _tries(start: Callable[[], None], seed: object) -> bool:
    """Whether it went on; fails for anything but that and one sentence."""
    try:
        start()
    except HierKVConfigError as error:
        _assert_sentence(str(error))
        return False
    except BaseException as error:
        raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error
    return True


def test_any_settings_start_or_end_with_a_sentence(folder: Path) -> None:
    names = [item.name for item in fields(HierKVConfig)]
    good = 0
    for seed in range(NUM_CASES):
        rng = random.Random(seed)
        values: dict[str, Any] = {"host_size": 0.001}
        for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
            default = next(item.default for item in fields(HierKVConfig) if item.name == name)
            values[name] = _value(rng, folder, name, default)
        good += _tries(lambda: check_machine(HierKVConfig.from_dict(values)), (seed, values))  # noqa: B023
    assert 0 < good < NUM_CASES


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", "[" * 100_000, '{"x": 1}', '{"host_size": 1e999}', f'"{SECRET}"',
     '{"host_size": ' + "9" * 5000 + "}", '{"remote_url": "redis://:' + SECRET + '@h"',
     '{"a\\nb": 1}', '{"disk_dir": "\\u0000"}', '{"disk_dir": "\\ud800"}'],
)  # fmt: skip
def test_any_environment_starts_or_ends_with_a_sentence(text: str) -> None:
    assert not _tries(lambda: check_machine(HierKVConfig.from_json(text, {})), text[:40])


def test_what_is_printed_names_no_more_than_it_needs() -> None:
    values = {"remote_url": f"redis://u:{SECRET}@h"}
    for text in (json.dumps(values)[:-1], json.dumps([values])):
        with pytest.raises(HierKVConfigError) as caught:
            HierKVConfig.from_json(text, {})
        assert SECRET not in str(caught.value)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MemAvailable is the machine's; what the cgroup leaves is less."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 67108864 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "cgroup").mkdir()
    for name, value in (("memory.max", 3 << 30), ("memory.current", 1 << 30), ("memory.stat", "")):
        (tmp_path / "cgroup" / name).write_text(f"{value}\n" if value else "inactive_file 0\n")
    found = anonymous_memory.available_bytes(tmp_path / "proc", tmp_path / "cgroup")
    monkeypatch.setattr(preflight, "available_bytes", lambda: found)
    check_machine(HierKVConfig(host_size=1.9))
    with pytest.raises(HierKVConfigError, match=r"more than the 2\.0 GiB of memory"):
        check_machine(HierKVConfig(host_size=2.1))
