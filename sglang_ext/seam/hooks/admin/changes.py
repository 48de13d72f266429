"""What SGLang lets an operator change on a running server: `POST /set_internal_state`.

A value with which the start would have been refused is refused then, too, with a sentence. The
scheduler, which knows the model, says it in the id of its answer; `refused_changes.py` tells it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.admin.refused_changes import REFUSED
from sglang_ext.seam.hooks.hooking import hook
from sglang_ext.seam.model_kind import model_kind
from sglang_ext.settings.refusals import check_changes

logger = logging.getLogger(__name__)

_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state"


def register_change_hooks() -> None:
    """Registers the scheduler's hook; in a scheduler process, before the scheduler is built."""
    hook(f"{_CONTROLLER}.SchedulerInternalStateController.set_internal_state", around, "around")


def around(original: Any, self: Any, recv_req: Any) -> Any:
    """AROUND hook of the scheduler's side. All ranks get it in one step, and decide alike."""
    scheduler = self.scheduler
    if isinstance(scheduler.tree_cache, HierKVRadixCache):
        why_not = why_not_change(scheduler, recv_req.server_args)
        if why_not:
            from sglang.srt.managers.io_struct import SetInternalStateReqOutput

            logger.warning("hier-kv: POST /set_internal_state is refused: %s", why_not)
            return SetInternalStateReqOutput(updated=False, rid=REFUSED + why_not)
    return original(self, recv_req)


def why_not_change(scheduler: Any, changes: Mapping[str, Any]) -> str:
    """A sentence with which a change is refused; empty where SGLang may do it.

    Args:
        scheduler: SGLang's, with a cache of ours.
        changes: values of SGLang's arguments by name.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    at_start = partial(resolution_result, scheduler.server_args)
    try:
        check_changes(
            lambda name: changes[name] if name in changes else at_start(name),
            model_kind(scheduler.model_config),
            stores_images=scheduler.tree_cache.media.stores_images,
        )
    except HierKVConfigError as error:
        return str(error)
    return ""
