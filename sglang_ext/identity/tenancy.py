"""Whom a request belongs to, and the key under which SGLang's tree and page hashes keep its KV.

SGLang appends an adapter's id to the client's `extra_key` without a separator, so one client's key
can be another one's key and adapter. Here the two are kept apart: `tree_key` gives every pair of
client's key and adapter a key of its own, and none that the plugin gives out itself can be named by
a client. A request's salt is in no such key: it enters each page hash beside it
(`seam/page_hash.py`). The number of a tenant whose share is counted (`KeySpace.tenant_number`)
keeps nobody's KV apart.

Pure: no SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.identity.media import images_of

OWNER_PARAM = "hier_kv_owner"
MAX_OWNER_BYTES = 256
# Keys that begin so are the plugin's own; a client's is put behind `_OF_CLIENT`.
RESERVED = "hier-kv-"
OF_LINEAGE = RESERVED + "truncated:"
_OF_CLIENT = RESERVED + "client:"
_OF_ADAPTER = RESERVED + "adapter:"
_ALONE = RESERVED + "alone:"
_ATTRIBUTE = "_hier_kv_tenant"


@dataclass(frozen=True)
class Tenant:
    """Whom a request belongs to, in the client's own words.

    Attributes:
        extra_key: as the client sent it, without the adapter's id; None or not empty.
        salt: the client's `cache_salt`; None or not empty.
        owner: `custom_params["hier_kv_owner"]`, one of several inside a tenant; None for all.
        session: of SGLang, where the request names one.
    """

    extra_key: str | None = None
    salt: str | None = None
    owner: str | None = None
    session: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether anything tells it from all others. An adapter does not: many may use it."""
        return self.extra_key is not None or self.salt is not None


def tree_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """The `extra_key` that stands for a client's key and an adapter, and for no other pair.

    Args:
        extra_key: the client's; empty is none.
        lora_id: SGLang's id of the adapter; None for none.
    """
    if lora_id is not None:
        key = "-" if not extra_key else f"+{extra_key}"
        return f"{_OF_ADAPTER}{len(lora_id)}:{lora_id}{key}"
    if extra_key and extra_key.startswith(RESERVED):
        return _OF_CLIENT + extra_key
    return extra_key or None


def owner_of(custom_params: Any) -> str | None:
    """The owner that a request names inside its tenant; None where it names none.

    Args:
        custom_params: the request's, from its sampling parameters.

    Raises:
        ValueError: what it names is no owner.
    """
    owner = custom_params.get(OWNER_PARAM) if isinstance(custom_params, dict) else None
    if owner is None:
        return None
    if not isinstance(owner, str) or not 0 < len(owner.encode(errors="replace")) <= MAX_OWNER_BYTES:
        raise ValueError(
            f"custom_params[{OWNER_PARAM!r}] must be a text of 1 to {MAX_OWNER_BYTES} bytes, got "
            f"{str(owner)[:80]!r}."
        )
    return owner


def tenant_of(req: Any) -> Tenant | None:
    """The tenant noted of a request, or None; without one it shares nothing by content."""
    return getattr(req, _ATTRIBUTE, None)


def note_tenant(req: Any, message: Any) -> None:
    """Notes a new request's tenant, and gives it the key that stands for it.

    Args:
        req: SGLang's request, before anything was looked up for it.
        message: what it was made of: has the client's `extra_key`, `cache_salt`, `session_id` and
            `session_params`.
    """
    extra_key, salt = message.extra_key or None, message.cache_salt or None
    req.extra_key = tree_key(extra_key, req.lora_id)
    try:
        owner = owner_of(getattr(req.sampling_params, "custom_params", None))
    except ValueError:
        return  # the front process refuses it; one that came around that shares nothing
    named = getattr(message, "session_params", None)
    session = getattr(message, "session_id", None) or (named.id if named is not None else None)
    setattr(req, _ATTRIBUTE, Tenant(extra_key, salt, owner, session))


def has_nameable_pages(req: Any) -> bool:
    """Whether the names of a request's pages say all that its KV depends on.

    Of text they do; of images where these were proved (`identity.media`); of embeddings never.
    SGLang bars requests with override embeddings from its tree, and those whose load failed.
    """
    images = images_of(req)
    is_known = getattr(req, "multimodal_inputs", None) is None if images is None else bool(images)
    return (
        is_known
        and not getattr(req, "input_embeds", None)
        and not getattr(req, "skip_radix_cache_insert", False)
    )


def is_alone(req: Any) -> bool:
    """Whether a request was kept alone."""
    return str(req.extra_key or "").startswith(_ALONE)


def keep_alone(req: Any, number: int) -> None:
    """Gives a request a part of the tree of its own: nothing there is shared with any other.

    Args:
        req: the request.
        number: no earlier one had it, though it may have had the id: its pages may be there still.
    """
    req.extra_key = f"{_ALONE}{number}:{req.rid}"
