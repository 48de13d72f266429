"""A server whose ranks lie on two nodes, both on loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from testkit.ports import free_port
from testkit.server import TINYLM, Server


class TwoNodes:
    """Both nodes, from start to kill; requests go to `head`.

    Args:
        args: of both.
        folder: for logs and each node's disk folder.
        env: of both.
        late: variables of the second node alone.
        other_args: of the second node alone.
        ranks: arguments that say what ranks there are.
        model: path of the model.
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
    ) -> None:
        shared = [*args, *ranks, "--nnodes", "2"]
        shared += ["--dist-init-addr", f"127.0.0.1:{free_port()}"]
        self.folder = folder
        self.nodes = [
            Server(
                [
                    *shared,
                    *("--node-rank", str(node)),
                    *("--hier-kv-disk-dir", str(self.disk(node))),
                    *(other_args if node else ()),
                ],
                model=model,
                log_path=folder / f"node{node}.log",
                env={**(env or {}), **((late or {}) if node else {})},
                stop="kill",
                start_timeout_s=300.0,
            )
            for node in range(2)
        ]
        self.head, self.other = self.nodes

    def disk(self, node: int) -> Path:
        """A node's disk folder."""
        return self.folder / f"disk{node}"

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self.head.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends both."""
        for node in self.nodes:
            node.kill()

    def log(self) -> str:
        """Of both."""
        return "".join(node.log() for node in self.nodes)
