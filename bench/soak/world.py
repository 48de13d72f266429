"""Where a soak runs: its folders, two models that are noise to each other, the server's flags."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from runtime_cpu import inprocess
from testkit.server import TINYLM, Server

inprocess.prepare()

from testkit.kv_reader import publishing  # noqa: E402

# Small, so that every tier is full after some rounds and gives pages up from then on.
_SLOT_GB = 266_240 / (1 << 30)  # a page of the bundled model, with its header
HOST_PAGES = 120
DISK_MIB, REMOTE_MIB = 96, 128
POOL_TOKENS = 8192
# SGLang keeps 10,000 messages of events for who reads late, unless told otherwise: a megabyte a
# round until it has them.
_KEPT_EVENTS = 64
_START_S = 900.0  # for a server to start, on any machine

# SGLang ends a server whose books of rows and requests do not add up: at every idle moment unless
# told not to, and, with these, in every step. On a CPU torch keeps what it prepared for each length
# of a prompt, 1,024 of them unless told otherwise: plain SGLang grows by some 17 MiB a round then.
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}


@dataclass(frozen=True)
class World:
    """What all servers of a soak share.

    Attributes:
        folder: for everything written.
        models: the bundled model and another one, by name.
    """

    folder: Path
    models: Mapping[str, Path]

    @classmethod
    def make(cls, folder: Path) -> World:
        """Writes the other model, and makes the shared folder: a mount is there before a server."""
        made = cls(folder, {"first": TINYLM, "other": _strange(folder / "other")})
        made.remote.mkdir()
        return made

    @property
    def disk(self) -> Path:
        """The disk folder."""
        return self.folder / "disk"

    @property
    def remote(self) -> Path:
        """The shared folder."""
        return self.folder / "remote"

    def server(self, number: int, events: str) -> Server:
        """A server with every tier; it begins with the bundled model.

        Args:
            number: in its log's name.
            events: where it publishes its KV events.
        """
        hier = ["--enable-hier-kv", "--hier-kv-host-size", f"{(HOST_PAGES + 0.5) * _SLOT_GB:.9f}"]
        hier += ["--hier-kv-disk-dir", str(self.disk), "--hier-kv-disk-size", str(DISK_MIB / 1024)]
        hier += ["--hier-kv-disk-segment-size", "0.008", "--hier-kv-disk-free-floor", "0.01"]
        url = f"file://{self.remote}?size={REMOTE_MIB}MB&free=1"
        hier += ["--hier-kv-remote-url", url, "--hier-kv-truncation", "overflow"]
        hier += publishing(events, buffer_steps=_KEPT_EVENTS)
        return self._server(f"server-{number:03}", hier)

    def plain(self, model: str, name: str = "answers") -> Server:
        """Plain SGLang, for the answers or to be compared with; `name` is in its log's name."""
        args = ["--page-size", "64", "--sleep-on-idle", "--allow-auto-truncate"]
        return self._server(f"plain-{name}-{model}", args, self.models[model])

    def _server(self, name: str, args: list[str], model: Path = TINYLM) -> Server:
        return Server(
            ["--max-total-tokens", str(POOL_TOKENS), "--enable-metrics", *args],
            model=model,
            log_path=self.folder / f"{name}.log",
            env=ENVIRONMENT,
            start_timeout_s=_START_S,
            stop="kill",
        )


def _strange(folder: Path) -> Path:
    """The bundled model with every projection changed by as much as it is: other tokens and KV."""
    shutil.copytree(TINYLM, folder)
    file = folder / "model.safetensors"
    weights: dict[str, torch.Tensor] = load_file(str(file))
    generator = torch.Generator().manual_seed(1)
    for name in sorted(weights):
        if "proj" in name:
            values = weights[name].float()
            noise = torch.randn(values.shape, generator=generator) * values.std()
            weights[name] = (0.7 * (values + noise)).to(weights[name].dtype)
    save_file(weights, str(file), metadata={"format": "pt"})
    return folder
