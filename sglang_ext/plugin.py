"""Entry point of the plugin: SGLang calls ``load`` in each of its processes.

SGLang logs and swallows an exception raised here, so this module does as little as it can; what
may fail runs later, from hooks, where an error ends the start with a sentence.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LEAVING_S = 10.0  # how long the server before this one may still have its folder


def load() -> None:
    """Registers the flags and, where this process runs a scheduler, the cache and its hooks."""
    from sglang_ext.seam.start.front import hook_arguments, runs_scheduler

    hook_arguments(attach)
    if runs_scheduler():
        from sglang_ext.assembly.early_checks import check_before_weights
        from sglang_ext.assembly.factory import build_cache
        from sglang_ext.seam.hooks.scheduler import register_scheduler_hooks

        register_scheduler_hooks(build_cache, check_before_weights)


def attach(server_args: Any, config: Any) -> None:
    """Turns the plugin on for a set of server arguments, after refusing what cannot work.

    Args:
        server_args: SGLang's ``ServerArgs``, not yet resolved. The settings ride on an underscore
            attribute, which SGLang pickles to its other processes.
        config: a ``HierKVConfig``.

    Raises:
        HierKVConfigError: the set-up is refused.
    """
    from sglang_ext.assembly.preflight import (
        check_free,
        check_machine,
        others_problem,
        room_problem,
    )
    from sglang_ext.seam.contract.verdict import check_contract
    from sglang_ext.seam.hooks.hooking import check_hooks
    from sglang_ext.seam.start.front import hook_tokenizer_manager
    from sglang_ext.settings.refusals import DEFAULT_PAGE_SIZE, check_arguments
    from sglang_ext.truncation.secret import lineage_secret, secret_problem

    check_contract()
    check_hooks()
    check_arguments(server_args, config)
    check_machine(config)
    if config.disk_dir:
        if (getattr(server_args, "nnodes", 1) or 1) == 1:  # or the other node has it by right
            check_free(config.disk_dir, _LEAVING_S)
        problems = [room_problem(config), others_problem(Path(config.disk_dir))]
        if config.truncation != "off":
            problems.append(secret_problem(config.disk_dir))
        for problem in problems:
            if problem:
                logger.warning("hier-kv: %s", problem)
    server_args._hier_kv = config.to_dict()
    server_args._hier_kv_secret = lineage_secret(config.disk_dir)
    server_args._hier_kv_server = secrets.token_hex(16)  # for its ranks to know each other by
    server_args.radix_cache_backend = "hier_kv"
    server_args.enable_cache_report = True  # OpenAI's clients: `prompt_tokens_details`
    if server_args.page_size is None:
        server_args.page_size = DEFAULT_PAGE_SIZE
    hook_tokenizer_manager()
