"""SGLang's gateway (SMG) in front of servers to which it speaks gRPC, following their KV events."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from testkit.ports import free_port
from testkit.remote.processes import EndedWithBlock, Process, ServerError
from testkit.server import TINYLM, Server

_START_S = 900.0
_MODEL = "tinylm"


class Gateway(EndedWithBlock):
    """Two servers or more, and the gateway, which has found all of them.

    Args:
        servers: arguments of each.
        policy: how it chooses among them, by the name of its `--policy`.
        page_size: of the servers.
        folder: for logs.
        environment: variables for the servers.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[str]],
        policy: str,
        page_size: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        ports = [free_port() for _ in servers]
        self._workers = [f"grpc://127.0.0.1:{each}" for each in ports]
        # The warm-up asks for tokens that the bundled model lacks; a `Server` goes without it.
        common = ["--page-size", str(page_size), "--smg-grpc-mode", "--served-model-name", _MODEL]
        self._servers: list[Server] = []
        for number, (each, args) in enumerate(zip(ports, servers, strict=True)):
            events = {
                "publisher": "zmq",
                "topic": "kv",
                "endpoint": f"tcp://127.0.0.1:{free_port()}",
            }
            told = json.dumps({**events, "bind": True})
            own = [*common, "--kv-events-config", told, *args]
            own += ["--smg-http-sidecar-port", str(free_port())]  # else the port behind it
            log = folder / f"server-{number}.log"
            self._servers.append(Server(own, port=each, log_path=log, env=environment, stop="kill"))
        command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-port", str(metrics_port)]
        command += ["--policy", policy, "--block-size", str(page_size)]
        command += ["--model-path", str(TINYLM), "--worker-startup-check-interval", "1"]
        command += ["--worker-urls", *self._workers]
        self._gateway = Process(command, folder / "gateway.log")

    def __enter__(self) -> Gateway:
        try:
            for server in self._servers:
                server.start()
            self._gateway.start(self._answers, _START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """Kills the gateway, then its servers."""
        self._gateway.kill()
        for server in self._servers:
            server.kill()

    def chat(self, messages: Sequence[Any], max_tokens: int) -> dict[str, Any]:
        """An answer of `/v1/chat/completions`."""
        body = {"model": _MODEL, "messages": list(messages), "max_tokens": max_tokens}
        answer = self._ask("/v1/chat/completions", {**body, "temperature": 0})
        assert isinstance(answer, dict)
        return answer

    def by_server(self, metric: str) -> list[int]:
        """What the gateway's own metric is of each server; 0 of one that it is not told of."""
        found = self._metric(metric, "worker")
        return [found.get(worker, 0) for worker in self._workers]

    def routed(self) -> dict[str, int]:
        """How many requests `cache_aware` sent for which reason: `event_hit`, `event_miss`..."""
        return self._metric("smg_cache_aware_policy_branch_total", "branch")

    def _metric(self, name: str, label: str) -> dict[str, int]:
        """Its samples, by the value of a label."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._metrics_url, timeout=60.0) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples if one.name == name]
        return {one.labels[label]: int(one.value) for one in samples}

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600.0) as answer:
            return json.load(answer)

    def _answers(self) -> bool:
        """Whether it knows all servers, and has loaded the tokenizer, which it does behind that."""
        return self._knows_all() and bool(self.chat([{"role": "user", "content": "Hello"}], 1))

    def _knows_all(self) -> bool:
        for number, server in enumerate(self._servers):
            if not server.alive():
                raise ServerError(f"a server ended: {self._folder / f'server-{number}.log'}")
        with contextlib.suppress(ValueError):
            workers = self._ask("/workers")["workers"]
            return sum(bool(one["is_healthy"]) for one in workers) == len(self._servers)
        return False
