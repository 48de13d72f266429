"""Does with the stored pages of a prompt what the admin endpoint was asked for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.hints.handing import hand_on
from sglang_ext.hints.request_hints import RequestHints
from sglang_ext.hints.steering_request import Steering, from_text
from sglang_ext.identity.tenancy import Tenant, tree_key
from sglang_ext.seam.page_hash import hashes_of, whole_pages_key
from sglang_ext.tiers.records.quality import ANY

if TYPE_CHECKING:
    from sglang_ext.seam.cache import HierKVRadixCache
    from sglang_ext.tiers.store import KeySpace
    from sglang_ext.tiers.store.types import Hashes


def steer(cache: HierKVRadixCache, text: str) -> dict[str, Any]:
    """Does it, and says where the pages lay before. Scheduler thread; waits for nothing.

    Each rank does it with its own pages and by itself: no promise rests on it.

    Args:
        cache: whose pages.
        text: from `hints.steering_request.to_text`.
    """
    steering, token_ids = from_text(text)
    space = cache.identity.space_now(cache.store)
    if space is None:
        return {"error": "the weights are changing, or changed without a flush; try again later."}
    tenant = Tenant(extra_key=steering.extra_key, salt=steering.cache_salt)
    space = cache.of_tenant(space, tenant)
    page_size = cache.page_size
    key = whole_pages_key(
        array("q", token_ids),
        tree_key(steering.extra_key, None),
        steering.cache_salt,
        page_size,
        of_pairs=bool(cache.tree_core.is_eagle),
    )
    num_pages = len(key) // page_size
    if not num_pages:
        return {"pages": 0}
    hashes = hashes_of(key, page_size)
    found = cache.store.locate_prefix(space, hashes)
    done = _do(cache, steering, tenant, space, cache.resumable(space, hashes))
    has_remote = cache.store.remote_stats() is not None
    if done.get("prefetching") and has_remote and found.here < num_pages:
        done["asking_remote"] = True  # it is not waited for: what it has is not known yet
    return {"pages": num_pages, "host": found.host, "disk": found.disk, **done}


def _do(
    cache: HierKVRadixCache, steering: Steering, tenant: Tenant, space: KeySpace, hashes: Hashes
) -> dict[str, Any]:
    lookahead, hints, done = cache.store.lookahead, steering.hints, dict[str, Any]()

    def say(what: RequestHints | None) -> None:
        if lookahead is not None and what is not None:
            hand_on(lookahead, space, hashes, cache.hint_owner(tenant), what, by_operator=True)

    if lookahead is not None and steering.unpin:
        done["unpinned"] = lookahead.unpin(space, hashes)
    if steering.prefetch:
        done["prefetching"] = _prefetch(cache, space, hashes, lambda: say(hints))
    if not done.get("prefetching"):
        say(hints)
    elif hints is not None:
        # Bringing pages ends what was said of them, so that is said when they are there, and those
        # that come from afar are pinned then. What is here is pinned at once, too.
        say(RequestHints(pin_s=hints.pin_s))
    if lookahead is not None and steering.demote:
        done["demoted"] = lookahead.demote(space, hashes)
    return done


def _prefetch(
    cache: HierKVRadixCache, space: KeySpace, hashes: Hashes, then: Callable[[], None]
) -> bool:
    return cache.waiting_room.prefetch(ReusablePrefix(space, hashes, 0, max_quality=ANY), then)
