"""Mooncake's master with its metadata server, and a node that lends it memory, on loopback."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import sysconfig
from pathlib import Path

from testkit.ports import free_port
from testkit.remote.processes import EndedWithBlock, Process

_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", sys.argv[1], int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[3])
assert code == 0, code
print("mounted", flush=True)
while True:
    time.sleep(3600)
"""


def mooncake_missing() -> str:
    """Why Mooncake cannot be run here; "" when it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake's client does not load: {error}"
    return ""


class MooncakeServer(EndedWithBlock):
    """A master and one node. `kill` and `start` are for both, or the master alone."""

    def __init__(self, folder: Path, segment_bytes: int = 256 << 20, lease_ms: int = 1000) -> None:
        """Starts both.

        Args:
            folder: for logs; made if absent.
            segment_bytes: memory for values.
            lease_ms: how long a value that was read can be neither removed nor evicted; a read
                that takes longer fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._metadata_port = free_port(), free_port()
        self.metadata = f"http://127.0.0.1:{self._metadata_port}/metadata"
        environment = {**os.environ, "GLOG_minloglevel": "1"}
        binary = Path(sysconfig.get_path("scripts")) / "mooncake_master"
        self.master = Process(
            [
                str(binary), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1",
                "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={self._metadata_port}",
                "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}",
                f"--default_kv_lease_ttl={lease_ms}",
            ],
            folder / "master.log",
            environment,
        )  # fmt: skip
        self._node_log = folder / "node.log"
        self.node = Process(
            [sys.executable, "-c", _NODE, self.metadata, str(segment_bytes),
             f"127.0.0.1:{self.port}"],
            self._node_log,
            environment,
        )  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        """For `--hier-kv-remote-url`."""
        return f"mooncake://127.0.0.1:{self.port}?metadata={self.metadata}&host=127.0.0.1"

    def start(self) -> None:
        """Starts both, or both again, empty."""
        self.master.start(lambda: _is_open(self.port) and _is_open(self._metadata_port))
        self._node_log.write_bytes(b"")
        self.node.start(lambda: b"mounted" in self._node_log.read_bytes())

    def kill(self) -> None:
        """Kills both; what they held is gone."""
        self.node.kill()
        self.master.kill()


def _is_open(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1.0):
        return True
