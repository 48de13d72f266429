"""Where SGLang keeps what it compiles: it makes that folder when it is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from sglang_ext.tiers.access import shown

# SGLang's: of all that it compiles, and torch's, which it puts into the former.
_SGLANGS, _TORCHS = "SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
_DEFAULT = "~/.cache/sglang"


def cache_problem() -> str:
    """Why SGLang ends with a traceback at its import, in a sentence; "" where it does not.

    As for a container's user without a home. Makes nothing.
    """
    base = os.path.expanduser(os.environ.get(_SGLANGS) or _DEFAULT)
    folder = Path(os.path.abspath(os.environ.get(_TORCHS) or os.path.join(base, "inductor")))
    if find_spec("sglang") is None:
        return ""
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    home = os.environ.get("HOME")
    return (
        f"SGLang keeps what it compiles in {shown(folder)}, which this user cannot make (HOME is "
        f"{'not set' if home is None else shown(home)}), and ends with a traceback when it is "
        f"imported; set HOME, or {_SGLANGS}, to a folder that this user may write to."
    )
