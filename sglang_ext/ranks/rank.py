"""Which rank of a server this process is, and what of the server's DRAM and disk belongs to it.

A rank of a tensor parallel group holds its share of the KV heads, and a data parallel rank serves
requests of its own. Each has a DRAM and a folder on disk to itself.

A pipeline stage has some of the model's layers and serves the same requests as the others; each of
its ranks holds KV of these layers.

Context parallel ranks share the tokens of a prefill, not its heads, and each has KV of all tokens.
Here they are of the tensor parallel group of their request, and hold what its other ranks hold.

With data parallel attention SGLang's tensor parallel group is both: the ranks of it that share a
request's attention are a tensor parallel group here, and each such group is a data parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_ext.settings.config import HierKVConfig

# Sends bytes to all ranks of a group and returns what each of them sent, in the
# order of ranks; entered by all of them, and blocking.
Exchange = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in its server.

    Attributes:
        tp_rank: number among the ranks that share the heads of a request's attention.
        tp_size: how many these are.
        dp_rank: which of the groups that serve requests of their own it is in.
        dp_size: how many these are.
        shares_steps: attention is data parallel: these groups run each forward together, as each
            has a share of the experts or MLPs.
        num_nodes: machines that the ranks are spread over, as many on each.
        pp_rank: number of its pipeline stage.
        pp_size: how many stages there are.
        cp_size: how many ranks of the tensor parallel group have the same heads; more than one
            with context parallelism only.
        cp_strategy: how these share a prefill, by SGLang's name; empty where each computes it.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    shares_steps: bool = False
    num_nodes: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_size: int = 1
    cp_strategy: str = ""

    @property
    def head_ranks(self) -> int:
        """In how many shares the heads are divided among the ranks of the group."""
        return self.tp_size // self.cp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of the server that have a DRAM of their own."""
        return self.tp_size * self.dp_size * self.pp_size

    @property
    def ranks_of_node(self) -> int:
        """Ranks of the server on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def beside(self) -> range:
        """Numbers of the ranks of its group that are on its node, itself among them.

        Of one stage. Groups lie on the nodes one behind the other, so a node may have a whole
        group, several, or a part of one.
        """
        first = self.dp_rank * self.tp_size
        start = (first + self.tp_rank) // self.ranks_of_node * self.ranks_of_node - first
        return range(max(0, start), min(self.tp_size, start + self.ranks_of_node))

    @property
    def name(self) -> str:
        """Name of the rank's files and folder."""
        stage = f"-pp{self.pp_rank}-of-{self.pp_size}" if self.pp_size > 1 else ""
        return f"dp{self.dp_rank}-tp{self.tp_rank}-of-{self.tp_size}{stage}"

    def config_of(self, config: HierKVConfig) -> HierKVConfig:
        """A rank's own settings: its share of the sizes, its folder, its event log.

        Sizes are those of a node. The settings of the only rank of a server are the server's.
        """
        if self.num_ranks == 1:
            return config
        log = Path(config.event_log)
        return replace(
            config,
            host_size=config.host_size / self.ranks_of_node,
            disk_size=config.disk_size / self.ranks_of_node,
            disk_dir=str(Path(config.disk_dir) / self.name) if config.disk_dir else "",
            event_log=str(log.with_name(f"{log.stem}-{self.name}{log.suffix}"))
            if config.event_log
            else "",
        )
