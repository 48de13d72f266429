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
MAX_S: Final = 7 * 86_400.0
MAX_PIN_S: Final = 86_400.0
_TIMES = {"returns_in_s": MAX_S, "ttl_s": MAX_S, "pin_s": MAX_PIN_S}
HINT_NAMES = (*_TIMES, "ends")


@dataclass(frozen=True)
class RequestHints:
    """What a request says; at least one thing.

    Attributes:
        returns_in_s: seconds from its end until its conversation comes back.
        ends: its conversation does not.
        ttl_s: seconds from its end after which its conversation does not.
        pin_s: seconds from its end for which its conversation is to stay.
    """

    returns_in_s: float | None = None
    ends: bool = False
    ttl_s: float | None = None
    pin_s: float | None = None


def hints_of(custom_params: Any) -> RequestHints | None:
    """The hints of a request; None where it gives none.

    Args:
        custom_params: the request's, from its sampling parameters.

    Raises:
        ValueError: what it gives are no hints.
    """
    given = custom_params.get(PARAM) if isinstance(custom_params, dict) else None
    return None if given is None else parse_hints(given, f"custom_params[{PARAM!r}]")


def parse_hints(given: Any, where: str) -> RequestHints | None:
    """Hints by their names; None where all are left out.

    Args:
        given: an object of them.
        where: it stands, for refusals.

    Raises:
        ValueError: what it gives are no hints.
    """
    names = f"{', '.join(HINT_NAMES[:-1])} or {HINT_NAMES[-1]}"
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object with {names}, got {_shown(given)}.")
    unknown = [str(name) for name in given if name not in HINT_NAMES]
    if unknown:
        raise ValueError(f"{where} may have {names}, got {unknown[0][:80]!r}.")
    ends = given.get("ends")
    if ends is not None and not isinstance(ends, bool):
        raise ValueError(f"{where}['ends'] must be true or false, got {_shown(ends)}.")
    times = {
        name: seconds for name in _TIMES if (seconds := _time_of(given, name, where)) is not None
    }
    if not ends and not times:
        return None
    hints = RequestHints(ends=bool(ends), **times)
    _check_sense(hints, where)
    return hints


def _time_of(given: dict[Any, Any], name: str, where: str) -> float | None:
    """A time in seconds that is given; None where none is.

    Raises:
        ValueError: what it gives is none.
    """
    seconds = given.get(name)
    if seconds is None:
        return None
    if not _is_time(seconds, _TIMES[name]):
        raise ValueError(
            f"{where}[{name!r}] must be a number of seconds above 0 and up to {_TIMES[name]:.0f}, "
            f"got {_shown(seconds)}."
        )
    return float(seconds)


def _check_sense(hints: RequestHints, where: str) -> None:
    """Refuses hints of which not all can be true.

    Raises:
        ValueError: there are such.
    """
    others = [name for name in _TIMES if getattr(hints, name) is not None]
    if hints.ends and others:
        other = others[0]
        raise ValueError(
            f"{where} must have {other} or ends, got both: a conversation that is over does not "
            "come back."
        )
    for name in others:
        if hints.ttl_s is not None and hints.ttl_s < (seconds := getattr(hints, name)):
            raise ValueError(
                f"{where}['ttl_s'] must be no less than {name}, got {hints.ttl_s:g} and "
                f"{seconds:g}: until then the conversation is to live."
            )


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
        return "a number of ten or more digits"  # Python writes none of over 4,300
    if value is None or isinstance(value, str | int | float):
        return repr(str(value)[:80])
    return f"one of type {type(value).__name__}"


def _is_time(value: Any, most_s: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= most_s  # and so no NaN
