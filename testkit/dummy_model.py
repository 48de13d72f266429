"""Models of any shape with random weights: a config, and SGLang's ``--load-format dummy``.

The tokenizer is the bundled model's, so the vocabulary is small; prompts are token ids.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from testkit.server import TINYLM

VOCAB = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
ARGS = ("--load-format", "dummy")


@dataclass(frozen=True)
class DummyModel:
    """A Llama architecture.

    Attributes:
        name: what reports call it.
        layers: L.
        hidden: model width.
        heads: query heads.
        kv_heads: H.
        head_dim: D.
        intermediate: width of the MLP.
        context: longest sequence.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def host_gb(self, num_pages: int, page_size: int) -> float:
        """`--hier-kv-host-size` of a tier for so many pages."""
        slot_bytes = self.kv_bytes_per_token * page_size * 1.02 + 4096
        return (num_pages + 0.5) * slot_bytes / 2**30

    def describe(self) -> str:
        """The shape in one line."""
        return (
            f"{self.name}: {self.layers} layers, hidden {self.hidden}, {self.heads} heads, "
            f"{self.kv_heads} KV heads of {self.head_dim}, MLP {self.intermediate}, "
            f"{self.kv_bytes_per_token >> 10} KiB of KV a token"
        )

    def write(self, folder: Path) -> Path:
        """Writes config and tokenizer into a new folder below `folder`; returns its path."""
        path = folder / self.name
        path.mkdir(parents=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(config, indent=1))
        for name in _TOKENIZER_FILES:
            if (TINYLM / name).exists():
                shutil.copy(TINYLM / name, path / name)
        return path
