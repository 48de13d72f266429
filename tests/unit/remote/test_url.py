"""What `--hier-kv-remote-url` may say, and what is said about what it may not."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path

import pytest

from sglang_ext.assembly.remote_setup import check_remote
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.remote import (
    RemoteStore,
    RemoteStoreConfig,
    engine_schemes,
    open_engine,
    parse_remote_url,
    register_engine,
)
from sglang_ext.tiers.remote.engines.mooncake_engine import MooncakeEngine
from sglang_ext.tiers.remote.password import ENV_PASSWORD


def test_every_engine_is_found_by_its_scheme() -> None:
    assert engine_schemes() == ("file", "mooncake", "redis", "rediss")
    with pytest.raises(ValueError, match="already"):
        register_engine("redis", "a.b")
    with pytest.raises(ValueError, match="letters"):
        register_engine("Redis+1", "a.b")


def test_a_redis_url_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PASSWORD, "p@ss")
    url = parse_remote_url(
        "redis://user@one:7000,two,[::1]:7002/0?cluster=yes&ttl=7d&part=2MB&prefix=team-a"
    )
    assert url.hosts == (("one", 7000), ("two", 6379), ("::1", 7002))
    assert (url.user, url.password, url.path) == ("user", "p@ss", "0")
    config = RemoteStoreConfig.from_url(url)
    assert (config.ttl_s, config.part_bytes, config.prefix) == (7 * 86400, 2 << 20, "team-a")


def test_a_mooncake_url_is_taken_apart() -> None:
    url = parse_remote_url("mooncake://m:50051?metadata=http://m:8080/metadata&segment=4GB")
    assert url.hosts == (("m", 50051),)
    assert url.options["metadata"] == "http://m:8080/metadata"
    assert url.options["segment"] == 4 << 30
    engine = open_engine(url)
    assert isinstance(engine, MooncakeEngine)
    assert engine._reads.segment_bytes == 0  # who looks at a store lends it nothing
    engine.begin()
    assert engine._reads.segment_bytes == 4 << 30
    engine.close()


def test_a_password_file_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    url = parse_remote_url(f"redis://h?password-file={secret}")
    assert url.password == "hunter2"


def test_the_environment_has_a_password_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PASSWORD, "hunter2")
    assert parse_remote_url("redis://user@h").password == "hunter2"
    assert parse_remote_url("mooncake://h").password == ""
    secret = tmp_path / "secret"
    secret.write_text("hunter3\n")
    with pytest.raises(TierConfigError, match="leave one of them out"):
        parse_remote_url(f"redis://h?password-file={secret}")


@pytest.mark.parametrize("login", ["u:hunter2@", ":hunter2@", "u:@", ":hunter2@x@"])
def test_a_password_in_the_url_is_refused(login: str) -> None:
    with pytest.raises(TierConfigError, match="must have no password in it") as caught:
        parse_remote_url(f"redis://{login}h")
    message = str(caught.value)
    assert "hunter2" not in message
    assert "password-file=PATH" in message
    assert ENV_PASSWORD in message


def test_a_password_file_is_one_line_and_no_pipe(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    os.mkfifo(secret)  # to open it would wait for ever
    with pytest.raises(TierConfigError, match="this is none"):
        parse_remote_url(f"redis://h?password-file={secret}")
    secret.unlink()
    for content in (b"", b"\n", b"one\ntwo\n", b"a\0b", b"\xff"):
        secret.write_bytes(content)
        with pytest.raises(TierConfigError, match="password-file must"):
            parse_remote_url(f"redis://h?password-file={secret}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be SCHEME://PLACE"),
        ("localhost:6379", "must be SCHEME://PLACE"),
        ("memcached://h:1", "must begin with one of file://, mooncake://, redis://, rediss://"),
        ("redis:///", "HOST:PORT"),
        ("redis://h:99999", "a number from 1 to 65535, got 99999"),
        ("redis://h:0", "a number from 1 to 65535"),
        ("redis://h:six", "a number from 1 to 65535"),
        ("redis://h:" + "9" * 5000, "a number from 1 to 65535"),
        ("redis://" + "h" * 300, "at most 253 letters"),
        ("redis://a..b", "none of them empty"),
        ("redis://h/" + "9" * 5000, "ends with its port"),
        ("redis://h?user=%00", "no option 'user'"),
        ("redis://h?ttl=" + "9" * 400 + "d", "a positive time"),
        ("redis://h?ttl=0.0001s", "a positive time from 1s"),
        ("redis://h?timeout=0.0001s", "a positive time from 0.001s"),
        ("redis://h?timeout=9999d", "a positive time from 0.001s to 86400s"),
        ("redis://h?calls=" + "9" * 5000, "a number from 1 to 64"),
        ("redis://h?part=" + "9" * 400 + "TB", "a positive size"),
        ("redis://h?part=999999999TB", "a positive size of at most"),
        ("redis://h?password-file=%00", "password-file must be printable text"),
        ("redis://h?password-file=/tmp", "this is none"),
        ("redis://h?password-file=" + "a" * 5000, "password-file must be a file that can be read"),
        ("redis://h o", "no spaces"),
        ("redis://h\n", "no spaces"),
        ("redis://a,b", "add cluster=yes"),
        ("redis://h/3?cluster=yes", "database 0 only"),
        ("redis://h/zero", "ends with its port"),
        ("redis://h?ca-file=/x", "no option 'ca-file'"),
        ("redis://h?ttl=7", "a positive time"),
        ("redis://h?ttl=0s", "a positive time"),
        ("redis://h?part=1KB", "part must be from 65536 to 67108864"),
        ("redis://h?part=4PB", "a positive size"),
        ("redis://h?calls=0", "a number from 1 to 64"),
        ("redis://h?cluster=1", "yes or no"),
        ("redis://h?prefix=a:b", "1 to 32 letters"),
        ("redis://h?ttl=1d&ttl=2d", "given twice"),
        ("redis://h?ttl", "cannot be read"),
        ("redis://h#x", "no '#'"),
        ("redis://user@h", "no password"),
        ("redis://h?password-file=/no/such/file", "password-file must be a file that can be read"),
        ("rediss://h?cert-file=/etc/hostname", "belong together"),
        ("rediss://h?ca-file=/etc/hostname", "PEM"),
        ("rediss://h?verify=maybe", "one of full, none"),
        ("mooncake://a,b", "at most 1"),
        ("mooncake://user:x@h", "no USER@"),
        ("mooncake://h?metadata=ftp://h", "P2PHANDSHAKE, or"),
        ("mooncake://h/path", "ends with its port"),
        ("mooncake://h?ttl=1d", "takes no ttl"),
        ("file://host/share?size=1GB", "no host, got host 'host'"),
        ("file://relative?size=1GB", "no host"),
        ("file:///?size=1GB", "names a folder"),
        ("file:///no/such/folder?size=1GB", "must be a folder that is there"),
        ("file:///tmp", "add size=100GB"),
        ("file:///tmp?size=many", "a positive size"),
        ("file:///tmp?size=1", "size must be a size of at least 64KB"),
        ("file:///tmp%00?size=1GB", "printable"),
        ("file:///tmp%0a?size=1GB", "printable"),
        ("file:///" + "a" * 5000 + "?size=1GB", "must be a folder"),
        ("mooncake://h?metadata=http://u:p%40h/", "without a user or password"),
    ],
)
def test_a_bad_url_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(TierConfigError, match="--hier-kv-remote-url") as caught:
        _open(text)
    message = str(caught.value)
    assert complaint in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2@h:99999",
        "redis://u:hunter2@h?nonsense=1",
        "redis://u:hunter2@a,b",
        "redis://u:hunter2@h/path",
        "memcached://u:hunter2@h",
        "mooncake://u:hunter2@h",
        "redis://u:hunter2@h?password-file=/etc/hostname",
        "redis://u:hunter2@h:1:2",
        "redis://u:hunter2@h[",
        "redis://u:hunter2@h\u2100",  # urlsplit's own error repeats it
        "redis://u:hunter2",
        "redis://h?hunter2",
        "redis://h?password=hunter2",
        "redis://h?password-file=hunter2",
        "mooncake://h?metadata=http://u:hunter2@h/",
        "redis://:hunter2/x@h",
        "redis://:hunter2?x@h",
        "redis://:hunter2#x@h",
        "hunter2@h",
    ],
)
def test_no_complaint_shows_a_secret(text: str) -> None:
    with pytest.raises(TierConfigError) as caught:
        _open(text)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value, chain=True))


def test_nothing_that_is_shown_has_a_secret_in_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(ENV_PASSWORD, "hunter2")
    url = parse_remote_url("redis://user@127.0.0.1:9/2?ttl=1d")
    assert url.shown == "redis://***@127.0.0.1:9/2"
    store = RemoteStore(open_engine(url), RemoteStoreConfig.from_url(url), shown=url.shown)
    assert not store.wait_usable(0.2)
    store.close()
    texts = [repr(url), str(url), caplog.text, repr(store.stats()), repr(vars(store))]
    assert not [text for text in texts if "hunter2" in text]
    assert "***@127.0.0.1:9" in caplog.text


def test_the_plugins_settings_say_the_same() -> None:
    for text in ("redis://u:hunter2@h:99999", "mooncake://h?ttl=1d", "file:///no/such?size=1GB"):
        with pytest.raises(HierKVConfigError, match="--hier-kv-remote-url") as caught:
            check_remote(text)
        assert "hunter2" not in str(caught.value)
    check_remote("redis://127.0.0.1:9")  # not asked now
    with pytest.raises(HierKVConfigError, match="--hier-kv-remote-policy has no effect"):
        HierKVConfig.from_dict({"remote_policy": "second_hit"})


@pytest.mark.parametrize(
    ("disk", "shared"), [("a", "a"), ("a/b", "a"), ("a", "a/b"), ("link", "a")]
)
def test_the_disk_tiers_folder_is_apart(tmp_path: Path, disk: str, shared: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    with pytest.raises(HierKVConfigError, match="must not lie in each other"):
        check_remote(f"file://{tmp_path}/{shared}?size=1GB", str(tmp_path / disk))
    check_remote(f"file://{tmp_path}/a/b?size=1GB", str(tmp_path / "c"))


def _open(text: str) -> None:
    url = parse_remote_url(text)
    config = RemoteStoreConfig.from_url(url)
    RemoteStore(open_engine(url), config, shown=url.shown).close()
