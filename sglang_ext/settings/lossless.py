"""What the settings say of codecs, for modes in which only those that lose nothing were tried."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.codec.base import Codec
from sglang_ext.codec.registry import codec_class, codec_ids
from sglang_ext.settings.config import CODED_TIERS, HierKVConfig


def any_codec(config: HierKVConfig) -> str:
    """A codec of the settings; "" where nothing is coded."""
    return _first(config, lambda codec: codec.codec_id != "none")


def lossy_codec(config: HierKVConfig, *, but: str = "") -> str:
    """A codec of the settings that does not give back every bit; "" where there is none.

    Args:
        config: the plugin's settings.
        but: id of one that is not looked for.
    """
    return _first(config, lambda codec: codec.lossy and codec.codec_id != but)


def lossy_or_calibrated_codec(config: HierKVConfig) -> str:
    """The same, or one of which a file beside the model may say how it codes each layer."""

    def is_either(codec: type[Codec]) -> bool:
        kind = codec.learned_kind()
        return codec.lossy or (kind is not None and kind.is_calibrated)

    return _first(config, is_either)


def _first(config: HierKVConfig, is_so: Callable[[type[Codec]], bool]) -> str:
    used = {config.of_tier("codec", tier) for tier in CODED_TIERS}
    found = [name for name in sorted(used) if name in codec_ids() and is_so(codec_class(name))]
    return found[0] if found else ""
