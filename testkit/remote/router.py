"""SGLang's router, as a process in front of some servers."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from testkit.ports import free_port
from testkit.remote.processes import EndedWithBlock, Process

# `python -m sglang_router.launch_router`, without its import of all of SGLang for a balancer that
# nobody asks for.
_LAUNCH = """
import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()
"""


def router_missing() -> str:
    """Why there is none: a sentence, empty where there is one."""
    found = importlib.util.find_spec("sglang_router")
    return "" if found else "sglang-router is not installed"


class Router(EndedWithBlock):
    """A router that has found all of its servers.

    Args:
        urls: of the servers.
        policy: how it chooses among them, by the name of its `--policy`.
        folder: for its log.
    """

    def __init__(self, urls: Sequence[str], policy: str, folder: Path) -> None:
        self._port, self._num_servers = free_port(), len(urls)
        self.url = f"http://127.0.0.1:{self._port}"
        command = [sys.executable, "-c", _LAUNCH, "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--prometheus-port", str(free_port())]
        command += ["--prometheus-host", "127.0.0.1", "--policy", policy]
        command += ["--worker-startup-check-interval", "1", "--worker-urls", *urls]
        self._process = Process(command, folder / f"router-{policy}.log")
        self._process.start(self._knows_all)

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()

    def _knows_all(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/workers", timeout=60.0) as answer:
            workers = json.load(answer)["workers"]
        return sum(bool(worker["is_healthy"]) for worker in workers) == self._num_servers
