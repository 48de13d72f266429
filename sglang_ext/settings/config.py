"""The plugin's settings: every knob once, with its unit, default, bounds and help text.

This module imports neither torch nor sglang, and numba only for a base order other than lru.
``flags.py`` turns the fields into command line options; the parsed settings travel to SGLang's
other processes as a plain dict.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_ext.codec.registry import codec_ids
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.quotas import parse_quotas
from sglang_ext.settings.values import check_path, coerce, flag_name, shown, values_in_json

# A greater value is taken for a typing error; arithmetic and system calls would fail with it.
_MAX_GB = 1e9
_MAX_MS = 86_400_000.0
_MAX_TOKENS = (1 << 31) - 1
_MAX_PIN_SHARE = 0.5  # other conversations keep at least the rest
_MIN_HOST_BYTES = 64 << 10
_MIN_SEGMENT_BYTES = 4096
CODED_TIERS = ("host", "disk", "remote")
PREFETCH_POLICIES = ("cost", "best_effort", "wait_complete", "timeout")
# With less a cut drops nothing, or so little that a long prompt passes thousands of places.
TRUNCATION_RATIOS = (0.01, 0.99)
GIB = 1 << 30


def _knob(default: Any, help_text: str, *, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    return field(
        default=default, metadata={"help": help_text, "choices": choices, "metavar": metavar}
    )


@dataclass(frozen=True)
class HierKVConfig:
    """Settings of one server. Field ``x_y`` is the flag ``--hier-kv-x-y``.

    Raises:
        HierKVConfigError: from ``validate`` when a value is out of its bounds.
    """

    host_size: float = _knob(
        4.0,
        "DRAM for KV pages, in GiB (2^30 bytes; decimals allowed). It is allocated once, at start. "
        "Of each node: the ranks on it get equal shares; with MLA the first of a tensor parallel "
        "group gets those of all, for all (docs/parallel.md).",
        metavar="GIB",
    )
    disk_dir: str = _knob(
        "",
        "Folder on a local SSD for pages that leave DRAM. Empty: no disk tier. One server at a "
        "time; pages of several models may lie in it side by side. Each of several ranks that "
        "keep pages has a folder of its own in it.",
        metavar="DIR",
    )
    disk_size: float = _knob(
        64.0,
        "Upper bound for all files in a node's disk folder, in GiB; its ranks get shares as of "
        "--hier-kv-host-size.",
        metavar="GIB",
    )
    disk_free_floor: float = _knob(
        1.0,
        "Free space, in GiB, that is always left on the file system of the disk folder.",
        metavar="GIB",
    )
    disk_segment_size: float = _knob(
        0.25, "Size of one segment file in the disk folder, in GiB.", metavar="GIB"
    )
    disk_io: str = _knob(
        "auto",
        "direct bypasses the page cache (O_DIRECT), buffered does not, auto probes the folder.",
        choices=("auto", "direct", "buffered"),
    )
    disk_fsync: str = _knob(
        "none",
        "When segment files are synced: never (a page survives the server's death but perhaps not "
        "the machine's), when a segment is sealed, or after every write.",
        choices=("none", "seal", "always"),
    )
    remote_url: str = _knob(
        "",
        "Store that several servers share: redis://, rediss://, mooncake:// or file:// "
        "(docs/remote.md), without a password in it. Pages go there in the background and are "
        "looked up when a request enters the queue. Empty: none.",
        metavar="URL",
    )
    key_file: str = _knob(
        "",
        "File with the deployment's key, from `hier-kv keygen FILE`, readable by its owner alone. "
        "With it nothing is read from disk or from the remote store that was not written with the "
        "key (docs/security.md). The first of several keys, one a line, writes; all read. Empty: "
        "checksums only, which stop nobody who can write there.",
        metavar="FILE",
    )
    protect: str = _knob(
        "tag",
        "What the key of --hier-kv-key-file does to pages on disk and in the remote store: tag "
        "proves who wrote them, encrypt also hides them, their hashes and their names.",
        choices=("tag", "encrypt"),
    )
    remote_policy: str = _knob(
        "all",
        "Which pages go to the remote store: all that are saved, those that a request reused from "
        "DRAM (second_hit), or those that are about to leave DRAM (on_eviction).",
        choices=("all", "second_hit", "on_eviction"),
    )
    codec: str = _knob(
        "none",
        "How pages are coded on disk: none, zstd and lossless (bit-exact), hier (lossy, for its "
        "quality the smallest), cachegen-paper and cachegen-released (lossy, for comparison). "
        "host=CODEC also keeps pages coded in a part of DRAM, where many more have room; with a "
        "disk both are coded alike (host=hier,disk=hier). remote=CODEC codes pages for the remote "
        "store; servers that share one should have the same codec and level there.",
        metavar="CODEC",
    )
    level: str = _knob(
        "",
        "Quality level of the codec, by number (0 is the coarsest) or name; TIER=LEVEL as for the "
        "codec. In a remote store `hier` keeps all levels up to this one. Empty: the codec's "
        "default.",
        metavar="LEVEL",
    )
    slo_ms: float = _knob(
        0.0,
        "Time to the first token, in milliseconds, that a request with coded pages in the remote "
        "store should have. Its pages are fetched at the best quality that arrives by then, or "
        "computed where that is done by then. 0: pages come as soon as possible, at the level of "
        "--hier-kv-level.",
        metavar="MS",
    )
    host_coded_share: float = _knob(
        0.5,
        "Share of --hier-kv-host-size that holds coded pages, with --hier-kv-codec host=CODEC.",
        metavar="SHARE",
    )
    coding: str = _knob(
        "always",
        "When pages are coded on disk: always, or cost: not while the disk has room and reading "
        "more bytes takes less time than decoding, at the speeds measured so far.",
        choices=("always", "cost"),
    )
    profile: str = _knob(
        "",
        "File with what the codec knows of the model, from `hier-kv calibrate`. Empty: "
        "hier-kv.hkp in the model's folder, or the user's cache folder; without one it is learned "
        "from the first pages.",
        metavar="FILE",
    )
    rope: str = _knob(
        "pre",
        "pre stores K before rotary embedding, bit-exact at its own position and valid at any; "
        "delta stores K as the engine had it and rotates by the difference when it moves.",
        choices=("pre", "delta"),
    )
    write_policy: str = _knob(
        "auto",  # the store's DEFAULT_POLICY
        "Which saved pages are written to disk, in the background. write_through writes all of "
        "them. selective writes those that were hit once. write_back writes a page that is about "
        "to leave DRAM, if it is worth more than the pages that it displaces; a page that comes "
        "back to DRAM is the first to give up its place on disk, while few pages have to be "
        "written again for that. auto is write_through until the disk is full and write_back from "
        "then on; where the disk is over 16 times DRAM, it stays write_through.",
        choices=("write_through", "selective", "write_back", "auto"),
    )
    prefetch_policy: str = _knob(
        "cost",
        "What a request does about its pages on disk or in the remote store: cost loads them, "
        "loads a leading part or "
        "recomputes, whichever is expected to be done first at the speeds measured so far, and "
        "waits no longer than its pages save (while others decode or wait, a prefill's time counts "
        "twice in both); it also computes pages in DRAM where copying them to "
        "the device is clearly slower; best_effort loads and never waits; wait_complete "
        "waits for all; timeout waits up to --hier-kv-prefetch-timeout-ms.",
        choices=PREFETCH_POLICIES,
    )
    prefetch_timeout_ms: float = _knob(
        2000.0,
        "Longest wait of one request for its pages on disk or in the remote store, in "
        "milliseconds, under timeout; under cost, until the first prefill was measured, and with "
        "pipeline stages, window layers in a pool of their own or states, which cost does not "
        "judge.",
        metavar="MS",
    )
    truncation: str = _knob(
        "off",
        "off: SGLang refuses a prompt over the context length. overflow: such a prompt keeps its "
        "head and drops the oldest of the rest, what is kept keeps its KV, and the answer says how "
        "many tokens were dropped. match: a prompt that fits and begins and goes on like a stored "
        "conversation reuses the KV of both (an approximation), inside one salt and extra_key "
        "only. all: both. A request may choose less than this with "
        '`custom_params: {"hier_kv_truncation": ...}`, never more.',
        choices=("off", "overflow", "match", "all"),
    )
    truncation_ratio: float = _knob(
        0.5,
        "Share of the context behind the head that is dropped from a prompt over the context "
        "length. The cut is made at the message boundary nearest to that.",
        metavar="SHARE",
    )
    truncation_head: int = _knob(
        4,
        "Tokens at the beginning of a prompt that are never dropped, even without a system prompt, "
        "which is kept in any case.",
        metavar="N",
    )
    truncation_longest: int = _knob(
        8,
        "Most contexts that a prompt may be long to be cut; a longer one is answered with 400 "
        "before more is done with it.",
        metavar="CONTEXTS",
    )
    lookahead: str = _knob(
        "on",
        "on: the waiting queue decides what is fetched from disk first and what leaves DRAM last. "
        "off: pages are fetched when their request enters the queue, as far as DRAM has room then, "
        "and when its turn comes; the least recent ones leave DRAM and disk.",
        choices=("on", "off"),
    )
    base_order: str = _knob(
        "lru",
        "Which of the pages that nobody waits for leave DRAM and disk first: those used longest "
        "ago (lru), those saved longest ago (fifo), those used last (tail_of_queue), or by an "
        "order that an installed package brings (entry point hier_kv.base_orders). Learned return "
        "times decide instead where they do better.",
        metavar="ORDER",
    )
    pin_share: float = _knob(
        0.05,
        "Clients may pin at most this share of the pages that DRAM and disk have room for together "
        "(docs/hints.md). In each of the two, pinned pages leave after all others that nobody "
        "waits for, while they are at most this share of the pages there. 0: pins do nothing.",
        metavar="SHARE",
    )
    quotas: str = _knob(
        "",
        "Shares of DRAM, disk and remote store that tenants have by right, such as "
        "cache_salt:acme=0.3,extra_key:web=0.2; all others have the rest together. A tenant may "
        "have more while there is room; where there is none, pages of those above their share "
        "leave first (docs/quotas.md). @FILE reads one tenant from each line of a file: ps and "
        "/server_info show command lines, and who knows a salt is served as its tenant. Empty: all "
        "are equal.",
        metavar="TENANT=SHARE,...",
    )
    tree_core: str = _knob(
        "python",
        "SGLang's radix tree implementation to run on.",
        choices=("python", "rust"),
    )
    kernels: str = _knob(
        "auto",
        "Engine for the copy with rotation: triton on GPUs, numba on CPUs; auto chooses.",
        choices=("auto", "numba", "triton"),
    )
    kv_events_disk: str = _knob(
        "disk",
        "The medium that KV events name for pages on disk: disk names DISK; host names CPU_PINNED, "
        "as for pages in DRAM. host is for routers, such as SGLang's gateway, that do not send "
        "requests to a server for pages that it has on disk only (docs/routers.md).",
        choices=("disk", "host"),
    )
    event_log: str = _knob(
        "",
        "File to which every saved, written, promoted, dropped and rejected page is logged, one "
        "JSON object a line. For tests and audits; empty: off. At 512 MB it becomes FILE.1 and a "
        "new one begins; nobody waits for it. What cannot be written, or waits behind 16 MB, is "
        "counted (event_log_dropped_lines).",
        metavar="FILE",
    )

    def validate(self) -> None:
        """Checks every bound that needs neither the model nor the file system."""
        self._validate_texts_and_numbers()
        self._validate_sizes()
        self._validate_truncation()
        self._validate_eviction()
        self._validate_key()
        self._validate_range()
        self._validate_base_order()
        self._validate_codec()
        self._validate_remote_codec()
        self._validate_choices()

    def _validate_texts_and_numbers(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise HierKVConfigError(
                    f"{flag_name(item.name)} must be a finite number, got {value:g}; give a number "
                    "or leave the flag out."
                )
            if isinstance(value, str) and not value.isprintable():
                raise HierKVConfigError(
                    f"{flag_name(item.name)} must be printable text on one line, and has other "
                    "characters in it; take them out."
                )
            if item.metadata["metavar"] in ("DIR", "FILE"):
                check_path(item.name, value)

    def _validate_sizes(self) -> None:
        for name in ("host_size", "disk_segment_size", "prefetch_timeout_ms"):
            if not getattr(self, name) > 0:
                raise HierKVConfigError(
                    f"{flag_name(name)} must be greater than 0, got {getattr(self, name):g}; "
                    "give it a positive value or leave the flag out."
                )
        if self.disk_free_floor < 0:
            raise HierKVConfigError(
                f"--hier-kv-disk-free-floor must be 0 or more, got {self.disk_free_floor:g}."
            )
        if self.disk_dir and not self.disk_size > 0:
            raise HierKVConfigError(
                f"--hier-kv-disk-size must be greater than 0 when --hier-kv-disk-dir is set, got "
                f"{self.disk_size:g}; give a size in GiB or leave --hier-kv-disk-dir out."
            )

        if not self.disk_dir and self.disk_size not in (0, HierKVConfig.disk_size):
            raise HierKVConfigError(
                f"--hier-kv-disk-size {self.disk_size:g} has no effect without --hier-kv-disk-dir; "
                "add the folder or leave the size out."
            )

    def _validate_truncation(self) -> None:
        least, most = TRUNCATION_RATIOS
        if not least <= self.truncation_ratio <= most:
            raise HierKVConfigError(
                f"--hier-kv-truncation-ratio must lie between {least:g} and {most:g}, got "
                f"{self.truncation_ratio:g}; give a share such as 0.5."
            )
        if self.truncation_head < 0:
            raise HierKVConfigError(
                f"--hier-kv-truncation-head must be 0 or more, got {self.truncation_head}."
            )
        if self.truncation_longest < 1:
            raise HierKVConfigError(
                "--hier-kv-truncation-longest must be 1 or more contexts, got "
                f"{self.truncation_longest}; leave it out for 8."
            )

    def _validate_eviction(self) -> None:
        """Refuses what is said of pages that leave, where that says nothing."""
        if self.remote_policy != "all" and not self.remote_url:
            raise HierKVConfigError(
                "--hier-kv-remote-policy has no effect without --hier-kv-remote-url; add it or "
                "leave the policy out."
            )
        if not 0 <= self.pin_share <= _MAX_PIN_SHARE:
            raise HierKVConfigError(
                f"--hier-kv-pin-share must be between 0 and {_MAX_PIN_SHARE:g}, got "
                f"{self.pin_share:g}; give a share such as 0.05."
            )
        if parse_quotas(self.quotas).shares and self.lookahead == "off":
            raise HierKVConfigError(
                "--hier-kv-quotas needs --hier-kv-lookahead on: without it the least recent pages "
                "leave, whose ever they are; leave one of the two out."
            )

    def _validate_choices(self) -> None:
        for item in fields(self):
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in choices:
                raise HierKVConfigError(
                    f"{flag_name(item.name)} must be one of {', '.join(choices)}, got "
                    f"{shown(getattr(self, item.name))}."
                )

    def _validate_key(self) -> None:
        if self.protect != "tag" and not self.key_file:
            raise HierKVConfigError(
                "--hier-kv-protect needs a key; add --hier-kv-key-file or leave it out."
            )
        if self.key_file and not self.disk_dir and not self.remote_url:
            raise HierKVConfigError(
                "--hier-kv-key-file has no effect without --hier-kv-disk-dir or "
                "--hier-kv-remote-url; add one of them or leave it out."
            )

    def _validate_range(self) -> None:
        """Refuses what is far too much, or too little to hold anything."""
        sizes = ("host_size", "disk_size", "disk_free_floor", "disk_segment_size")
        most = dict.fromkeys(sizes, _MAX_GB) | {
            "prefetch_timeout_ms": _MAX_MS,
            "slo_ms": _MAX_MS,
            "truncation_head": _MAX_TOKENS,
        }
        for name, limit in most.items():
            if getattr(self, name) > limit:
                # Bytes, or MiB, are the mistake that is made with sizes.
                unit = " GiB" if name in sizes else ""
                raise HierKVConfigError(
                    f"{flag_name(name)} must be at most {limit:,.0f}{unit}, got "
                    f"{shown(getattr(self, name))}; give a smaller value"
                    f"{', in GiB (2^30 bytes)' if unit else ''}."
                )
        least = {"host_size": _MIN_HOST_BYTES, "disk_segment_size": _MIN_SEGMENT_BYTES}
        for name, num_bytes in least.items():
            if getattr(self, name) * GIB < num_bytes:
                raise HierKVConfigError(
                    f"{flag_name(name)} must be at least {num_bytes} bytes, got "
                    f"{getattr(self, name):g} GiB; give a greater value."
                )

    def _validate_base_order(self) -> None:
        if self.base_order == "lru":
            return
        # Not imported above: this imports numba, which takes long, and all processes of SGLang
        # import this module.
        from sglang_ext.tiers.policy import order_ids

        if self.base_order not in order_ids():
            raise HierKVConfigError(
                f"--hier-kv-base-order must be one of {', '.join(order_ids())}, got "
                f"{shown(self.base_order)}; give one of them or leave the flag out."
            )
        if self.lookahead == "off":
            raise HierKVConfigError(
                f"--hier-kv-base-order {self.base_order} needs --hier-kv-lookahead on: without it "
                "the least recent pages leave; leave one of the two out."
            )

    def _validate_codec(self) -> None:
        disk, host = (self.of_tier("codec", tier) for tier in ("disk", "host"))
        for codec in (disk, host):
            if codec not in codec_ids():
                raise HierKVConfigError(
                    f"--hier-kv-codec must be one of {', '.join(codec_ids())}, got {shown(codec)}."
                )
        if disk != "none" and not self.disk_dir:
            raise HierKVConfigError(
                f"--hier-kv-codec {disk} codes pages on disk and there is no disk tier; add "
                "--hier-kv-disk-dir, or host= for DRAM, or leave it out."
            )
        if host != "none" and self.disk_dir:
            levels = [self.of_tier("level", tier) for tier in ("disk", "host")]
            if host != disk or levels[0] != levels[1]:
                raise HierKVConfigError(
                    f"--hier-kv-codec codes a page once for DRAM and disk, got host={host} and "
                    f"disk={disk}; give both the same codec and level, or leave host= out."
                )
        if not 0 < self.host_coded_share < 1:
            raise HierKVConfigError(
                "--hier-kv-host-coded-share must be more than 0 and less than 1, got "
                f"{self.host_coded_share:g}; give a share such as 0.5."
            )
        uses_codec = self.record_codec != "none"
        if not uses_codec and self.coding == "always":
            uses_codec = self.of_tier("codec", "remote") != "none"
        if not uses_codec and (self.profile or self.level or self.coding != "always"):
            raise HierKVConfigError(
                "--hier-kv-level, --hier-kv-profile and --hier-kv-coding need a codec; add "
                "--hier-kv-codec or leave them out."
            )
        for tier in CODED_TIERS if "=" in self.level else ():
            if self.of_tier("level", tier) and self.of_tier("codec", tier) == "none":
                raise HierKVConfigError(
                    f"--hier-kv-level {tier}= has no effect without --hier-kv-codec {tier}=; add "
                    "the codec or leave the level out."
                )

    def _validate_remote_codec(self) -> None:
        codec = self.of_tier("codec", "remote")
        if codec not in codec_ids():
            raise HierKVConfigError(
                f"--hier-kv-codec must be one of {', '.join(codec_ids())}, got {shown(codec)}."
            )
        if codec != "none" and not self.remote_url:
            raise HierKVConfigError(
                f"--hier-kv-codec remote={codec} codes pages for a remote store and there is none; "
                "add --hier-kv-remote-url or leave remote= out."
            )
        if self.slo_ms < 0:
            raise HierKVConfigError(f"--hier-kv-slo-ms must be 0 or more, got {self.slo_ms:g}.")
        if self.slo_ms and codec == "none":
            raise HierKVConfigError(
                "--hier-kv-slo-ms chooses among levels of coded pages in a remote store; add "
                "--hier-kv-codec remote=hier or leave it out."
            )

    def of_tier(self, name: str, tier: str) -> str:
        """What ``codec`` or ``level`` says of a tier.

        Raises:
            HierKVConfigError: the text is neither one value nor a list of TIER=VALUE.
        """
        text: str = getattr(self, name)
        default = {"codec": "none", "level": ""}[name]
        if "=" not in text:
            # A codec alone is the disk's; a level alone is every tier's.
            return (text or default) if tier == "disk" or name != "codec" else default
        values: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not equals or key not in CODED_TIERS or key in values or not value:
                raise HierKVConfigError(
                    f"{flag_name(name)} must be a value or a list of TIER=VALUE with tiers among "
                    f"{', '.join(CODED_TIERS)}, each once, got {shown(text)}."
                )
            values[key] = value
        return values.get(tier, default)

    @property
    def record_codec(self) -> str:
        """Codec of the pages that are kept as records, on disk or in coded DRAM."""
        return self.of_tier("codec", "disk" if self.disk_dir else "host")

    @property
    def record_level(self) -> str:
        """Level of `record_codec`, as the flag gives it."""
        return self.of_tier("level", "disk" if self.disk_dir else "host")

    @property
    def coded_host_bytes(self) -> int:
        """Bytes of DRAM for coded pages; 0 without a codec for the tier `host`."""
        share = 0.0 if self.of_tier("codec", "host") == "none" else self.host_coded_share
        return int(self.host_size * share * GIB)

    @property
    def host_bytes(self) -> int:
        """Bytes of DRAM for pages as the engine needs them."""
        return int(self.host_size * GIB) - self.coded_host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk for segments; 0 without a disk tier."""
        return int(self.disk_size * GIB) if self.disk_dir else 0

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict of plain values, for pickling to other processes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HierKVConfig:
        """Builds and validates settings from plain values.

        Raises:
            HierKVConfigError: for an unknown name, a value of the wrong type or out of bounds.
        """
        known = {item.name: item for item in fields(cls)}
        clean: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise HierKVConfigError(
                    f"unknown setting hier_kv_{shown(name)[1:-1]}; the nearest ones are "
                    f"{', '.join(f'hier_kv_{each}' for each in _nearest(name, known))}, and "
                    "--help or docs/configuration.md has all."
                )
            clean[name] = coerce(name, value, type(known[name].default))
        config = cls(**clean)
        config.validate()
        return config

    @classmethod
    def from_json(cls, text: str, over: Mapping[str, Any]) -> HierKVConfig:
        """Builds settings from a JSON object of field names and values, with others over these."""
        return cls.from_dict(values_in_json(text) | dict(over))


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """The three settings whose names are most like one that is none."""
    return difflib.get_close_matches(name[:80], known, 3, cutoff=0.0)
