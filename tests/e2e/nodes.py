"""A server whose ranks lie on several nodes, all on loopback."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from testkit.ports import free_port
from testkit.server import TINYLM, Server, ServerError

_START_S = 400.0
# Said once a node has looked for who listens on the ports that SGLang counts from the first node's.
_HAS_LOOKED = "server_args="
_COUNTS_PORTS = ("--attn-dp-size", "--enable-dp-attention")


class Nodes:
    """All nodes, from start to kill; requests go to `head`.

    Args:
        args: of all.
        folder: for logs and each node's disk folder.
        env: of all.
        late: variables of the last node alone.
        other_args: of the last node alone.
        ranks: arguments that say what ranks there are.
        model: path of the model.
        num: how many; one is a server as any other.
        has_disk: each has a disk folder.
    """

    def __init__(
        self,
        args: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        late: Mapping[str, str] | None = None,
        other_args: Sequence[str] = (),
        ranks: Sequence[str] = ("--tp-size", "2"),
        model: Path = TINYLM,
        num: int = 2,
        has_disk: bool = True,
    ) -> None:
        self.folder = folder
        shared = [*args, *ranks]
        if num > 1:
            shared += ["--nnodes", str(num), "--dist-init-addr", f"127.0.0.1:{free_port()}"]
        self._counts_ports = num > 1 and any(name in shared for name in _COUNTS_PORTS)

        def node_of(number: int) -> Server:
            is_last = number == num - 1
            own = [*shared, *(other_args if is_last else ())]
            own += ["--node-rank", str(number)] if num > 1 else []
            own += ["--hier-kv-disk-dir", str(self.disk(number))] if has_disk else []
            return Server(
                own,
                model=model,
                log_path=folder / f"node{number}.log",
                env={**(env or {}), **((late or {}) if is_last else {})},
                stop="kill",
                start_timeout_s=_START_S,
            )

        self.nodes = [node_of(number) for number in range(num)]
        self.head, self.other = self.nodes[0], self.nodes[-1]

    def disk(self, node: int) -> Path:
        """A node's disk folder."""
        return self.folder / f"disk{node}"

    def __enter__(self) -> Self:
        try:
            for node in reversed(self.nodes):
                node.start()
                if self._counts_ports and node is not self.head:
                    _await_look(node)
            self.head.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends all."""
        for node in self.nodes:
            node.kill()

    def schedulers(self) -> list[psutil.Process]:
        """Of all, in the order of nodes."""
        found = [one for node in self.nodes for one in node.tree()]
        return [one for one in found if "sglang::scheduler" in " ".join(one.cmdline())]

    def log(self) -> str:
        """Of all."""
        return "".join(node.log() for node in self.nodes)


def _await_look(node: Server) -> None:
    """Waits until a node has found nobody on the ports that the first one listens on.

    With data parallel attention SGLang has each node look, which is meant for machines of their
    own. The later ones wait for the first one then.
    """
    deadline_s = time.monotonic() + _START_S
    while _HAS_LOOKED not in node.log():
        if not node.alive() or time.monotonic() > deadline_s:
            raise ServerError(f"a node did not start:\n{node.log()}")
        time.sleep(0.05)
