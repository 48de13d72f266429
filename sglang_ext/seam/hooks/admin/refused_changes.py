"""Tells whoever calls `POST /set_internal_state` why a scheduler changed nothing.

SGLang's own answer is that it did not. Imports no SGLang, as it runs in the front process.
"""

from __future__ import annotations

from typing import Any

# An answer of a scheduler with such an id says why.
REFUSED = "hier-kv-refused:"
_BAD = 400


async def around_asking(original: Any, self: Any, obj: Any) -> list[bool]:
    """AROUND hook of `TokenizerControlMixin.set_internal_state`, a coroutine.

    It asks all schedulers as SGLang does.

    Raises:
        HTTPException: a scheduler refused it.
    """
    from fastapi import HTTPException

    self.auto_create_handle_loop()
    answers = await self.set_internal_state_communicator(obj)
    for answer in answers:
        if not answer.updated and (answer.rid or "").startswith(REFUSED):
            raise HTTPException(_BAD, answer.rid.removeprefix(REFUSED))
    return [bool(answer.updated) for answer in answers]
