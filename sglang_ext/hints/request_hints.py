"""What a request says of its conversation, and by whose record it is believed.

Pure. Runs in SGLang's front process, which refuses what is no hint, and again in the scheduler,
which hands it to the placement policy when the request ends.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.identity.tenancy import Tenant
from sglang_ext.truncation.keyed_names import encode_parts

PARAM: Final = "hier_kv_hints"
MAX_RETURNS_IN_S: Final = 7 * 86_400.0
_NAMES = ("returns_in_s", "ends")


@dataclass(frozen=True)
class RequestHints:
    """What a request says.

    Attributes:
        returns_in_s: seconds from its end until its conversation comes back; None where it says
            that it does not.
    """

    returns_in_s: float | None


def hints_of(custom_params: Any) -> RequestHints | None:
    """The hints of a request; None where it gives none.

    Args:
        custom_params: the request's, from its sampling parameters.

    Raises:
        ValueError: what it gives are no hints.
    """
    given = custom_params.get(PARAM) if isinstance(custom_params, dict) else None
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"custom_params[{PARAM!r}] must be an object with {' or '.join(_NAMES)}, got "
            f"{_shown(given)}."
        )
    unknown = [str(name) for name in given if name not in _NAMES]
    if unknown:
        raise ValueError(
            f"custom_params[{PARAM!r}] may have {' or '.join(_NAMES)}, got {unknown[0][:80]!r}."
        )
    ends, returns_in_s = given.get("ends"), given.get("returns_in_s")
    if ends is not None and not isinstance(ends, bool):
        raise ValueError(
            f"custom_params[{PARAM!r}]['ends'] must be true or false, got {_shown(ends)}."
        )
    if returns_in_s is not None and not _is_time(returns_in_s):
        raise ValueError(
            f"custom_params[{PARAM!r}]['returns_in_s'] must be a number of seconds above 0 and up "
            f"to {MAX_RETURNS_IN_S:.0f}, got {_shown(returns_in_s)}."
        )
    if ends and returns_in_s is not None:
        raise ValueError(
            f"custom_params[{PARAM!r}] must have returns_in_s or ends, got both: a conversation "
            "that is over does not come back."
        )
    if returns_in_s is not None:
        return RequestHints(float(returns_in_s))
    return RequestHints(None) if ends else None


def owner_slot(secret: bytes, tenant: Tenant, num_slots: int) -> int:
    """Under which of a number of records the hints of a tenant are judged.

    There are few, so tenants may share one; the server's secret keeps a client from choosing whose.

    Args:
        secret: of the server.
        tenant: who says it.
        num_slots: of the records.
    """
    parts = encode_parts("hints", tenant.extra_key, tenant.salt)
    digest = hmac.new(secret, parts, hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little") % num_slots


def _shown(value: Any) -> str:
    """A value in a refusal; what may be long or deep is named by its type alone."""
    if isinstance(value, int) and not -(10**9) < value < 10**9:
        return "a larger number"  # Python writes none of over 4,300 digits
    if value is None or isinstance(value, str | int | float):
        return repr(str(value)[:80])
    return f"one of type {type(value).__name__}"


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_RETURNS_IN_S  # and so no NaN
