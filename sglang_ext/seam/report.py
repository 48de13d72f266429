"""Per-request report: how many prompt tokens were reused from which tier.

SGLang's message to its front process types ``cached_tokens_details`` as a flat dict of numbers and
strings, so the nested ``hier_kv`` object crosses as JSON text and is unpacked on the other side.
"""

from __future__ import annotations

import json
from typing import Any

DETAILS_KEY = "hier_kv"


def pack_details(details: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any]:
    """Adds the plugin's report to SGLang's own; in the scheduler process.

    Args:
        details: SGLang's.
        report: reused tokens by tier, and `quality`, `exact` or `lossy`: the worst of them, when
            any was not exact or the request asked for exact ones only.
    """
    packed: dict[str, Any] = dict(details) if details is not None else {"device": 0, "host": 0}
    packed[DETAILS_KEY] = json.dumps(report)
    return packed


def unpack_details(self: Any, recv_obj: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of ``TokenizerManager._handle_batch_output``: JSON text -> dict, in place."""
    for details in getattr(recv_obj, "cached_tokens_details", None) or ():
        if details and isinstance(details.get(DETAILS_KEY), str):
            details[DETAILS_KEY] = json.loads(details[DETAILS_KEY])
