"""Shares of the tiers that tenants have by right: how the flag is written, and whose are whose.

`cache_salt:acme=0.3,extra_key:web=0.2`: requests with the salt `acme` have 30 % of each tier, those
with the key `web` and another salt, or none, 20 %, and all others together the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.values import shown

MAX_TENANTS: Final = 15  # as in `tiers/policy/config.py`, which takes long to import
_FIELDS = ("cache_salt", "extra_key")
_FLAG = "--hier-kv-quotas"
_EXAMPLE = "cache_salt:acme=0.3,extra_key:web=0.2"


@dataclass(frozen=True)
class Quotas:
    """Who has which share.

    Attributes:
        shares: of each tier, in the order of the flag.
        numbers: number of each tenant, from 1 on, by what of a request names it.
    """

    shares: tuple[float, ...] = ()
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def tenant_of(self, cache_salt: str | None, extra_key: str | None) -> int:
        """Number of the tenant whose share a request counts towards; 0: that of all others."""
        number = self.numbers.get(("cache_salt", cache_salt or ""), 0)
        return number or self.numbers.get(("extra_key", extra_key or ""), 0)


def parse_quotas(text: str) -> Quotas:
    """The shares that a flag's text gives.

    Raises:
        HierKVConfigError: it gives none.
    """
    shares: list[float] = []
    numbers: dict[tuple[str, str], int] = {}
    for part in text.split(",") if text else ():
        named, equals, share = part.strip().rpartition("=")
        kind, colon, name = named.partition(":")
        key = kind, unquote(name)
        if not equals or not colon or kind not in _FIELDS or not name:
            raise HierKVConfigError(
                f"{_FLAG} must be a list such as {_EXAMPLE}, got {shown(part)} in it; name each "
                "tenant by cache_salt: or extra_key:, with %2C, %3D and %25 for a comma, = and %."
            )
        if key in numbers:
            raise HierKVConfigError(
                f"{_FLAG} must have each tenant once, got {shown(named)} twice; leave one out."
            )
        shares.append(_share(share, named))
        numbers[key] = len(shares)
    if len(shares) > MAX_TENANTS:
        raise HierKVConfigError(
            f"{_FLAG} may have {MAX_TENANTS} tenants, got {len(shares)}; leave the smallest to the "
            "share that all others have together."
        )
    if sum(shares) > 1 + 1e-9:
        raise HierKVConfigError(
            f"{_FLAG} must have shares of at most 1 together, got {sum(shares):g}; give smaller "
            "ones."
        )
    return Quotas(tuple(shares), numbers)


def _share(text: str, name: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:  # and so no NaN
        raise HierKVConfigError(
            f"{_FLAG} must have shares above 0 and up to 1, got {shown(text)} for {shown(name)}; "
            "give one such as 0.3."
        )
    return share
