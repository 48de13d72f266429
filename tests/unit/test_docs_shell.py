"""What the documents, examples and `deploy/` show of a shell and of programs that are not ours.

Where the program is here, its line is run: `pip` by `make dist`, `curl` of two pages by the
quickstart's test, `redis-server` below. Of the others the files, names and flags are looked at, of
`curl` the endpoints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from sglang_ext import __version__
from testkit.ports import free_port
from testkit.remote.redis_server import redis_binary
from tests.unit.test_docs_commands import OTHERS, ROOT, Shown, gateways, heads, shown, text_of

# Programs that only a shell block has, beside those of `test_docs_commands`.
_OF_SYSTEM = ("apt-get", "mount", "mkdir", r"for \w+ in", "head", "install")
_FIRST = rf"(?:\.venv/bin/)?(?:hier-kv|python3?|make|{'|'.join((*OTHERS, *_OF_SYSTEM))}) "
_SHELL = re.compile(rf"(?:^ {{4,}}{_FIRST}.*\n(?:^ {{4,}}.*\n)*)", re.MULTILINE)
_DEPLOY = ROOT / "deploy"


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", *heads()]


def blocks() -> list[tuple[str, str]]:
    """Pages, and blocks of them that begin with a program."""
    return [
        (str(page.relative_to(ROOT)), block)
        for page in pages()
        for block in _SHELL.findall(f"{text_of(page)}\n")
    ]


@pytest.mark.parametrize(("page", "block"), blocks(), ids=lambda each: each.strip()[:60])
def test_a_shell_takes_what_is_shown(page: str, block: str) -> None:
    # What may be left out is in brackets, and is no pattern.
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{page}\n{block}\n{done.stderr}"


def test_there_are_blocks_in_all_kinds_of_pages() -> None:
    found = {page.partition("/")[0] for page, _ in blocks()}
    assert found == {"docs", "README.md", "examples", "deploy"}
    text = "\n".join(block for _, block in blocks())
    for program in ("for port in", "apt-get install", "mount -t nfs4", "docker run", "kubectl "):
        assert program in text


def others() -> list[Shown]:
    return [each for each in shown() if each.words[0] in OTHERS]


def files_are_there(words: tuple[str, ...]) -> bool:
    """Whether what `-f` names is in the tree."""
    named = [after for word, after in pairwise(words) if word == "-f"]
    return all((ROOT / name).is_file() for name in named)


def is_docker(words: tuple[str, ...]) -> bool:
    images = [word for word in words if word.startswith("sglang-hier-kv:")]
    return files_are_there(words) and set(images) <= {f"sglang-hier-kv:{__version__}"}


def is_kubectl(words: tuple[str, ...]) -> bool:
    kinds = list(yaml.safe_load_all((_DEPLOY / "kubernetes.yaml").read_text()))
    names = {each["metadata"]["name"] for each in kinds if each["kind"] == "StatefulSet"}
    secrets = {
        volume["secret"]["secretName"]
        for each in kinds
        if each["kind"] == "StatefulSet"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }
    if words[1] == "exec":
        return words[2].rpartition("-")[0] in names
    if words[1:4] == ("create", "secret", "generic"):
        return words[4] in secrets
    return files_are_there(words)


def is_pip(words: tuple[str, ...]) -> bool:
    """Whether extras are those of the package; what is asked for is the registry's to say."""
    name = words[-1]
    extras = re.match(r"sglang\[(.*)\]", name)
    metadata = importlib.metadata.metadata("sglang")
    return not extras or extras[1] in (metadata.get_all("Provides-Extra") or [])


def is_mooncake(words: tuple[str, ...]) -> bool:
    """Whether the tests start it with the same flags, where it is installed."""
    source = (ROOT / "testkit" / "remote" / "mooncake_server.py").read_text()
    flags = {word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")}
    return all(flag in source for flag in flags)


def is_curl(each: Shown) -> bool:
    """Whether a test runs the line (test_quickstart.py), or SGLang has the endpoint it asks."""
    if each.page in ("docs/quickstart.md", "docs/hints.md"):
        return True
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [place] = spec.submodule_search_locations or [""]
    source = Path(place, "srt", "entrypoints", "http_server.py").read_text()
    method = each.words[each.words.index("-X") + 1]
    routes = re.findall(r'^@app\.api_route\("([^"]+)", methods=\[(.*)\]\)', source, re.MULTILINE)
    path = urlsplit(each.words[-1]).path
    return any(path == one and f'"{method}"' in methods for one, methods in routes)


CHECKS: dict[str, Callable[[Shown], bool]] = {
    "curl": is_curl,
    "docker": lambda each: is_docker(each.words),
    "kubectl": lambda each: is_kubectl(each.words),
    "pip": lambda each: is_pip(each.words),
    "redis-server": lambda each: each in servers(),
    "mooncake_master": lambda each: is_mooncake(each.words),
}


@pytest.mark.parametrize("command", others(), ids=lambda each: " ".join(each.words)[:80])
def test_what_is_not_ours_names_what_is_there(command: Shown) -> None:
    assert CHECKS[command.words[0]](command)


def test_a_gateway_of_the_documents_has_flags_that_it_is_tested_with() -> None:
    source = (ROOT / "testkit" / "remote" / "gateway.py").read_text()
    flags = {word for each in gateways() for word in each.words if word.startswith("--")}
    assert "--block-size" in flags
    assert [flag for flag in flags if f'"{flag}"' not in source] == []


def servers() -> list[Shown]:
    return [each for each in shown() if each.words[0] == "redis-server" and each.is_whole]


@pytest.mark.skipif(redis_binary() is None, reason="no redis-server is installed")
@pytest.mark.parametrize("page", sorted({each.page for each in servers()}))
def test_a_redis_of_the_documents_starts_as_it_is_shown(page: str, tmp_path: Path) -> None:
    lines = re.sub(r" *\\\n *", " ", text_of(ROOT / page)).splitlines()
    (line,) = [each.strip() for each in lines if each.strip().startswith("redis-server ")]
    (tmp_path / "secret").write_text("of-the-store\n")
    port = free_port()
    # The last of a flag that is given twice counts.
    command = f"exec {line} --port {port} --bind 127.0.0.1"
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stdout=log, stderr=log)
    try:
        said = b""
        deadline_s = time.monotonic() + 300
        while not said:
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s
            try:
                with socket.create_connection(("127.0.0.1", port), 60) as connection:
                    login = "AUTH of-the-store\r\n" if "--requirepass" in line else ""
                    connection.sendall(f"{login}PING\r\n".encode())
                    said = connection.recv(100)
                    while b"PONG" not in said and (more := connection.recv(100)):
                        said += more
            except ConnectionRefusedError:
                time.sleep(0.05)
        assert b"PONG" in said
    finally:
        server.kill()
        server.wait()


def test_secrets_of_the_cluster_are_made_before_they_are_handed_over(tmp_path: Path) -> None:
    """The lines of the head of `deploy/kubernetes.yaml`, without the cluster's own."""
    (block,) = [found for page, found in blocks() if page == "deploy/kubernetes.yaml"]
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    *made, given = lines
    for line in made:
        mine = line.replace(
            "hier-kv ", f"{shlex.quote(str(Path(sys.executable).with_name('hier-kv')))} ", 1
        )
        done = subprocess.run(
            ["bash", "-c", mine], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    for name in re.findall(r"--from-file=(\S+)", given):
        assert (tmp_path / name).stat().st_size > 20, name
