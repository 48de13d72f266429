"""When a value goes by what is known of it: the one rule for every store that we decide in.

What was used goes last, and what is over goes first: a conversation that is said to be over, by
somebody whose word came true before, or one that was cut and has gone on without these pages.
Return times that were learned decide nothing here: a server sees a part of the uses only.

Nothing here trusts a store's other writers. They can make a value leave, which is a miss; no time
that they write makes one stay without being used.
"""

from __future__ import annotations

_OVER_AGE_S = 86_400.0
_OVER_LIFE_S = 3_600.0
_CLOCK_SLACK_S = 3_600.0


def over_age_s(ttl_s: float) -> float:
    """For how long a value that is over counts as unused, where the longest unused ones go first.

    Within the life that all have: it goes when room is needed, and is not lost at once.

    Args:
        ttl_s: life of a value after its last use; 0 for no end.
    """
    return min(_OVER_AGE_S, ttl_s / 2) if ttl_s else _OVER_AGE_S


def over_life_s(ttl_s: float) -> float:
    """How long a value that is over still stays where each has a life; a use renews it.

    Shorter than that life: else a short one would begin anew, as if the value had been used.

    Args:
        ttl_s: life of a value after its last use, above 0.
    """
    return min(_OVER_LIFE_S, ttl_s / 2)


def last_use_s(written_s: float, now_s: float) -> float:
    """When a value counts as used last, by a time that anybody may have written.

    A time of the future is a wrong clock's, or was set to outlive everything: it counts as none.

    Args:
        written_s: what is written.
        now_s: the time.
    """
    return min(written_s, now_s) if written_s <= now_s + _CLOCK_SLACK_S else 0.0
