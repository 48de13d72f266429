"""Bytes that stand for several parts and for no others: what names and digests are made of."""

from __future__ import annotations

Part = bytes | str | int | None


def encode_parts(*parts: Part) -> bytes:
    """Parts, each with its kind and its length: no two lists of them give the same bytes.

    Args:
        parts: None differs from empty, and a text from its bytes.
    """
    out = [len(parts).to_bytes(4, "little")]
    for part in parts:
        kind, content = _content(part)
        out.append(kind + len(content).to_bytes(8, "little") + content)
    return b"".join(out)


def _content(part: Part) -> tuple[bytes, bytes]:
    if part is None:
        return b"\0", b""
    if isinstance(part, str):
        # JSON may bring half of a surrogate pair, which has no UTF-8.
        return b"\1", part.encode(errors="surrogatepass")
    if isinstance(part, int):
        return b"\2", part.to_bytes(8, "little", signed=True)
    return b"\3", part
