"""Real Redis servers on loopback: plain, with a password, with TLS, or as a cluster."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.tiers.remote.base import Deadline
from sglang_ext.tiers.remote.engines.resp import Connection, Login, Reply, ReplyBounds
from testkit.ports import free_port
from testkit.remote.processes import EndedWithBlock, Process

_TIMEOUT_S = 300.0
_ANY_REPLY = ReplyBounds(depth=8, num_items=1 << 20, num_bytes=64 << 20)


def redis_binary() -> str | None:
    """Path of a Redis or Valkey server; None where neither is installed."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer(EndedWithBlock):
    """One server that keeps nothing on disk."""

    def __init__(
        self,
        folder: Path,
        *,
        password: str = "",
        tls: TlsFiles | None = None,
        max_memory: str = "",
        policy: str = "noeviction",
        cluster: bool = False,
        port: int = 0,
    ) -> None:
        """Starts it.

        Args:
            folder: for its log; made if absent.
            password: of the default user; none if empty.
            tls: certificate and key; then it speaks TLS only.
            max_memory: as in its configuration; no bound if empty.
            policy: what goes when it is full.
            cluster: as a node of a cluster that is still to be made.
            port: to listen on; 0 for a free one.
        """
        binary = redis_binary()
        assert binary is not None, "no redis-server is installed"
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.password = password
        self._tls = tls
        port_flags = (
            ["--port", "0", "--tls-port", str(self.port), *tls.flags()]
            if tls
            else ["--port", str(self.port)]
        )
        command = [binary, *port_flags, "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", policy]
        command += ["--requirepass", password] if password else []
        command += ["--maxmemory", max_memory] if max_memory else []
        if cluster:
            bus = str(free_port())
            command += ["--cluster-enabled", "yes", "--cluster-port", bus]
            command += ["--cluster-config-file", f"nodes-{self.port}.conf"]
            command += ["--cluster-node-timeout", "2000"]
        self.process = Process(command, folder / f"redis-{self.port}.log")
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again on the same port, empty."""
        self.process.start(self._is_up)

    def kill(self) -> None:
        """Kills it; what it held is gone."""
        self.process.kill()

    def call(self, *command: str | int | bytes) -> Reply:
        """Runs one command on a connection of its own."""
        deadline = Deadline.after(_TIMEOUT_S)
        connection = Connection("127.0.0.1", self.port, self._login(), deadline)
        try:
            return connection.call(command, deadline, _ANY_REPLY)
        finally:
            connection.close()

    def _login(self) -> Login:
        return Login("", self.password, 0, self._tls.context() if self._tls else None)

    def _is_up(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1.0):
            pass
        return self.call("PING") == b"PONG"


class TlsFiles:
    """A certificate authority of its own and a certificate for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        """Makes the files with the `openssl` command."""
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (folder / n for n in ("ca.pem", "cert.pem", "key.pem"))
        ca_key, request, extensions = (folder / n for n in ("ca.key", "cert.csr", "san.ext"))
        # From Python 3.13 on a client wants of both what RFC 5280 does.
        extensions.write_text(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nsubjectKeyIdentifier=hash\n"
            "authorityKeyIdentifier=keyid\nkeyUsage=critical,digitalSignature,keyEncipherment\n"
        )
        new_key = ["-newkey", "rsa:2048", "-nodes"]
        _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", self.ca, "-days", "2",
                 "-subj", "/CN=test authority",
                 "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
        _openssl("req", *new_key, "-keyout", self.key, "-out", request, "-subj", "/CN=localhost")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", ca_key,
                 "-CAcreateserial", "-out", self.cert, "-days", "2",
                 "-extfile", extensions)  # fmt: skip

    def flags(self) -> list[str]:
        """What the server is told."""
        files = ["--tls-cert-file", self.cert, "--tls-key-file", self.key]
        files += ["--tls-ca-cert-file", self.ca, "--tls-auth-clients", "no"]
        return [str(item) for item in files]

    def context(self) -> ssl.SSLContext:
        """What a client that trusts the authority connects with."""
        return ssl.create_default_context(cafile=str(self.ca))


class RedisCluster(EndedWithBlock):
    """Three nodes with a third of the slots each."""

    def __init__(self, folder: Path, num_nodes: int = 3) -> None:
        self.nodes = [RedisServer(folder, cluster=True) for _ in range(num_nodes)]
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
        try:
            self._cli("--cluster", "create", *addresses, "--cluster-yes")
            self._wait_ok()
        except BaseException:
            self.kill()
            raise

    def move_slots(self, source: int, target: int, num_slots: int) -> None:
        """Moves slots with their values from one node to another; returns when it is done."""
        ids = [bytes(node.call("CLUSTER", "MYID")).decode() for node in self.nodes]  # type: ignore[arg-type]
        self._cli(
            "--cluster", "reshard", f"127.0.0.1:{self.nodes[0].port}", "--cluster-from",
            ids[source], "--cluster-to", ids[target], "--cluster-slots", str(num_slots),
            "--cluster-yes",
        )  # fmt: skip

    def kill(self) -> None:
        """Kills every node."""
        for node in self.nodes:
            node.kill()

    def _cli(self, *arguments: str) -> None:
        done = subprocess.run(
            ["redis-cli", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"redis-cli {arguments[1]} failed:\n{done.stdout}{done.stderr}")

    def _wait_ok(self) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s:
            infos = [bytes(node.call("CLUSTER", "INFO")) for node in self.nodes]  # type: ignore[arg-type]
            if all(b"cluster_state:ok" in info for info in infos):
                return
            time.sleep(0.05)
        raise RuntimeError("the cluster did not come up")


def _openssl(*arguments: object) -> None:
    command: Sequence[str] = ["openssl", *(str(argument) for argument in arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
