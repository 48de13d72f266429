"""This process among the ranks that SGLang started."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_ext.ranks.rank import RankPlace
from sglang_ext.settings.arguments import on_all_nodes
from sglang_ext.settings.refusals import check_ranks


def rank_place(ctx: Any) -> RankPlace:
    """This process's place among the server's ranks.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.

    Raises:
        HierKVConfigError: ranks that work together in a way that is not served.
    """
    return _place(ctx.tp_rank, ctx.tp_size)


def place_of_ranks() -> RankPlace:
    """The same before SGLang builds a tree."""
    from sglang.srt.runtime_context import get_parallel

    return _place(get_parallel().tp_rank, get_parallel().tp_size)


def _place(tp_rank: int, tp_size: int) -> RankPlace:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    has_parts = parallel.attn_cp_size not in (1, tp_size)  # of the ranks some have other heads
    check_ranks(
        {
            "context parallelism of some of the ranks": parallel.attn_cp_size if has_parts else 1,
            "decode context parallelism": parallel.attn_dcp_size,
        }
    )
    if parallel.attn_dp_size > 1:
        of_group = parallel.attn_tp_rank, parallel.attn_tp_size
        groups = parallel.attn_dp_rank, parallel.attn_dp_size
        return RankPlace(*of_group, *groups, True, num_nodes=parallel.nnodes)
    return RankPlace(
        tp_rank,
        tp_size,
        parallel.dp_rank or 0,
        parallel.dp_size,
        num_nodes=parallel.nnodes,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        cp_size=parallel.attn_cp_size,
        cp_strategy=parallel.cp_strategy if parallel.enable_prefill_cp else "",
    )


def node_rank() -> int:
    """Number of the node that this process runs on."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().node_rank)


def arguments_of_nodes(server_args: Any) -> dict[str, Any]:
    """What SGLang decided of the arguments that must be the same on every node, by flag.

    Not what was given: older names of a flag (`--dp-size` with `--enable-dp-attention`) and what
    SGLang chooses for a machine are told by what it made of them.

    Args:
        server_args: a resolved record.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    return on_all_nodes(partial(resolution_result, server_args))


def group_of_nodes(ctx: Any, place: RankPlace) -> Any:
    """The process group, on CPUs, of all ranks on all nodes.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
        place: of this process.
    """
    from sglang.srt.distributed.parallel_state import get_world_group

    ranks = ctx.tp_group if place.pp_size == 1 else get_world_group()
    return ranks.cpu_group
